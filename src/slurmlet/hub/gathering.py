"""Fetches what pods draw on: config maps, secrets, service account tokens, pull credentials."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from slurmlet.images.credentials import auths_from_secrets
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.model.sources import Needs, Sources, Token, config_map_data, needs, secret_data

Obj = Mapping[str, Any]


async def gather(client: ApiClient, pod: Obj, *, with_tokens: bool) -> Sources:
    """All sources of a pod that exist now; what is missing is simply absent (`Sources` complains when it matters)."""
    wanted: Needs = needs(pod)
    namespace = pod["metadata"]["namespace"]
    config_maps, secrets = await asyncio.gather(
        _objects(client, namespace, "configmaps", wanted.config_maps),
        _objects(client, namespace, "secrets", wanted.secrets),
    )
    tokens = {}
    if with_tokens:
        tokens = {token: await _token(client, pod, token) for token in wanted.tokens}
    return Sources(
        config_maps={name: config_map_data(obj) for name, obj in config_maps.items()},
        secrets={name: secret_data(obj) for name, obj in secrets.items()},
        tokens=tokens,
    )


async def pull_credentials(client: ApiClient, pod: Obj) -> dict[str, dict[str, str]]:
    """Registry credentials from the pod's imagePullSecrets. A missing secret is skipped, as the kubelet does."""
    names = [one.get("name", "") for one in pod["spec"].get("imagePullSecrets") or ()]
    if not names:
        return {}
    found = await _objects(client, pod["metadata"]["namespace"], "secrets", names)
    return auths_from_secrets(found.values())


async def _objects(client: ApiClient, namespace: str, kind: str, names: Iterable[str]) -> dict[str, Any]:
    async def one(name: str) -> tuple[str, Any]:
        try:
            return name, await client.get(f"/api/v1/namespaces/{namespace}/{kind}/{name}")
        except ApiError as error:
            if error.status == 404:
                return name, None
            raise

    found = await asyncio.gather(*(one(name) for name in names if name))
    return {name: obj for name, obj in found if obj is not None}


async def _token(client: ApiClient, pod: Obj, token: Token) -> str:
    metadata = pod["metadata"]
    account = pod["spec"].get("serviceAccountName") or "default"
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {
            "audiences": [token.audience] if token.audience else [],
            "expirationSeconds": token.expiry_s,
            "boundObjectRef": {
                "kind": "Pod",
                "apiVersion": "v1",
                "name": metadata["name"],
                "uid": metadata["uid"],
            },
        },
    }
    path = f"/api/v1/namespaces/{metadata['namespace']}/serviceaccounts/{account}/token"
    answer = await client.create(path, request)
    return str(answer["status"]["token"])
