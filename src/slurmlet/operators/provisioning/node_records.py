"""Slurm's records of workers kept right: those of machines that are gone are deleted, addresses of pod workers corrected.

A record is only ever deleted where all of this holds for a while: it is of a dynamic node, named as workers of a set are; no
Machine or pod stands for it; its slurmd does not answer; no job is there; and no person drained it. A drain of ours that its
WorkerSet no longer follows, because somebody deleted it, is taken back.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmError
from slurmlet.kube.controller import Again, Controller, Informer, key_of
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.finalizers import is_deleting
from slurmlet.kube.work_queue import Backoff
from slurmlet.model.slurm_admin_values import DRAIN_REASON, WorkerNode
from slurmlet.operators.provisioning import worker_annotations as marks
from slurmlet.operators.provisioning.autoscaler.worker_sets import WorkerSet
from slurmlet.operators.provisioning.autoscaler_controller import API_VERSION, ReadSet, read_set
from slurmlet.operators.provisioning.scale_target import Member, ScaleTargets, annotations_of
from slurmlet.operators.provisioning.slurm_access import Look, SlurmLooks

Obj = Mapping[str, Any]
# How long a record must be without a machine. A machine that reboots is seen again long before.
GHOST_AFTER_S = 60.0
_BACKOFF = Backoff(first_s=1.0, most_s=15.0)
_OUR_DRAIN = re.compile(re.escape(DRAIN_REASON) + r" scale-in of WorkerSet (\S+/\S+)")


class NodeRecordController:
    """Keys are SlurmClusters."""

    def __init__(
        self,
        worker_sets: Informer,
        slurm_clusters: Informer,
        targets: ScaleTargets,
        looks: SlurmLooks,
        events: EventRecorder,
        clock: Clock,
        interval_s: float = 15.0,
    ) -> None:
        self._sets, self._clusters, self._targets = worker_sets, slurm_clusters, targets
        self._looks, self._events, self._clock = looks, events, clock
        self._interval_s = interval_s
        self._since_s: dict[tuple[str, str], float] = {}  # (cluster, node) → since when nothing stands for it
        self.controller: Controller[str] = Controller("node-records", self.reconcile, backoff=_BACKOFF)
        slurm_clusters.feed(self.controller, key_of)

    async def reconcile(self, key: str) -> Again:
        cluster = self._clusters.get(key)
        if cluster is None:
            return None
        namespace, _, name = key.partition("/")
        objs = [
            one
            for one in self._sets.objects()
            if one["metadata"]["namespace"] == namespace and one["spec"].get("slurmCluster") == name
        ]
        # Slurm first: a machine that is made and registers in between is then in the list, not in the look.
        look = await self._looks.look(cluster)
        sets = list(await asyncio.gather(*(read_set(self._targets, one) for one in objs)))
        await self._addresses(cluster, sets, look)
        # With a set that cannot be read, nobody knows which machines there are.
        if all(one.problem is None for one in sets):
            await self._ghosts(key, cluster, sets, look)
        await self._forgotten_drains(cluster, look)
        return self._interval_s

    async def _ghosts(self, key: str, cluster: Obj, sets: Sequence[ReadSet], look: Look) -> None:
        present = {member.node for one in sets if one.target for member in one.target.members}
        now_s = self._clock.monotonic_s()
        found: dict[tuple[str, str], float] = {}
        for worker in look.workers:
            owner = next((one for one in sets if one.spec and is_named_as(worker.name, one.spec)), None)
            if owner is None or worker.name in present or not is_ghost(worker) or look.in_use(worker.name):
                continue
            since_s = found[key, worker.name] = self._since_s.get((key, worker.name), now_s)
            if now_s - since_s >= GHOST_AFTER_S:
                await self._delete(cluster, owner, worker)
        self._since_s = {mark: at for mark, at in self._since_s.items() if mark[0] != key} | found

    async def _delete(self, cluster: Obj, owner: ReadSet, worker: WorkerNode) -> None:
        admin = await self._looks.admin(cluster)
        if not worker.drain:
            # Were it to come back this moment, no job may start before its record is gone.
            await admin.drain(worker.name, f"{DRAIN_REASON} no machine stands for the node any more")
        try:
            await admin.delete(worker.name)
        except SlurmError as error:
            self._event(owner.obj, "Warning", "RecordNotDeleted", f"node {worker.name}: {error.said}")
            return
        finally:
            self._looks.forget(cluster)
        self._event(owner.obj, "Normal", "RecordDeleted", f"node {worker.name}: its machine is gone")

    async def _addresses(self, cluster: Obj, sets: Sequence[ReadSet], look: Look) -> None:
        """Since 24.05 each registration sets NodeAddr to the name, which only Kubernetes' DNS knows."""
        for one in sets:
            for member in one.target.members if one.target is not None else ():
                address = "" if member.is_machine else pod_address(member, one.obj)
                worker = look.by_name.get(member.node)
                if worker is None or not address or worker.address == address or not worker.registered:
                    continue
                await (await self._looks.admin(cluster)).set_address(worker.name, address)
                text = f"node {worker.name}: NodeAddr {address} (it was {worker.address})"
                self._event(one.obj, "Normal", "AddressCorrected", text)
                self._looks.forget(cluster)

    async def _forgotten_drains(self, cluster: Obj, look: Look) -> None:
        for worker in look.workers:
            named = _OUR_DRAIN.match(worker.reason) if worker.drained_by_us else None
            owner = self._sets.get(named[1]) if named else None
            if named and (owner is None or is_deleting(owner)):
                await (await self._looks.admin(cluster)).resume(worker.name)
                self._looks.forget(cluster)

    def _event(self, worker_set: Obj, kind: str, reason: str, message: str) -> None:
        self._events.object_event(API_VERSION, "WorkerSet", worker_set, kind, reason, message)


def is_named_as(name: str, spec: WorkerSet) -> bool:
    """Whether a node of this name can only be (or have been) a worker of the set."""
    return name.startswith(f"{spec.node_name_prefix}{spec.target.name}-")


def is_ghost(worker: WorkerNode) -> bool:
    """As far as Slurm tells: nobody is there, and nobody but us wants it to be as it is."""
    foreign = worker.drain and not worker.drained_by_us
    return worker.dynamic and not worker.responding and not foreign


def pod_address(member: Member, worker_set: Obj) -> str:
    status = member.obj.get("status") or {}
    wanted = annotations_of(worker_set).get(marks.NODE_ADDRESS, "PodIP")
    return str(status.get("hostIP" if wanted == "HostIP" else "podIP") or "")
