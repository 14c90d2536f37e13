"""Gangs: waits until all pods of one are there, asks Slurm for one allocation for them, lets them go when all of it serves.

Until then the API server holds the pods back (`model/gangs`). A gang is a key; everything is read again at each look at it:
the pods, and the jobs by their comment. A hub that is started anew goes on where the last one was. It never gives a pod of
a gang to the scheduler before every host of the allocation is a Ready node.
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
from slurmlet.hub.agents import Agent, Agents
from slurmlet.hub.allocations.allocation_jobs import AllocationJobs, end
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.hub.runner_links import LinkLost
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import gangs
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, stage_of
from slurmlet.model.pool_jobs import PoolJob
from slurmlet.model.slurm_values import JobSpec

log = logging.getLogger(__name__)
_TURN_S = 1.0
# A controller makes its pods one after another: no word about a gang that is only just coming.
_COMING_S = 5.0
# How long an allocation waits for pods that were there when it was asked for, and for those that replace ended ones.
_INCOMPLETE_S = 60.0
_EMPTY_S = 2.0
_ENDING_S = 10.0
# What Slurm refused as it was asked for is asked for again, should the site change its mind.
_REFUSED = Backoff(first_s=30.0, most_s=600.0)
_TROUBLE = Backoff(first_s=_TURN_S, most_s=60.0)
_WORKERS = 4
_DIRECTORIES = "nodes"  # the one key of tidying
Obj = dict[str, Any]


@dataclass
class _Seen:
    """What one gang was last found as, and since when: nothing that matters after a restart."""

    what: str = ""
    since_s: float = 0.0
    told: str = ""
    refusals: int = 0
    refused: frozenset[str] = frozenset()  # UIDs of the pods that it was asked for
    again_s: float = 0.0  # when to ask again


class GangController:
    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        jobs: AllocationJobs,
        watch: JobWatch,
        agents: Agents,
        nodes: AllocationNodeController,
        events: EventRecorder,
        partition_nodes: Callable[[], list[Obj]],
    ) -> None:
        self._settings, self._client, self._jobs, self._watch = settings, client, jobs, watch
        self._agents, self._nodes = agents, nodes
        self._events, self._partition_nodes = events, partition_nodes
        self._asking: dict[
            str, int | None
        ] = {}  # allocations that no list can show yet, and from which look on it would
        self._seen: dict[str, _Seen] = {}
        self._ending: dict[str, float] = {}  # jobs whose agents were told to end, until when they may take
        self._pods = Informer(client, "/api/v1/pods", labelSelector=gangs.GANG)
        self._gangs = Controller(
            "gang", self.reconcile, workers=_WORKERS, backoff=_TROUBLE, on_failure=self._failed
        )
        self._tidying = Controller("gang directories", self._tidy, backoff=_TROUBLE)
        self._members: dict[str, set[str]] = {}  # pods by gang
        self._pods.on_change(self._pod_changed)
        watch.subscribe(self._looked)

    @property
    def controllers(self) -> tuple[Controller[str], ...]:
        return self._gangs, self._tidying

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pods.run(), name="pods of gangs")
            # An allocation whose pods are not known yet would be given back.
            await self._pods.synced.wait()
            tasks.create_task(self._gangs.run(), name="gang controller")
            tasks.create_task(self._tidying.run(), name="gang directories")

    def _looked(self) -> None:
        for key in self._watch.gang_jobs():
            self._gangs.add(key)
        self._asking = {
            name: mark
            for name, mark in self._asking.items()
            if mark is None or not self._watch.looked_since(mark)
        }
        self._tidying.add(_DIRECTORIES)

    async def reconcile(self, key: str) -> Again:
        if not self._jobs.are_known(_owner(key)):
            return _TURN_S
        job, pods = self._watch.gang_jobs().get(key), self._pods_of(key)
        if job is None and not any(gangs.is_held(pod) for pod in pods):
            self._seen.pop(key, None)
            self._jobs.forget(_owner(key))
            return None
        await self._keep(key, job, pods)
        return _TURN_S

    def _pod_changed(self, pod: Obj) -> None:
        key = gangs.key_of(pod)
        self._members.setdefault(key, set()).add(key_of(pod))
        self._gangs.add(key)

    def _pods_of(self, key: str) -> list[Obj]:
        found = {name: self._pods.get(name) for name in self._members.get(key, ())}
        pods = {name: pod for name, pod in found.items() if pod is not None and gangs.key_of(pod) == key}
        if pods:
            self._members[key] = set(pods)
        else:
            self._members.pop(key, None)
        return [pod for pod in pods.values() if not gangs.is_over(pod)]

    def _failed(self, key: str, error: Exception, _failures: int, _delay_s: float) -> None:
        # While the API server is away, events cannot be written either; a link that broke is looked at again.
        if isinstance(error, (ApiError, LinkLost)):
            return
        for pod in self._pods_of(key):
            self._events.pod_event(pod, "Warning", "GangNotKept", f"gang {gangs.name_of(pod)}: {told(error)}")

    async def _keep(self, key: str, job: PoolJob | None, pods: Sequence[Obj]) -> None:
        held = [pod for pod in pods if gangs.is_held_by_us_alone(pod)]
        if job is None:
            await self._gather(key, held)
        elif pods:
            await self._attend(key, job, pods, held)
        elif stage_of(job.state) is Stage.QUEUED or self._for_s(key, "empty") > _EMPTY_S:
            await self._give_back(key, job)

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
            text = f"gang {name}: its number of pods is unknown; set the annotation {gangs.SIZE_ANNOTATION}"
            self._tell(key, held, "Warning", "GangWithoutSize", text)
        elif len(held) < size:
            if self._for_s(key, f"{len(held)} of {size}") > _COMING_S:
                text = f"gang {name}: {len(held)} of {size} pods exist; none starts before all do"
                self._tell(key, held, "Normal", "GangIncomplete", text)
        elif self._may_ask(key, held[:size]):
            await self._ask(key, held[:size])

    def _may_ask(self, key: str, pods: Sequence[Obj]) -> bool:
        """Other pods under the gang's name may ask for something else: they are not held back by what was refused."""
        seen = self._seen.get(key, _Seen())
        return seen.refused != _uids(pods) or asyncio.get_running_loop().time() >= seen.again_s

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
            self._note_refusal(key, pods)
            reason = "GangRefused" if not isinstance(error, RefusedPod) else error.reason
            self._tell(key, pods, "Warning", reason, f"gang {name}: {error}")
            return
        text = f"gang {name}: submitted Slurm job {job_id}, one allocation for {len(pods)} pods"
        self._tell(key, pods, "Normal", "GangSubmitted", text)

    def _note_refusal(self, key: str, pods: Sequence[Obj]) -> None:
        seen = self._seen.setdefault(key, _Seen())
        seen.refusals = seen.refusals + 1 if seen.refused == _uids(pods) else 1
        seen.refused = _uids(pods)
        seen.again_s = asyncio.get_running_loop().time() + _REFUSED.delay_s(seen.refusals)

    async def _submit(self, key: str, pods: Sequence[Obj]) -> JobId:
        name, files = f"gang-{key}-{secrets.token_hex(3)}", self._settings.files
        label = f"{gangs.name_of(pods[0])}.{pods[0]['metadata']['namespace']}.{self._settings.cluster}"
        spec = JobSpec(
            name=name,
            script=gangs.script(str(files.runner), str(files.nodes / name)),
            partition=gangs.partition_for(pods[0], self._partition_nodes()),
        )
        # As many as there could be hosts: which of them Slurm will use is not known yet.
        nodes = [f"{name}-{number}" for number in range(len(pods))]
        self._asking[name] = None
        try:
            await self._jobs.equip(*nodes)
            return await self._jobs.submit(_owner(key), label, name, nodes[0], gangs.sized(spec, pods))
        finally:
            # If there is no job after all, tidying takes the directories away.
            self._asking[name] = self._watch.mark

    # While there is one

    async def _attend(self, key: str, job: PoolJob, pods: Sequence[Obj], held: Sequence[Obj]) -> None:
        under_way = any(not gangs.is_held(pod) for pod in pods)
        if not under_way and (size := await self._size(pods[0])) > len(held):
            if self._for_s(key, f"incomplete {job.job_id}") > _INCOMPLETE_S:
                log.info("gang %s: %s of %s pods; giving job %s back", key, len(held), size, job.job_id)
                await self._give_back(key, job)
        elif stage_of(job.state) is Stage.QUEUED:
            self._for_s(key, "queued")
            if job.reason:
                text = f"gang {gangs.name_of(pods[0])}: Slurm job {job.job_id} is pending: {job.reason}"
                self._tell(key, held, "Normal", "GangQueued", text)
        elif len(self._serving(job)) == job.hosts:
            self._for_s(key, "serving")
            await asyncio.gather(*(self._let_go(pod, job) for pod in held))

    def _agents_of(self, job: PoolJob) -> list[Agent]:
        return [agent for agent in self._agents if gangs.allocation_of(agent.name) == job.node]

    def _serving(self, job: PoolJob) -> list[Agent]:
        return [one for one in self._agents_of(job) if one.alive and self._nodes.is_ready(one.name)]

    async def _let_go(self, pod: Obj, job: PoolJob) -> None:
        metadata = pod["metadata"]
        path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"
        try:
            await self._client.patch(path, gangs.release_patch(pod, job.node))
        except ApiError as error:
            # Changed or deleted in this moment: the next turn looks again.
            if error.status not in (404, 409):
                raise

    async def _give_back(self, key: str, job: PoolJob) -> None:
        """Every agent ends by itself, so that Slurm sees a job that completed; what cannot be told is cancelled."""
        now_s = asyncio.get_running_loop().time()
        if now_s < self._ending.get(job.job_id, now_s):
            return
        members = self._agents_of(job)
        if job.job_id not in self._ending and len(members) == job.hosts and all(one.alive for one in members):
            self._ending[job.job_id] = now_s + _ENDING_S
            for agent in members:
                await end(agent)
        else:
            await self._jobs.cancel(_owner(key), job.job_id)

    async def _tidy(self, _key: str) -> Again:
        """Directories of allocations that are over, and of hosts they never had. Those of nodes go with their Node."""
        # Listed before it is said which are in use: one that is made meanwhile is not on the list.
        there = await asyncio.to_thread(lambda: list(self._settings.files.nodes.glob("gang-*")))
        jobs = self._watch.gang_jobs().values()
        self._ending = {one.job_id: self._ending[one.job_id] for one in jobs if one.job_id in self._ending}
        allocations = {one.node for one in jobs} | self._asking.keys()
        known = {agent.name for agent in self._agents}
        for path in there:
            if gangs.allocation_of(path.name) not in allocations and path.name not in known:
                await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
        return None


def _owner(key: str) -> str:
    return f"gang {key}"


def _uids(pods: Sequence[Obj]) -> frozenset[str]:
    return frozenset(pod["metadata"]["uid"] for pod in pods)
