"""Keeps one Node per Slurm partition: made, described, its lease renewed, taken away when the partition goes.

A Node that somebody deletes is made again at once: its pods' jobs run on, and upstream's garbage collection would end
them 40 s later. What people set on it (cordon, labels, taints of their own) is theirs and stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from slurmlet.base.clock import rfc3339
from slurmlet.base.errors import SlurmletError
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.nodes.node_objects import NODES, NodeRecords
from slurmlet.images.image_store import Image
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflector import Reflector
from slurmlet.model import partition_node
from slurmlet.model.slurm_values import Partition
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
_OURS = f"{partition_node.KIND_LABEL}=partition"
# As often as a kubelet writes an unchanged status.
_STATUS_REFRESH_S = 300.0

Obj = dict[str, Any]


class NodeKeeper:
    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        slurm: Slurm,
        events: EventRecorder,
        hub: partition_node.HubFacts,
        images: Callable[[], list[Image]] = list,
        quiet: Callable[[], bool] = lambda: False,
    ) -> None:
        """`quiet`: nobody waits for anything of Slurm's, so that its partitions may be looked at less often."""
        self._quiet = quiet
        self._settings = settings
        self._client = client
        self._slurm = slurm
        self._events = events
        self._hub = hub
        self._list_images = images
        self._images: list[Obj] = []
        self._partitions: dict[str, Partition] = {}  # by node name
        self._written: dict[str, tuple[Partition, list[Obj], float]] = {}
        self._objects: dict[str, Obj] = {}
        # The supervisor of an earlier version runs a scheduler without this configuration: there the taints rank
        # Nodes until the next `up`.
        ranked = settings.files.scheduler_config.exists()
        self._records = NodeRecords(
            client, settings.lease_s, partition_node.is_obsolete_taint if ranked else lambda _: False
        )
        self._vanished = asyncio.Event()
        self._reflector = Reflector(client, NODES, self._changed, labelSelector=_OURS)

    def partition_of(self, node: str) -> Partition | None:
        return self._partitions.get(node)

    def objects(self) -> list[Obj]:
        """Our Nodes as the API server has them."""
        return list(self._objects.values())

    def made_at(self, node: str) -> str:
        return str(self._objects.get(node, {}).get("metadata", {}).get("creationTimestamp") or "")

    async def watch(self) -> None:
        """Sees Nodes that others delete."""
        await self._reflector.run()

    def _changed(self, node: Obj, gone: bool) -> None:
        name = node["metadata"]["name"]
        if not gone:
            self._objects[name] = node
            return
        # A Node made again is another object: what is heard late of the old one must not take it away.
        if self._objects.get(name, node)["metadata"]["uid"] == node["metadata"]["uid"]:
            self._objects.pop(name, None)
        if name in self._partitions:
            log.info("node %s was deleted, but its partition is there: registering it again", name)
            self._written.pop(name, None)
            self._records.forget(name)
            self._vanished.set()

    async def run(self) -> None:
        """Look at the partitions now and then; renew leases more often."""
        looked_s = float("-inf")
        clock = asyncio.get_running_loop().time
        while True:
            try:
                if self._vanished.is_set():
                    self._vanished.clear()
                    await self._keep_all()
                # The lease says that this hub lives, not that slurmctld answers: pods go on running without it.
                await asyncio.gather(*(self._renew(name) for name in self._partitions))
                if clock() - looked_s >= self._look_interval_s:
                    first = not self._partitions
                    await self._look()
                    looked_s = clock()
                    if first:
                        continue
                wait_s = self._settings.lease_renew_s
            except (SlurmletError, ApiError) as error:
                log.warning("nodes: %s", error.message)
                wait_s = 1.0
            await self._pause(wait_s)

    @property
    def _look_interval_s(self) -> float:
        quiet = self._quiet()
        return self._settings.calm_partition_poll_s if quiet else self._settings.partition_poll_s

    async def _pause(self, wait_s: float) -> None:
        try:
            async with asyncio.timeout(wait_s):
                await self._vanished.wait()
        except TimeoutError:
            pass

    async def _look(self) -> None:
        listed = await self._slurm.partitions()
        chosen = self._settings.partitions
        mine = [one for one in listed if chosen is None or one.name in chosen]
        names = partition_node.node_names(one.name for one in mine)
        stored = await asyncio.to_thread(self._list_images)
        self._images = partition_node.image_list(
            (one.reference, one.repo_digest, one.size_bytes) for one in stored
        )
        self._partitions = {str(names[one.name]): one for one in mine}
        await self._keep_all()
        await self._remove_others()

    async def _keep_all(self) -> None:
        await asyncio.gather(*(self._keep(name, partition) for name, partition in self._partitions.items()))

    async def _keep(self, name: str, partition: Partition) -> None:
        written, images, when = self._written.get(name, (None, None, 0.0))
        now_s = asyncio.get_running_loop().time()
        if (written, images) == (partition, self._images) and now_s - when < _STATUS_REFRESH_S:
            return
        node = self._objects[name] = await self._records.make(partition_node.node_object(partition, name))
        status = partition_node.node_status(
            partition, name, self._hub, rfc3339(), node.get("status") or {}, self._images
        )
        await self._records.describe(name, status, partition_node.ready(partition)[0])
        if written is not None and partition_node.ready(written)[:2] != partition_node.ready(partition)[:2]:
            is_ready, reason, message = partition_node.ready(partition)
            self._events.node_event(name, "Normal" if is_ready else "Warning", reason, message)
        self._written[name] = (partition, self._images, now_s)

    async def _remove_others(self) -> None:
        """Nodes of partitions that are gone (or no longer chosen), known by our label."""
        listed = await self._client.get(NODES, labelSelector=_OURS)
        for node in listed.get("items") or ():
            name = node["metadata"]["name"]
            if name in self._partitions:
                continue
            log.info("node %s: its partition is gone", name)
            await self._records.remove(name)
            self._written.pop(name, None)

    async def _renew(self, name: str) -> None:
        known = self._objects.get(name)
        await self._records.renew(name, known["metadata"]["uid"] if known else None)
