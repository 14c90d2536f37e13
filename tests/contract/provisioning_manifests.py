"""The operator's own manifests, as they are installed; tests only let webhooks be called on loopback."""

from __future__ import annotations

from typing import Any

import yaml

from slurmlet.operators.provisioning.resource_definitions import packaging_dir

Obj = dict[str, Any]


def manifests(file: str = "install-with-scaling-webhook.yaml") -> list[Obj]:
    text = (packaging_dir() / "manifests" / file).read_text()
    return [one for one in yaml.safe_load_all(text) if one]


def webhook_configuration(name: str, made: str, url: str, namespace: str) -> Obj:
    """That of the manifests under another name, for one namespace, called at `url`."""
    found = next(one for one in manifests() if one["metadata"]["name"] == name and "webhooks" in one)
    for hook in found["webhooks"]:
        # Its path is not in the manifests: the operator adds one that ends in a token.
        assert "path" not in hook["clientConfig"]["service"]
        hook["clientConfig"] = {"url": url}
        hook["namespaceSelector"] = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
        hook["failurePolicy"] = "Fail"
    return {**found, "metadata": {"name": made}}
