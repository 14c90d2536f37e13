"""The one watch of Slurm's jobs, for pods, pools, gangs and what comes next: one batched request tells about all of them.

The safety net under what runners tell. Never fails a pod because Slurm did not answer: an unreachable slurmctld changes
nothing. How often it asks is `look_pace`'s to say.
"""

from __future__ import annotations

import asyncio
import logging
import pwd
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace

from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmletError
from slurmlet.hub.agents import Agent
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.accounting import Accounting
from slurmlet.hub.jobs.look_pace import LookPace
from slurmlet.model import job_states, pod_job, pool_jobs
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import Fate, Stage
from slurmlet.model.pool_jobs import PoolJob
from slurmlet.model.slurm_values import EndedJob, Job
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
_REMEMBERED = 10_000


class JobWatch:
    """What Slurm knows of this user's jobs, kept fresh."""

    def __init__(self, settings: Settings, slurm: Slurm, clock: Clock | None = None) -> None:
        clock = clock or Clock()
        self._settings = settings
        self._slurm = slurm
        self._clock = clock
        self._pace = LookPace(clock, settings.busy_poll_s, settings.queued_poll_s, settings.calm_poll_s)
        self._listeners: list[Callable[[], None]] = []
        self._end_listeners: list[Callable[[int], None]] = []
        self._jobs: dict[PodUid, Job] = {}
        self._by_id: dict[JobId, Job] = {}
        self._ended: OrderedDict[JobId, Fate] = OrderedDict()
        self._accounting = Accounting(slurm, clock)
        self._wanted = asyncio.Event()
        self._looked = asyncio.Condition()
        self._taken_s = 0.0
        self._begun = 0
        self._completed = 0

    def subscribe(self, looked: Callable[[], None]) -> None:
        """`looked` is called after each look."""
        self._listeners.append(looked)

    def subscribe_ended(self, ended: Callable[[int], None]) -> None:
        """`ended` is called with the number of jobs, of whatever kind, that are no longer in the queue or running."""
        self._end_listeners.append(ended)

    # When to look

    @property
    def looked(self) -> bool:
        return self._completed > 0

    @property
    def mark(self) -> int:
        """A moment in time: a look with a higher number began after it."""
        return self._begun

    def looked_since(self, mark: int) -> bool:
        """Whether a whole look lies after `mark`; before that, a job's absence means nothing."""
        return self._completed > mark

    @property
    def quiet(self) -> bool:
        """Nobody has begun to wait for anything lately."""
        return self._pace.quiet

    def expect(self, who: str, what: str) -> None:
        """`who` (a pod, a pool …) waits for Slurm's word: looks are frequent for a while. Safe to repeat."""
        if self._pace.expect(who, what):
            self._wanted.set()

    def settle(self, who: str) -> None:
        self._pace.settle(who)

    def expect_node(self, agent: Agent) -> None:
        """An agent dialled in or hung up: its job has just begun, or is about to be over."""
        self.expect(f"node {agent.name}", f"{agent.job_id} {'serves' if agent.alive else 'is silent'}")

    async def refresh(self) -> None:
        """A look that began after this call."""
        async with self._looked:
            mark = self._begun
            self._wanted.set()
            await self._looked.wait_for(lambda: self.looked_since(mark))

    # What is known

    def job(self, uid: PodUid) -> Job | None:
        """The job of a pod that slurmctld remembers, by its comment or its name."""
        return self._jobs.get(uid)

    def by_id(self, job_id: JobId) -> Job | None:
        """Any job of this user's."""
        return self._by_id.get(job_id)

    def owns(self, uid: PodUid, job_id: JobId) -> bool:
        """Whether Slurm's own record of the job names this pod."""
        job = self._by_id.get(job_id)
        return job is not None and pod_job.uid_of(self._settings.cluster_id, job) == uid

    def all_jobs(self) -> dict[PodUid, Job]:
        return dict(self._jobs)

    def pool_jobs(self) -> list[PoolJob]:
        passed_s = self._clock.monotonic_s() - self._taken_s
        return [
            replace(one, left_s=max(0.0, one.left_s - passed_s)) if one.left_s is not None else one
            for one in pool_jobs.pool_jobs(self._settings.cluster_id, self._by_id.values())
        ]

    def gang_jobs(self) -> dict[str, PoolJob]:
        """By the key of the gang."""
        return pool_jobs.gang_jobs(self._settings.cluster_id, self._by_id.values())

    async def fate(self, job_id: JobId, ended_well: bool = False) -> Fate | None:
        """What became of a job; None while nobody can say (Slurm is away).

        `ended_well`: its runner told the end of it. When squeue says no other, accounting is not asked.
        """
        known = self._ended.get(job_id)
        if known is not None:
            return known
        in_queue = self._by_id.get(job_id)
        if in_queue is not None and not job_states.is_over(in_queue.state):
            return job_states.fate_of(in_queue)
        if in_queue is not None and ended_well and (fate := job_states.fate_of(in_queue)).by_itself:
            return fate
        try:
            ended = await self._accounting.of(job_id)
        except SlurmletError as error:
            log.warning("how job %s ended is not known yet: %s", job_id, error.message)
            return None
        fate = _combine(job_id, in_queue, ended)
        if fate.stage is Stage.ENDED:
            self._ended[job_id] = fate
            if len(self._ended) > _REMEMBERED:
                self._ended.popitem(last=False)
        return fate

    def forget(self, job_id: JobId) -> None:
        self._ended.pop(job_id, None)

    # Looking

    async def run(self) -> None:
        while True:
            self._wanted.clear()
            if await self._look():
                for looked in self._listeners:
                    looked()
            await self._rest()

    async def _look(self) -> bool:
        self._begun += 1
        began_s = self._clock.monotonic_s()
        try:
            listed = await self._slurm.jobs()
        except SlurmletError as error:
            log.warning("Slurm's jobs are not known: %s", error.message)
            self._pace.failed(limited=error.reason == "SlurmBusy")
            return False
        self._take(listed)
        self._pace.answered(self._clock.monotonic_s() - began_s)
        async with self._looked:
            self._completed = self._begun
            self._looked.notify_all()
        return True

    async def _rest(self) -> None:
        """Until the next look is due, or somebody wants one."""
        shortest_s = self._pace.shortest_s()
        await asyncio.sleep(shortest_s)
        queued = any(job_states.stage_of(job.state) is Stage.QUEUED for job in self._by_id.values())
        try:
            async with asyncio.timeout(max(0.0, self._pace.interval_s(queued) - shortest_s)):
                await self._wanted.wait()
        except TimeoutError:
            pass

    def _take(self, listed: Iterable[Job]) -> None:
        found: dict[PodUid, Job] = {}
        by_id: dict[JobId, Job] = {}
        for job in listed:
            by_id[job.job_id] = job
            uid = pod_job.uid_of(self._settings.cluster_id, job)
            # Should a pod ever have two jobs, the claim in its directory lets one of them run it. The one that is still
            # there counts, then the older one.
            if uid is None or job_states.never_placed(job):
                continue
            if uid not in found or _rank(job) < _rank(found[uid]):
                found[uid] = job
        known = [job_id for job_id, job in self._by_id.items() if not job_states.is_over(job.state)]
        ended = sum(job_id not in by_id or job_states.is_over(by_id[job_id].state) for job_id in known)
        self._jobs, self._by_id, self._taken_s = found, by_id, self._clock.monotonic_s()
        for listener in self._end_listeners if ended else ():
            listener(ended)


def _rank(job: Job) -> tuple[bool, int]:
    return job_states.is_over(job.state), int(job.job_id)


def _combine(job_id: JobId, in_queue: Job | None, ended: EndedJob | None) -> Fate:
    """Accounting may lag behind slurmctld: the one that says "over" is right."""
    if ended is not None and job_states.is_over(ended.state):
        names = {}
        if ended.cancelled_by_uid is not None:
            try:
                names[ended.cancelled_by_uid] = pwd.getpwuid(ended.cancelled_by_uid).pw_name
            except KeyError:
                pass
        return job_states.fate_of_ended(ended, names)
    if in_queue is not None:
        return job_states.fate_of(in_queue)
    if ended is not None:
        return job_states.fate_of_ended(ended)
    return job_states.fate_of_lost(job_id)
