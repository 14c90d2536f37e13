"""Objects that every cluster has for manifests to name: the RuntimeClasses, and the policies that hold gangs back.

Made anew where they are missing or changed; what somebody else made under the same name is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.model import gangs, runtime_classes

log = logging.getLogger(__name__)
_AGAIN_S = 1.0
_CLASSES = "/apis/node.k8s.io/v1/runtimeclasses"
_POLICIES = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicies"
_BINDINGS = "/apis/admissionregistration.k8s.io/v1/mutatingadmissionpolicybindings"
_OURS = {"app.kubernetes.io/managed-by": "slurmlet"}


async def offer(client: ApiClient, *, with_gangs: bool) -> None:
    """Until all is there; then it stays there."""
    for path, wanted in _objects(with_gangs):
        while True:
            try:
                await _ensure(client, path, wanted)
                break
            except ApiError as error:
                # Not `transient` alone: a server that is just starting refuses with 403 too.
                log.info("%s %s: %s", path, wanted["metadata"]["name"], error.message)
                await asyncio.sleep(_AGAIN_S)


def _objects(with_gangs: bool) -> list[tuple[str, dict[str, Any]]]:
    found = [(_CLASSES, {**_named(name), **rest}) for name, rest in runtime_classes.objects()]
    for name, spec in gangs.policies() if with_gangs else ():
        found.append((_POLICIES, {**_named(name), "spec": spec}))
        found.append((_BINDINGS, {**_named(name), "spec": {"policyName": name}}))
    return found


def _named(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": _OURS}}


async def _ensure(client: ApiClient, path: str, wanted: dict[str, Any]) -> None:
    try:
        await client.create(path, wanted)
    except ApiError as error:
        if error.status != 409:
            raise
        path = f"{path}/{wanted['metadata']['name']}"
        labels = (await client.get(path))["metadata"].get("labels") or {}
        if labels.items() >= _OURS.items():
            await client.patch(path, wanted)
