"""Carries out what autoscaler/decision.py decides, for all WorkerSets of one SlurmCluster at a time, and says why.

Facts are read anew each time, from the API server and from Slurm; nothing is carried out on facts that are missing. Each
step may be repeated, and the order (resume, drain, mark, replicas last) is such that an operator killed between any two of
them leaves what the next one goes on from.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.clock import Clock, rfc3339
from slurmlet.base.errors import SlurmError, SlurmletError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import Condition, status_patch
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.finalizers import is_deleting
from slurmlet.kube.work_queue import Backoff
from slurmlet.model.slurm_admin_values import DRAIN_REASON
from slurmlet.operators.provisioning import worker_annotations as marks
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import SetFacts, Snapshot
from slurmlet.operators.provisioning.autoscaler.decision import Decision, PolicyState, SetDecision, decide
from slurmlet.operators.provisioning.autoscaler.worker_sets import (
    InvalidWorkerSet,
    WorkerSet,
    parse_worker_set,
)
from slurmlet.operators.provisioning.provisioning_metrics import ProvisioningMetrics
from slurmlet.operators.provisioning.scale_target import (
    Member,
    ScaleTargets,
    Target,
    TargetProblem,
    annotations_of,
)
from slurmlet.operators.provisioning.slurm_access import Look, SlurmLooks

Obj = Mapping[str, Any]
API_VERSION = "slurmlet.io/v1alpha1"
SETS_PATH = "/apis/slurmlet.io/v1alpha1"
# After a conflict with another writer, and after a step of ours whose effect is to be seen.
_SOON_S, _STEP_S = 0.5, 2.0
_BACKOFF = Backoff(first_s=0.5, most_s=60.0)


@dataclass(frozen=True)
class ReadSet:
    """A WorkerSet as it was found: its object, and either a spec with a target, or what is wrong."""

    obj: Obj
    spec: WorkerSet | None = None
    target: Target | None = None
    problem: SlurmletError | None = None

    @property
    def name(self) -> str:
        return str(self.obj["metadata"]["name"])

    def facts(self) -> SetFacts | None:
        if self.spec is None:
            return None
        if self.target is None:
            return SetFacts(self.spec, 0, (), self.problem.message if self.problem else "not read")
        return SetFacts(self.spec, self.target.replicas, tuple(one.facts() for one in self.target.members))


async def read_set(targets: ScaleTargets, obj: Obj) -> ReadSet:
    """Whatever is wrong with one WorkerSet concerns this one alone."""
    try:
        spec = parse_worker_set(obj)
    except InvalidWorkerSet as error:
        return ReadSet(obj, problem=error)
    try:
        return ReadSet(obj, spec, await targets.read(str(obj["metadata"]["namespace"]), spec))
    except (TargetProblem, ApiError) as error:
        return ReadSet(obj, spec, problem=error)


def is_power_saving(obj: Obj) -> bool:
    """Slurm's own power saving decides for such a set (power_saving.py)."""
    return marks.POWER_SAVING_NODES in annotations_of(obj)


def snapshot_of(sets: list[ReadSet], look: Look) -> Snapshot:
    facts = [one.facts() for one in sets]
    known = tuple(one for one in facts if one is not None)
    return Snapshot(known, look.workers, look.jobs, partition_max_nodes=look.partition_limits)


