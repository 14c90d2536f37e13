"""Keeps one Node per Slurm partition: made, described, its lease renewed, taken away when the partition goes.

A Node that somebody deletes is made again at once: its pods' jobs run on, and upstream's garbage collection would end
them 40 s later. What people set on it (cordon, labels, taints of their own) is theirs and stays.

Two controllers: one looks at Slurm's partitions, one has a key for each Node. The lease says that this hub lives, not that
slurmctld or the home answers: pods go on running without them, and so does the lease.
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
from slurmlet.kube.controller import Again, Controller, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflector import Reflector
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import partition_node
from slurmlet.model.slurm_values import Partition
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
_OURS = f"{partition_node.KIND_LABEL}=partition"
# As often as a kubelet writes an unchanged status.
_STATUS_REFRESH_S = 300.0
_WORKERS = 8
# A turn that comes for another reason shortly before a renewal is due renews too.
_EARLY = 0.9
_SLURM = "Slurm"  # the one key of the listing
# However many people ask to see partitions as they are now: one look in this time.
_REFRESH_S = 2.0

Obj = dict[str, Any]


class PartitionNodeController:
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
        self._looked_s = float("-inf")
        # Looks are numbered: one is due while the last whole look is not later than the one that was wanted.
        self._begun = self._completed = 0
        self._wanted = -1
        self._progress = asyncio.Condition()
        self._renewed_s: dict[str, float] = {}
        # The supervisor of an earlier version runs a scheduler without this configuration: there the taints rank
        # Nodes until the next `up`.
        ranked = settings.files.scheduler_config.exists()
        self._records = NodeRecords(
            client, settings.lease_s, partition_node.is_obsolete_taint if ranked else lambda _: False
        )
        self._reflector = Reflector(client, NODES, self._changed, labelSelector=_OURS)
        self._node = Controller(
            "node", self.reconcile, workers=_WORKERS, backoff=_backoff(settings), on_failure=self._failed
        )
        self._listing = Controller(
            "partitions", self._reconcile_partitions, backoff=_backoff(settings), on_failure=self._look_failed
        )

    @property
    def controllers(self) -> tuple[Controller[str], ...]:
        return self._node, self._listing

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
            self._renewed_s.pop(name, None)
            self._node.add(name)

    async def run(self) -> None:
        self._listing.add(_SLURM)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listing.run(), name="partition listing")
            tasks.create_task(self._node.run(), name="node controller")

    async def refresh(self) -> None:
        """Look at Slurm's partitions now, also at rest. Returns when the Nodes say what was found.

        It may take for ever: the caller says how long it waits.
        """
        if asyncio.get_running_loop().time() - self._looked_s < _REFRESH_S:
            return
        mark = self._wanted = self._begun
        # A Slurm that did not answer, or limits the rate of requests, is asked again when its back-off says so.
        if not self._listing.queue.failures(_SLURM):
            self._listing.add(_SLURM)
        async with self._progress:
            await self._progress.wait_for(lambda: self._completed > mark and self._all_written())

    def _all_written(self) -> bool:
        return all(
            name in self._written and self._written[name][:2] == (partition, self._images)
            for name, partition in self._partitions.items()
        )

    async def _note_progress(self) -> None:
        async with self._progress:
            self._progress.notify_all()

    async def reconcile(self, name: str) -> Again:
        """One Node: its lease, then what it says; a new one the other way round, for its lease names it as owner."""
        partition = self._partitions.get(name)
        if partition is None:
            return None
        known = name in self._objects
        if known:
            await self._renew(name)
        await self._keep(name, partition)
        if not known:
            await self._renew(name)
        return self._settings.lease_renew_s

    async def _reconcile_partitions(self, _key: str) -> Again:
        clock = asyncio.get_running_loop().time
        if clock() - self._looked_s >= self._look_interval_s or self._completed <= self._wanted:
            self._begun += 1
            await self._look()
            self._looked_s, self._completed = clock(), self._begun
            await self._note_progress()
        # How long to wait may change meanwhile: somebody begins to wait for Slurm.
        return min(self._settings.partition_poll_s, self._settings.lease_renew_s)

    def _failed(self, name: str, error: Exception, _failures: int, _delay_s: float) -> None:
        # While the API server is away, events cannot be written either.
        if not isinstance(error, ApiError):
            self._events.node_event(name, "Warning", "NodeNotUpdated", told(error))

    def _look_failed(self, _key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        if not isinstance(error, (ApiError, SlurmletError)):
            for name in self._partitions:
                self._events.node_event(name, "Warning", "PartitionsNotKnown", told(error))

    @property
    def _look_interval_s(self) -> float:
        quiet = self._quiet()
        return self._settings.calm_partition_poll_s if quiet else self._settings.partition_poll_s

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
        for name in self._partitions:
            self._node.add(name)
        await self._remove_others()

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
        await self._note_progress()

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
            self._objects.pop(name, None)
            self._renewed_s.pop(name, None)

    async def _renew(self, name: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._renewed_s.get(name, float("-inf")) < self._settings.lease_renew_s * _EARLY:
            return
        known = self._objects.get(name)
        await self._records.renew(name, known["metadata"]["uid"] if known else None)
        self._renewed_s[name] = now_s


def _backoff(settings: Settings) -> Backoff:
    """Never longer than between two renewals: a Node whose lease runs out is taken for dead."""
    return Backoff(first_s=min(1.0, settings.lease_renew_s), most_s=settings.lease_renew_s)
