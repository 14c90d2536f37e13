"""Kinds that tests of `slurmlet provision` need at the API server: installed once, then found."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.operators.provisioning.resource_definitions import DEFINITIONS

Obj = dict[str, Any]


def definition(group: str, kind: str, versions: Sequence[str], *, scale: bool = False) -> Obj:
    """A kind of somebody else's, with any fields: what is tested is who reads and writes it, not its schema."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    subresources: Obj = {"status": {}}
    if scale:
        subresources["scale"] = {
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        }
    plural = f"{kind.lower()}s"
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}",
            "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": version == versions[-1],
                    "subresources": subresources,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "properties": {"spec": anything, "status": anything},
                        }
                    },
                }
                for version in versions
            ],
        },
    }


METAL3 = "infrastructure.cluster.x-k8s.io"
CLUSTER_API = "cluster.x-k8s.io"
SLINKY = "slinky.slurm.net"


def foreign_kinds() -> list[Obj]:
    both = ("v1beta1", "v1beta2")
    return [
        definition(METAL3, "Metal3Data", both),
        definition(METAL3, "Metal3DataTemplate", both),
        definition(SLINKY, "Controller", ("v1beta1",)),
        definition(CLUSTER_API, "Cluster", both),
        definition(CLUSTER_API, "Machine", both),
        definition(CLUSTER_API, "MachineDeployment", both, scale=True),
    ]


async def install(client: ApiClient, definitions: Sequence[Obj]) -> None:
    """Those that are there stay as they are; all are served when it returns."""
    for definition in definitions:
        try:
            await client.create(DEFINITIONS, definition)
        except ApiError as error:
            if error.status != 409:
                raise
    for definition in definitions:
        spec = definition["spec"]
        for version in spec["versions"]:
            await _served(client, f"/apis/{spec['group']}/{version['name']}/{spec['names']['plural']}")


async def _served(client: ApiClient, path: str) -> None:
    while True:
        try:
            await client.get(path)
            return
        except ApiError as error:
            # 429: its storage is being made.
            if error.status not in (404, 429):
                raise
            await asyncio.sleep(0.05)
