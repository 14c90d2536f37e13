"""Machines leave Slurm before they are taken apart: hooks of Cluster API, held from the control side.

Every Machine of a WorkerSet gets the hooks. Once it is being deleted, by the autoscaler or by hand: its node is drained in
Slurm, its jobs end by themselves, the node's record is deleted and seen to be gone, and only then the hooks are taken off.
What is next follows from what Slurm and the Machine say now: whoever comes after a crash goes on from there. While Slurm
does not answer, they stay. No job is ever ended here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.base.clock import Clock, parse_rfc3339, rfc3339
from slurmlet.base.errors import SlurmError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.finalizers import is_deleting
from slurmlet.kube.work_queue import Backoff
from slurmlet.model.slurm_admin_values import DRAIN_REASON, WorkerNode
from slurmlet.operators.provisioning import worker_annotations as marks
from slurmlet.operators.provisioning.autoscaler.worker_sets import (
    DRAIN_DEADLINE_S,
    STARTUP_DEADLINE_S,
    DrainPolicy,
    InvalidWorkerSet,
    WorkerSet,
    parse_worker_set,
)
from slurmlet.operators.provisioning.scale_target import annotations_of, node_name
from slurmlet.operators.provisioning.slurm_access import Look, SlurmLooks

Obj = Mapping[str, Any]
_DEPLOYMENT_LABEL = "cluster.x-k8s.io/deployment-name"
_SET_LABEL = "cluster.x-k8s.io/set-name"
# How soon to look again after a step of ours.
_STEP_S = 1.0
_BACKOFF = Backoff(first_s=1.0, most_s=15.0)


class DetachController:
    def __init__(
        self,
        client: ApiClient,
        machines: Informer,
        machines_path: str,
        api_version: str,
        worker_sets: Informer,
        slurm_clusters: Informer,
        looks: SlurmLooks,
        events: EventRecorder,
        clock: Clock,
        interval_s: float = 15.0,
    ) -> None:
        self._client, self._machines, self._root = client, machines, machines_path
        self._api_version = api_version
        self._sets, self._clusters, self._looks = worker_sets, slurm_clusters, looks
        self._events, self._clock, self._interval_s = events, clock, interval_s
        self._reported: set[str] = set()  # uids whose deadline was reported by this process
        self.controller: Controller[str] = Controller(
            "detach", self.reconcile, workers=4, backoff=_BACKOFF, on_failure=self._on_failure
        )
        machines.feed(self.controller, key_of)
        worker_sets.on_change(lambda _: self._all())

    def _all(self) -> None:
        for machine in self._machines.objects():
            self.controller.add(key_of(machine))

    async def reconcile(self, key: str) -> Again:
        machine = self._machines.get(key)
        if machine is None:
            return None
        owner = self._set_of(machine)
        hooks = [one for one in marks.HOOKS if one in annotations_of(machine)]
        if is_deleting(machine):
            return await self._detach(machine, owner) if hooks else None
        if owner is not None and len(hooks) < len(marks.HOOKS):
            await self._annotate(machine, {
                **dict.fromkeys(marks.HOOKS, marks.HOOK_OWNER),
                marks.WORKER_SET: owner["metadata"]["name"],
                marks.SLURM_CLUSTER: owner["spec"]["slurmCluster"],
            })  # fmt: skip
        elif owner is None and hooks:
            # Its WorkerSet was deleted: what nobody manages is not held up by us.
            await self._annotate(machine, dict.fromkeys(_TAKEN_OFF))
        return None

    # The steps of a Machine that is to go

    async def _detach(self, machine: Obj, owner: Obj | None) -> Again:
        found = annotations_of(machine)
        if found.get(marks.SKIP_DRAIN) == "true":
            return await self._release(machine, f"the annotation {marks.SKIP_DRAIN} says so")
        spec = _parsed(owner)
        node = _node_of(machine, spec)
        cluster = self._cluster_of(machine, owner)
        # Not one of a moment ago: the node may have registered, and been given a job, since.
        look = await self._looks.look(cluster, max_age_s=0.0)
        worker = look.by_name.get(node)
        if worker is None:
            if self._may_still_register(machine, spec):
                text = f"Slurm has no node {node} yet; it may register, and be given a job, while it is taken apart"
                self._event(machine, "Normal", "WaitingForRegistration", text)
                return self._interval_s
            return await self._release(machine, f"Slurm has no node {node}")
        if look.in_use(node):
            return await self._wait(machine, spec, cluster, worker, look)
        if worker.powered_down:
            # By Slurm's own power saving, which starts no job there before it has called for the node again.
            return await self._release(machine, f"Slurm has powered down node {node}")
        if not worker.drain:
            # Also where nothing runs now: a job may start this moment. The next look tells.
            return await self._drain(machine, cluster, worker)
        return await self._remove(machine, cluster, worker)

    def _may_still_register(self, machine: Obj, spec: WorkerSet | None) -> bool:
        """Whether the host may be booting: it has what it boots from, was never seen in Slurm, and its time is not over."""
        found = annotations_of(machine)
        if marks.REGISTERED in found or marks.DRAINING_SINCE in found:
            return False
        booted_from = ((machine.get("spec") or {}).get("bootstrap") or {}).get("dataSecretName")
        made_s = parse_rfc3339(machine["metadata"]["creationTimestamp"]).timestamp()
        deadline_s = spec.startup_deadline_s if spec is not None else STARTUP_DEADLINE_S
        return bool(booted_from) and self._clock.time_s() < made_s + deadline_s

    async def _drain(self, machine: Obj, cluster: Obj, worker: WorkerNode) -> Again:
        reason = f"{DRAIN_REASON} Machine {key_of(machine)} is being deleted"
        await (await self._looks.admin(cluster)).drain(worker.name, reason)
        self._looks.forget(cluster)
        self._event(machine, "Normal", "SlurmDrain", f"node {worker.name} is drained in Slurm")
        await self._note_drain(machine)
        return _STEP_S

    async def _note_drain(self, machine: Obj) -> None:
        if marks.DRAINING_SINCE not in annotations_of(machine):
            await self._annotate(machine, {marks.DRAINING_SINCE: rfc3339()})

    async def _wait(
        self, machine: Obj, spec: WorkerSet | None, cluster: Obj, worker: WorkerNode, look: Look
    ) -> Again:
        """Until the jobs there have ended by themselves."""
        policy = spec.drain_policy if spec is not None else DrainPolicy.WAIT
        if policy is DrainPolicy.NEVER:
            if worker.drained_by_us:
                # A job was quicker than the drain: under this policy it is not in its way.
                await (await self._looks.admin(cluster)).resume(worker.name)
                self._looks.forget(cluster)
        elif not worker.drain:
            return await self._drain(machine, cluster, worker)
        self._report(machine, spec, worker, look)
        return self._interval_s

    def _report(self, machine: Obj, spec: WorkerSet | None, worker: WorkerNode, look: Look) -> None:
        names = ", ".join(str(job.job_id) for job in look.jobs_on(worker.name)[:10]) or "being cleaned up"
        self._event(machine, "Normal", "WaitingForJobs", f"node {worker.name} still has jobs: {names}")
        since = annotations_of(machine).get(marks.DRAINING_SINCE) or machine["metadata"]["deletionTimestamp"]
        waited_s = self._clock.time_s() - parse_rfc3339(since).timestamp()
        deadline_s = spec.drain_deadline_s if spec is not None else DRAIN_DEADLINE_S
        uid = str(machine["metadata"]["uid"])
        if waited_s > deadline_s and uid not in self._reported:
            self._reported.add(uid)
            self._event(
                machine, "Warning", "DrainDeadlineExceeded",
                f"node {worker.name} has jobs for {waited_s:.0f} s since its drain ({names}); they are not ended. Cancel "
                f"them, wait, or set the annotation {marks.SKIP_DRAIN}=true to let the Machine go all the same.",
            )  # fmt: skip

    async def _remove(self, machine: Obj, cluster: Obj, worker: WorkerNode) -> Again:
        """Drained, and nothing runs there: out of Slurm, and let go once Slurm has been seen without it."""
        if worker.cloud:
            return await self._power_down(machine, cluster, worker)
        if not worker.dynamic:
            # A node of slurm.conf has its record for ever. It stays drained until a Machine stands for it again.
            return await self._release(machine, f"node {worker.name} is drained")
        # Written before the record goes: afterwards nothing else would tell that there was one.
        await self._note_drain(machine)
        admin = await self._looks.admin(cluster)
        try:
            await admin.delete(worker.name)
        except SlurmError as error:
            if error.transient:
                raise
            return await self._release(machine, f"node {worker.name} is drained, and stays: {error.said}")
        finally:
            self._looks.forget(cluster)
        if worker.name in (await self._looks.look(cluster, max_age_s=0.0)).by_name:
            return _STEP_S
        return await self._release(machine, f"node {worker.name} was removed from Slurm")

    async def _power_down(self, machine: Obj, cluster: Obj, worker: WorkerNode) -> Again:
        """A CLOUD node that nobody suspended: were it left drained, Slurm could not call for it again."""
        admin = await self._looks.admin(cluster)
        await admin.power_down(worker.name)
        if worker.drained_by_us:
            await admin.resume(worker.name)
        self._looks.forget(cluster)
        return await self._release(machine, f"node {worker.name} is powered down in Slurm")

    async def _release(self, machine: Obj, why: str) -> Again:
        await self._annotate(machine, dict.fromkeys(_TAKEN_OFF))
        self._reported.discard(str(machine["metadata"]["uid"]))
        self._event(machine, "Normal", "Detached", f"may be taken apart: {why}")
        return None

    # Whose it is, and what is written on it

    def _set_of(self, machine: Obj) -> Obj | None:
        namespace = machine["metadata"].get("namespace")
        mine = [one for one in self._sets.objects() if one["metadata"].get("namespace") == namespace]
        return next((one for one in mine if is_member(machine, one)), None)

    def _cluster_of(self, machine: Obj, owner: Obj | None) -> Obj:
        name = owner["spec"]["slurmCluster"] if owner else annotations_of(machine).get(marks.SLURM_CLUSTER)
        cluster = self._clusters.get(f"{machine['metadata'].get('namespace')}/{name}")
        if cluster is None:
            raise SlurmError(
                f"SlurmCluster {name} was not found: nobody can tell whether jobs run on the Machine",
                reason="SlurmClusterNotFound", transient=True,
                hint=f"Make it again, or set the annotation {marks.SKIP_DRAIN}=true on the Machine.",
            )  # fmt: skip
        return cluster

    async def _annotate(self, machine: Obj, annotations: Mapping[str, str | None]) -> None:
        metadata = machine["metadata"]
        path = f"{self._root}/namespaces/{metadata['namespace']}/machines/{metadata['name']}"
        change = {"metadata": {"uid": metadata["uid"], "annotations": dict(annotations)}}
        try:
            self._machines.keep(await self._client.patch(path, change))
        except ApiError as error:
            # It is gone, or another has its name.
            if error.status not in (404, 409):
                raise

    def _event(self, machine: Obj, kind: str, reason: str, message: str) -> None:
        self._events.object_event(self._api_version, "Machine", machine, kind, reason, message)

    def _on_failure(self, key: str, error: Exception, failures: int, delay_s: float) -> None:
        machine = self._machines.get(key)
        if machine is not None and is_deleting(machine) and failures in (1, 5):
            text = f"the Machine is held: {told(error)}; again in {delay_s:.0f} s"
            self._event(machine, "Warning", "DetachFailed", text)


_TAKEN_OFF = (*marks.HOOKS, marks.OLD_PRE_DRAIN_HOOK)


def is_member(machine: Obj, worker_set: Obj) -> bool:
    """Whether the Machine is one of the WorkerSet's target, as far as the Machine itself tells."""
    target = (worker_set.get("spec") or {}).get("scaleTargetRef") or {}
    metadata = machine["metadata"]
    labels = metadata.get("labels") or {}
    kind, name = target.get("kind"), target.get("name")
    if kind == "MachineDeployment":
        return bool(labels.get(_DEPLOYMENT_LABEL) == name)
    if kind == "MachineSet" and labels.get(_SET_LABEL) == name:
        return True
    owners = metadata.get("ownerReferences") or ()
    return any(one.get("kind") == kind and one.get("name") == name for one in owners)


def _parsed(owner: Obj | None) -> WorkerSet | None:
    """None where there is no sound spec: then what is safe by default holds."""
    try:
        return parse_worker_set(owner) if owner is not None else None
    except InvalidWorkerSet:
        return None


def _node_of(machine: Obj, spec: WorkerSet | None) -> str:
    if spec is not None:
        return node_name(machine, spec, True)
    return annotations_of(machine).get(marks.SLURM_NODE) or str(machine["metadata"]["name"])
