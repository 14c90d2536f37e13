"""Nodes and their leases as the API server keeps them: the writes that every kind of node needs.

What people set on a Node (cordon, taints and labels of their own) is theirs and stays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slurmlet.base.clock import micro_time
from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError

NODES = "/api/v1/nodes"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
_NOT_READY = "node.kubernetes.io/not-ready"
Obj = dict[str, Any]


class NodeRecords:
    def __init__(
        self, client: ApiClient, lease_s: int, is_obsolete: Callable[[Obj], bool] = lambda _: False
    ) -> None:
        """`is_obsolete`: which taints an earlier version set and nobody needs now."""
        self._client = client
        self._is_obsolete = is_obsolete
        self._lease_s = lease_s
        self._leases: set[str] = set()

    async def make(self, wanted: Obj) -> Obj:
        try:
            return await self._client.create(NODES, wanted)
        except ApiError as error:
            if error.status != 409:
                raise
            # Ours again after a restart: labels follow Slurm; taints and cordon stay as people set them.
            path = f"{NODES}/{wanted['metadata']['name']}"
            return await self._client.patch(path, {"metadata": wanted["metadata"]})

    async def describe(self, name: str, status: Obj, is_ready: bool) -> Obj:
        node = await self._client.patch(f"{NODES}/{name}/status", {"status": status}, STRATEGIC)
        await self._clear_taints(node, is_ready)
        return node

    async def _clear_taints(self, node: Obj, is_ready: bool) -> None:
        """The API server taints every new node; the node controller would take the taint away seconds later."""
        taints = (node.get("spec") or {}).get("taints") or []
        kept = [
            taint
            for taint in taints
            if not (self._is_obsolete(taint) or (is_ready and taint["key"] == _NOT_READY))
        ]
        if kept == taints:
            return
        # With the version: a taint that a cordon adds in this moment must not be lost. The node controller does the
        # rest where we come too late.
        metadata = {"resourceVersion": node["metadata"]["resourceVersion"]}
        try:
            path = f"{NODES}/{node['metadata']['name']}"
            await self._client.patch(path, {"metadata": metadata, "spec": {"taints": kept}})
        except ApiError as error:
            if error.status != 409:
                raise

    async def remove(self, name: str) -> None:
        self._leases.discard(name)
        try:
            await self._client.delete(f"{NODES}/{name}", {})
        except ApiError as error:
            if error.status != 404:
                raise

    def forget(self, name: str) -> None:
        """The Node went, and its lease with it."""
        self._leases.discard(name)

    async def renew(self, name: str, uid: str | None) -> None:
        lease: Obj = {
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": name,
                "leaseDurationSeconds": self._lease_s,
                "renewTime": micro_time(),
            },
        }
        if uid is not None:
            owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": uid}
            lease["metadata"]["ownerReferences"] = [owner]
        if name in self._leases:
            try:
                await self._client.patch(f"{_LEASES}/{name}", lease)
                return
            except ApiError as error:
                if error.status != 404:
                    raise
        try:
            await self._client.create(_LEASES, lease)
        except ApiError as error:
            if error.status != 409:
                raise
            await self._client.patch(f"{_LEASES}/{name}", lease)
        self._leases.add(name)
