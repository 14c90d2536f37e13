"""Gangs: waits until all pods of one are there, asks Slurm for one allocation for them, lets them go when all of it serves.

Until then the API server holds the pods back (`model/gangs`). Everything is read again each turn: the pods, and the jobs
by their comment; a hub that is started anew goes on where the last one was. It never gives a pod of a gang to
the scheduler before every host of the allocation is a Ready node.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slurmlet.base.errors import RefusedPod, SlurmletError
from slurmlet.hub.allocations.agents import Agent, Agents
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.hub.runner_credentials import NODE_NAME_PREFIX, RunnerAuthority
from slurmlet.hub.runner_links import LinkLost
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.reflector import Reflector
from slurmlet.model import gangs, pool
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, stage_of
from slurmlet.model.pod_job import job_name
from slurmlet.model.pool_jobs import PoolJob
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
_TURN_S = 1.0
# A controller makes its pods one after another: no word about a gang that is only just coming.
_COMING_S = 5.0
# How long an allocation waits for pods that were there when it was asked for, and for those that replace ended ones.
_INCOMPLETE_S = 60.0
_EMPTY_S = 2.0
_REFUSED_S = 30.0
_ENDING_S = 10.0
Obj = dict[str, Any]


@dataclass
class _Seen:
    """What one gang was last found as, and since when: nothing that matters after a restart."""

    what: str = ""
    since_s: float = 0.0
    told: str = ""


class GangKeeper:
    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        slurm: Slurm,
        watch: JobWatch,
        agents: Agents,
        nodes: AllocationNodeController,
        authority: RunnerAuthority,
        events: EventRecorder,
        partition_nodes: Callable[[], list[Obj]],
    ) -> None:
        self._settings, self._client, self._slurm, self._events = settings, client, slurm, events
        self._watch = watch
        self._agents, self._nodes, self._authority = agents, nodes, authority
        self._partition_nodes = partition_nodes
        self._mark = 0  # of the last change that we asked Slurm for
        self._pods: dict[str, Obj] = {}
        self._seen: dict[str, _Seen] = {}
        self._ending: dict[str, float] = {}  # jobs whose agents were told to end, until when they may take
        self._wake, self._synced = asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        reflector = Reflector(
            self._client, "/api/v1/pods", self._changed, on_synced=self._synced.set, labelSelector=gangs.GANG
        )
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(reflector.run(), name="pods of gangs")
            await self._synced.wait()
            while True:
                self._wake.clear()
                # Without gangs Slurm is never asked.
                if not await self._safe_turn():
                    await self._wake.wait()
                try:
                    async with asyncio.timeout(_TURN_S):
                        await self._wake.wait()
                except TimeoutError:
                    pass

    def _changed(self, pod: Obj, gone: bool) -> None:
        if gone:
            self._pods.pop(pod["metadata"]["uid"], None)
        else:
            self._pods[pod["metadata"]["uid"]] = pod
        self._wake.set()

    async def _safe_turn(self) -> bool:
        try:
            return await self._turn()
        except SlurmletError as error:
            log.warning("gangs: %s", error)
            return True

    async def _turn(self) -> bool:
        """Whether there is more to do without news of pods."""
        # A job that was just asked for is not in an older list: whoever looks there asks for another.
        if not self._watch.looked_since(self._mark):
            return True
        jobs = self._watch.gang_jobs()
        pods: dict[str, list[Obj]] = {}
        for pod in self._pods.values():
            if not gangs.is_over(pod):
                pods.setdefault(gangs.key_of(pod), []).append(pod)
        await self._tidy({job.node for job in jobs.values()})
        for key in pods.keys() | jobs.keys():
            try:
                await self._keep(key, jobs.get(key), pods.get(key, []))
            except (SlurmletError, ApiError, LinkLost) as error:
                # One gang's trouble is not the others'.
                log.warning("gang %s: %s", key, error)
        self._seen = {key: seen for key, seen in self._seen.items() if key in pods or key in jobs}
        self._ending = {
            job.job_id: self._ending[job.job_id] for job in jobs.values() if job.job_id in self._ending
        }
        return bool(jobs) or any(gangs.is_held(pod) for found in pods.values() for pod in found)

    async def _keep(self, key: str, job: PoolJob | None, pods: Sequence[Obj]) -> None:
        held = [pod for pod in pods if gangs.is_held_by_us_alone(pod)]
        if job is None:
            await self._gather(key, held)
        elif pods:
            await self._attend(key, job, pods, held)
        elif stage_of(job.state) is Stage.QUEUED or self._for_s(key, "empty") > _EMPTY_S:
            await self._give_back(job)

    def _for_s(self, key: str, what: str) -> float:
        """How long the gang has been in this state."""
        seen, now_s = self._seen.setdefault(key, _Seen()), asyncio.get_running_loop().time()
        if seen.what != what:
            seen.what, seen.since_s = what, now_s
        return now_s - seen.since_s

    def _tell(self, key: str, pods: Sequence[Obj], kind: str, reason: str, message: str) -> None:
        seen = self._seen.setdefault(key, _Seen())
        told = " ".join([message, *(pod["metadata"]["uid"] for pod in pods)])
        if seen.told != told:
            seen.told = told
            for pod in pods:
                self._events.pod_event(pod, kind, reason, message)

    # Before there is an allocation

    async def _gather(self, key: str, held: Sequence[Obj]) -> None:
        if not held:
            return
        name, size = gangs.name_of(held[0]), await self._size(held[0])
        if not size:
            text = f"gang {name}: nobody says how many pods it has; set {gangs.SIZE_ANNOTATION}"
            self._tell(key, held, "Warning", "GangWithoutSize", text)
        elif len(held) < size:
            if self._for_s(key, f"{len(held)} of {size}") > _COMING_S:
                text = f"gang {name}: {len(held)} of {size} pods are there; none starts before all are"
                self._tell(key, held, "Normal", "GangIncomplete", text)
        elif self._seen.get(key, _Seen()).what != "refused" or self._for_s(key, "refused") > _REFUSED_S:
            await self._ask(key, held[:size])

    async def _size(self, pod: Obj) -> int:
        job = gangs.job_of(pod)
        found = None
        if job:
            path = f"/apis/batch/v1/namespaces/{pod['metadata']['namespace']}/jobs/{job}"
            found = await self._client.read(path)
        return gangs.size_of(pod, found)

    async def _ask(self, key: str, pods: Sequence[Obj]) -> None:
        name = gangs.name_of(pods[0])
        try:
            job_id = await self._submit(key, pods)
        except SlurmletError as error:
            if error.transient:
                raise
            self._for_s(key, "again")
            self._for_s(key, "refused")
            reason = "GangRefused" if not isinstance(error, RefusedPod) else error.reason
            self._tell(key, pods, "Warning", reason, f"gang {name}: {error}")
            return
        text = f"gang {name}: asked for one allocation for {len(pods)} pods, Slurm job {job_id}"
        self._tell(key, pods, "Normal", "GangSubmitted", text)
        self._wake.set()

    async def _submit(self, key: str, pods: Sequence[Obj]) -> JobId:
        name, files = f"gang-{key}-{secrets.token_hex(3)}", self._settings.files
        first, namespace = files.node(f"{name}-0"), pods[0]["metadata"]["namespace"]
        label = f"{gangs.name_of(pods[0])}.{namespace}.{self._settings.cluster}"
        spec = JobSpec(
            name=job_name(label, self._settings.cluster_id, name),
            script=gangs.script(str(files.runner), str(files.nodes / name)),
            comment=pool.comment(self._settings.cluster_id, name),
            partition=gangs.partition_for(pods[0], self._partition_nodes()),
            directory=str(first.root),
            output=str(first.job_log),
        )
        spec = gangs.sized(spec, pods)
        await asyncio.to_thread(self._equip, name, len(pods))
        try:
            return await self._slurm.submit(spec)
        finally:
            self._asked()

    def _asked(self) -> None:
        """Slurm was asked for a change: what it says from now on counts."""
        self._mark = self._watch.mark
        self._watch.expect("gangs", f"change after look {self._mark}")

    def _equip(self, name: str, most: int) -> None:
        """As many as there could be hosts: which of them Slurm will use is not known yet."""
        for number in range(most):
            node = f"{name}-{number}"
            self._authority.equip(self._settings.files.node(node), node, NODE_NAME_PREFIX)

    # While there is one

    async def _attend(self, key: str, job: PoolJob, pods: Sequence[Obj], held: Sequence[Obj]) -> None:
        under_way = any(not gangs.is_held(pod) for pod in pods)
        if not under_way and (size := await self._size(pods[0])) > len(held):
            if self._for_s(key, f"incomplete {job.job_id}") > _INCOMPLETE_S:
                log.info("gang %s: %s of %s pods; giving job %s back", key, len(held), size, job.job_id)
                await self._give_back(job)
        elif stage_of(job.state) is Stage.QUEUED:
            self._for_s(key, "queued")
            if job.reason:
                text = f"gang {gangs.name_of(pods[0])}: Slurm job {job.job_id} waits: {job.reason}"
                self._tell(key, held, "Normal", "GangQueued", text)
        elif len(self._serving(job)) == job.hosts:
            self._for_s(key, "serving")
            await asyncio.gather(*(self._let_go(pod, job) for pod in held))

    def _members(self, job: PoolJob) -> list[Agent]:
        return [agent for agent in self._agents if gangs.allocation_of(agent.name) == job.node]

    def _serving(self, job: PoolJob) -> list[Agent]:
        return [one for one in self._members(job) if one.alive and self._nodes.is_ready(one.name)]

    async def _let_go(self, pod: Obj, job: PoolJob) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        try:
            await self._client.patch(path, gangs.release_patch(pod, job.node))
        except ApiError as error:
            # Changed or deleted in this moment: the next turn looks again.
            if error.status not in (404, 409):
                raise

    async def _give_back(self, job: PoolJob) -> None:
        """Every agent ends by itself, so that Slurm sees a job that completed; what cannot be told is cancelled."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._ending.get(job.job_id, now_s):
            return
        members = self._members(job)
        if job.job_id not in self._ending and len(members) == job.hosts and all(one.alive for one in members):
            self._ending[job.job_id] = now_s + _ENDING_S
            for agent in members:
                if agent.link is not None:
                    await agent.link.tell({"type": "end", "grace_s": 0})
        else:
            try:
                await self._slurm.cancel([job.job_id])
            finally:
                self._asked()

    async def _tidy(self, allocations: set[str]) -> None:
        """Directories of allocations that are over, and of hosts they never had. Those of nodes go with their Node."""
        known = {agent.name for agent in self._agents}
        await asyncio.to_thread(self._remove, allocations, known)

    def _remove(self, allocations: set[str], known: set[str]) -> None:
        for path in self._settings.files.nodes.glob("gang-*"):
            if gangs.allocation_of(path.name) not in allocations and path.name not in known:
                shutil.rmtree(path, ignore_errors=True)