class AutoscalerController:
    """Keys are SlurmClusters."""

    def __init__(
        self,
        client: ApiClient,
        worker_sets: Informer,
        slurm_clusters: Informer,
        targets: ScaleTargets,
        looks: SlurmLooks,
        events: EventRecorder,
        metrics: ProvisioningMetrics,
        clock: Clock,
        interval_s: float = 15.0,
    ) -> None:
        self._client, self._sets, self._clusters = client, worker_sets, slurm_clusters
        self._targets, self._looks, self._events = targets, looks, events
        self._metrics, self._clock, self._interval_s = metrics, clock, interval_s
        self._states: dict[str, PolicyState] = {}
        self.controller: Controller[str] = Controller("autoscaler", self.reconcile, backoff=_BACKOFF)
        slurm_clusters.feed(self.controller, key_of)
        worker_sets.feed(self.controller, _cluster_key)

    async def reconcile(self, key: str) -> Again:
        objs: list[Obj] = [
            one
            for one in self._sets.objects()
            if _cluster_key(one) == key and not is_deleting(one) and not is_power_saving(one)
        ]
        cluster = self._clusters.get(key)
        if cluster is None:
            return await self._without_cluster(key, objs)
        sets = [
            self._alone(one) for one in await asyncio.gather(*(read_set(self._targets, obj) for obj in objs))
        ]
        try:
            look = await self._looks.look(cluster, max_age_s=0.0)
        except SlurmError as error:
            await self._unreachable(key, cluster, sets, error)
            return self._interval_s
        await self._write(cluster, "SlurmCluster", Condition("Reachable", True, "Answered"), **_version(look))
        self._metrics.reachable(key, True)
        now_s = self._clock.time_s()
        decision = decide(snapshot_of(sets, look), self._states.get(key, PolicyState()), now_s)
        self._states[key] = decision.state
        await self._registered(sets, look)
        return await self._carry_out(cluster, sets, decision)

    def _alone(self, one: ReadSet) -> ReadSet:
        """Two sets that scale one target would undo each other: only the older one may."""
        if one.spec is None:
            return one
        rivals = [
            other
            for other in self._sets.objects()
            if target_key(other) == target_key(one.obj)
            and _age(other) < _age(one.obj)
            and not is_deleting(other)
        ]
        if not rivals:
            return one
        text = f"spec.scaleTargetRef: WorkerSet {rivals[0]['metadata']['name']} scales the same target"
        hint = "Give each WorkerSet a target of its own."
        return ReadSet(one.obj, one.spec, problem=TargetProblem(text, reason="TargetTaken", hint=hint))

    async def _carry_out(self, cluster: Obj, sets: list[ReadSet], decision: Decision) -> Again:
        again_s = self._interval_s
        decided = {one.name: one for one in decision.sets}
        for one in sets:
            made = decided.get(one.name)
            if made is None or one.target is None:
                await self._refuse(one)
                continue
            problem: SlurmletError | None = None
            try:
                if made.changes:
                    await self._steps(cluster, one, made)
                    again_s = min(again_s, _STEP_S)
            except (SlurmError, ApiError) as error:
                problem = error
                conflict = isinstance(error, ApiError) and error.status == 409
                again_s = min(again_s, _SOON_S if conflict else _STEP_S)
            await self._tell(one, made, problem)
        self._metrics.decided(key_of(cluster), decision)
        return again_s

    async def _steps(self, cluster: Obj, one: ReadSet, made: SetDecision) -> None:
        """In the order that decision.py asks for. Whatever is not done now is decided again from what was."""
        assert one.target is not None
        members = {member.name: member for member in one.target.members}
        for name in made.unmark:
            await self._targets.unmark(members[name])
        admin = await self._looks.admin(cluster)
        for node in made.undrain:
            await admin.resume(node)
        for node in made.drain:
            await admin.drain(node, f"{DRAIN_REASON} scale-in of WorkerSet {key_of(one.obj)}")
        if made.undrain or made.drain:
            self._looks.forget(cluster)
        for name in made.mark:
            await self._targets.mark(members[name])
        if made.replicas is not None and made.replicas != one.target.replicas:
            await self._targets.set_replicas(one.target, made.replicas)
        self._announce(one, made)

    def _announce(self, one: ReadSet, made: SetDecision) -> None:
        assert one.target is not None
        reason = "Draining"
        if made.replicas is not None and made.replicas != one.target.replicas:
            reason = "ScaledOut" if made.replicas > one.target.replicas else "ScaledIn"
        elif made.undrain:
            reason = "Resumed"
        self._metrics.acted(key_of(one.obj), reason)
        self._event(one.obj, "Normal", reason, "; ".join(made.reasons))

    async def _registered(self, sets: list[ReadSet], look: Look) -> None:
        """Write on each member when Slurm was first seen with it: after that, it did not fail to start."""
        for one in sets:
            for member in one.target.members if one.target is not None else ():
                known = look.by_name.get(member.node)
                if known is not None and known.registered and marks.REGISTERED not in member.annotations:
                    await self._targets.annotate(member, _first_seen(member))

    # What is told

    async def _tell(self, one: ReadSet, made: SetDecision, problem: SlurmletError | None) -> None:
        assert one.target is not None
        reason = "; ".join(made.reasons)
        last = (one.obj.get("status") or {}).get("lastDecision") or {}
        if (last.get("desired"), last.get("reason")) != (made.desired, reason):
            last = {"time": rfc3339(), "desired": made.desired, "reason": reason}
        paused = one.spec is not None and one.spec.paused
        if problem is not None:
            ready = Condition("Ready", False, problem.reason, told(problem))
            if not (isinstance(problem, ApiError) and problem.status == 409):
                self._event(one.obj, "Warning", "ScalingFailed", told(problem))
        else:
            ready = Condition("Ready", not paused, "Paused" if paused else "Deciding", reason)
        degraded = Condition("Degraded", problem is not None, problem.reason if problem else "AsExpected")
        await self._write(
            one.obj, "WorkerSet", ready, degraded,
            observedGeneration=int(one.obj["metadata"].get("generation") or 0), replicas=one.target.replicas,
            desired=made.desired, busy=made.busy, idle=made.idle, draining=made.draining,
            registering=made.starting, waitingJobs=made.waiting_jobs, lastDecision=last,
        )  # fmt: skip

    async def _refuse(self, one: ReadSet) -> None:
        """Bad input, or a target that is not there: said, and nothing changed."""
        problem = one.problem
        assert problem is not None
        await self._not_ready(one.obj, problem.reason, told(problem))

    async def _not_ready(self, obj: Obj, reason: str, message: str) -> None:
        ready, degraded = (
            Condition("Ready", False, reason, message),
            Condition("Degraded", True, reason, message),
        )
        generation = int(obj["metadata"].get("generation") or 0)
        if await self._write(obj, "WorkerSet", ready, degraded, observedGeneration=generation):
            self._event(obj, "Warning", reason, message)

    async def _unreachable(self, key: str, cluster: Obj, sets: list[ReadSet], error: SlurmError) -> None:
        """Fail closed: what cannot be seen is not changed."""
        self._metrics.reachable(key, False)
        if await self._write(
            cluster, "SlurmCluster", Condition("Reachable", False, error.reason, told(error))
        ):
            self._event(cluster, "Warning", error.reason, told(error), kind_of="SlurmCluster")
        for one in sets:
            if one.spec is None:
                await self._refuse(one)
            else:
                text = f"Slurm could not be asked, nothing is changed: {told(error)}"
                await self._not_ready(one.obj, "SlurmUnreachable", text)

    async def _without_cluster(self, key: str, objs: list[Obj]) -> Again:
        self._states.pop(key, None)
        for obj in objs:
            text = f"spec.slurmCluster: SlurmCluster {key.partition('/')[2]} was not found"
            await self._not_ready(obj, "SlurmClusterNotFound", text)
        return None

    async def _write(self, obj: Obj, kind: str, *conditions: Condition, **fields: Any) -> bool:
        """Whether there was something to write. A conflict is left to the next time."""
        patch = status_patch(obj, *conditions, **fields)
        if patch is None:
            return False
        metadata = obj["metadata"]
        plural = "workersets" if kind == "WorkerSet" else "slurmclusters"
        path = f"{SETS_PATH}/namespaces/{metadata['namespace']}/{plural}/{metadata['name']}/status"
        try:
            written = await self._client.patch(path, patch)
        except ApiError as error:
            if error.status not in (404, 409):
                raise
            return False
        (self._sets if kind == "WorkerSet" else self._clusters).keep(written)
        return True

    def _event(self, obj: Obj, kind: str, reason: str, message: str, kind_of: str = "WorkerSet") -> None:
        self._events.object_event(API_VERSION, kind_of, obj, kind, reason, message)


def target_key(worker_set: Obj) -> tuple[str, str, str, str]:
    """The same for two sets with the same target, whichever version of its kind they name."""
    ref = (worker_set.get("spec") or {}).get("scaleTargetRef") or {}
    group = str(ref.get("apiVersion") or "").rpartition("/")[0]
    return str(worker_set["metadata"]["namespace"]), group, str(ref.get("kind")), str(ref.get("name"))


def _age(obj: Obj) -> tuple[str, str]:
    return str(obj["metadata"]["creationTimestamp"]), str(obj["metadata"]["name"])


def _first_seen(member: Member) -> dict[str, str | None]:
    # The name is a fact by now: it must not change with the WorkerSet's spec.
    named = {marks.SLURM_NODE: member.node} if member.is_machine else {}
    return {marks.REGISTERED: rfc3339(), **named}


def _version(look: Look) -> dict[str, str]:
    versions = sorted({one.version for one in look.workers if one.version})
    return {"slurmVersion": versions[-1]} if versions else {}


def _cluster_key(worker_set: Obj) -> str | None:
    name = (worker_set.get("spec") or {}).get("slurmCluster")
    return f"{worker_set['metadata']['namespace']}/{name}" if name else None
