"""Keeps one Node per Slurm partition: made, described, its lease renewed, taken away when the partition goes."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from slurmlet.base.clock import micro_time, rfc3339
from slurmlet.base.errors import SlurmletError
from slurmlet.hub.settings import Settings
from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.model import nodes
from slurmlet.model.slurmfacts import Partition
from slurmlet.slurm.client import Scheduler

log = logging.getLogger(__name__)
_NODES = "/api/v1/nodes"
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
# As often as a kubelet writes an unchanged status.
_STATUS_REFRESH_S = 300.0


class NodeKeeper:
    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        slurm: Scheduler,
        events: EventRecorder,
        hub: nodes.HubFacts,
    ) -> None:
        self._settings = settings
        self._client = client
        self._slurm = slurm
        self._events = events
        self._hub = hub
        self._partitions: dict[str, Partition] = {}  # by node name
        self._written: dict[str, tuple[Partition, float]] = {}
        self._leases: set[str] = set()
        self._fresh = False

    def partition_of(self, node: str) -> Partition | None:
        return self._partitions.get(node)

    async def run(self) -> None:
        """Look at the partitions now and then; renew leases more often."""
        next_look_s = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if clock() >= next_look_s:
                    await self._look()
                    next_look_s = clock() + self._settings.partition_poll_s
                # Without news from Slurm the leases run out, and the nodes become NotReady: that is the truth.
                if self._fresh:
                    await asyncio.gather(*(self._renew(name) for name in self._partitions))
                wait_s = self._settings.lease_renew_s
            except (SlurmletError, ApiError) as error:
                log.warning("nodes: %s", error.message)
                wait_s = 1.0
            await asyncio.sleep(wait_s)

    async def _look(self) -> None:
        self._fresh = False
        listed = await asyncio.to_thread(self._slurm.partitions)
        self._fresh = True
        chosen = self._settings.partitions
        mine = [one for one in listed if chosen is None or one.name in chosen]
        names = nodes.node_names(one.name for one in mine)
        now = {str(names[one.name]): one for one in mine}
        await asyncio.gather(*(self._keep(name, partition) for name, partition in now.items()))
        await self._remove_others(set(now))
        self._partitions = now

    async def _keep(self, name: str, partition: Partition) -> None:
        written, when = self._written.get(name, (None, 0.0))
        now_s = asyncio.get_running_loop().time()
        if written == partition and now_s - when < _STATUS_REFRESH_S:
            return
        node = await self._make(name, partition)
        status = nodes.node_status(partition, name, self._hub, rfc3339(), node.get("status") or {})
        await self._client.patch(f"{_NODES}/{name}/status", {"status": status}, STRATEGIC)
        if nodes.ready(partition)[0]:
            await self._clear_not_ready(name, node)
        if written is not None and nodes.ready(written) != nodes.ready(partition):
            is_ready, reason, message = nodes.ready(partition)
            self._events.node_event(name, "Normal" if is_ready else "Warning", reason, message)
        self._written[name] = (partition, now_s)

    async def _make(self, name: str, partition: Partition) -> dict[str, Any]:
        wanted = nodes.node_object(partition, name)
        try:
            return await self._client.create(_NODES, wanted)
        except ApiError as error:
            if error.status != 409:
                raise
        # Ours again after a restart: labels follow Slurm, taints stay as people set them.
        return await self._client.patch(f"{_NODES}/{name}", {"metadata": wanted["metadata"]})

    async def _clear_not_ready(self, name: str, node: dict[str, Any]) -> None:
        """The API server taints every new node; the node controller would take the taint away seconds later."""
        taints = (node.get("spec") or {}).get("taints") or []
        kept = [taint for taint in taints if taint["key"] != "node.kubernetes.io/not-ready"]
        if kept != taints:
            await self._client.patch(f"{_NODES}/{name}", {"spec": {"taints": kept}})

    async def _remove_others(self, wanted: set[str]) -> None:
        """Nodes of partitions that are gone (or no longer chosen), known by our label."""
        listed = await self._client.get(_NODES, labelSelector=f"{nodes.KIND_LABEL}=partition")
        for node in listed.get("items") or ():
            name = node["metadata"]["name"]
            if name in wanted:
                continue
            log.info("node %s: its partition is gone", name)
            await self._client.delete(f"{_NODES}/{name}", {})
            self._written.pop(name, None)

    async def _renew(self, name: str) -> None:
        lease = {
            "metadata": {"name": name, "namespace": "kube-node-lease"},
            "spec": {
                "holderIdentity": name,
                "leaseDurationSeconds": self._settings.lease_s,
                "renewTime": micro_time(),
            },
        }
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
