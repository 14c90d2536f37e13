"""One batched look at Slurm for all jobs: the safety net under what runners tell.

Polls fast while somebody waits for news, slowly when all is quiet; `refresh()` asks for a look now and waits for it.
Never fails a pod because Slurm did not answer: an unreachable slurmctld changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import pwd
import time
from collections.abc import Callable, Iterable

from slurmlet.base.errors import SlurmletError
from slurmlet.hub.hub_settings import Settings
from slurmlet.model import job_states, pod_job
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import Fate
from slurmlet.model.slurm_values import EndedJob, Job
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
# Two looks are never closer than this, however many ask.
_SHORTEST_S = 0.15
# … nor closer than this many times what the last one took.
_REST_PER_LOOK = 3.0


class SlurmWatch:
    """What Slurm knows of this cluster's jobs, kept fresh."""

    def __init__(self, settings: Settings, slurm: Slurm) -> None:
        self._settings = settings
        self._slurm = slurm
        self._subscribers: list[tuple[Callable[[], None], Callable[[], bool]]] = []
        self._jobs: dict[PodUid, Job] = {}
        self._by_id: dict[JobId, Job] = {}
        self._ended: dict[JobId, Fate] = {}
        self._accounting = _Accounting(slurm)
        self._wanted = asyncio.Event()
        self._looked = asyncio.Condition()
        self._begun = 0
        self._completed = 0

    def subscribe(self, looked: Callable[[], None], busy: Callable[[], bool]) -> None:
        """`looked` is called after each look; while `busy` says so, looks are frequent."""
        self._subscribers.append((looked, busy))

    @property
    def _busy(self) -> bool:
        return any(busy() for _, busy in self._subscribers)

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

    def job(self, uid: PodUid) -> Job | None:
        """The job of a pod that slurmctld remembers."""
        return self._jobs.get(uid)

    def owns(self, uid: PodUid, job_id: JobId) -> bool:
        """Whether Slurm's own record of the job names this pod."""
        job = self._by_id.get(job_id)
        return job is not None and pod_job.uid_of(self._settings.cluster_id, job.comment) == uid

    def all_jobs(self) -> dict[PodUid, Job]:
        return dict(self._jobs)

    def poke(self) -> None:
        """A look soon, without waiting for it."""
        self._wanted.set()

    async def refresh(self) -> None:
        """A look that began after this call."""
        async with self._looked:
            mark = self._begun
            self._wanted.set()
            await self._looked.wait_for(lambda: self.looked_since(mark))

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
        if fate.stage is job_states.Stage.ENDED:
            self._ended[job_id] = fate
        return fate

    def forget(self, job_id: JobId) -> None:
        self._ended.pop(job_id, None)

    async def run(self) -> None:
        while True:
            self._wanted.clear()
            self._begun += 1
            began_s = time.monotonic()
            try:
                listed = await self._slurm.jobs()
                self._take(listed)
            except SlurmletError as error:
                log.warning("Slurm's jobs are not known: %s", error.message)
                await asyncio.sleep(self._settings.busy_poll_s)
                continue
            async with self._looked:
                self._completed = self._begun
                self._looked.notify_all()
            for looked, _ in self._subscribers:
                looked()
            await self._rest(time.monotonic() - began_s)

    async def _rest(self, look_s: float) -> None:
        """Until the next look is due. With thousands of jobs a look is dear, to us and to slurmctld."""
        await asyncio.sleep(max(_SHORTEST_S, _REST_PER_LOOK * look_s))
        interval_s = self._settings.busy_poll_s if self._busy else self._settings.calm_poll_s
        try:
            async with asyncio.timeout(interval_s):
                await self._wanted.wait()
        except TimeoutError:
            pass

    def _take(self, listed: Iterable[Job]) -> None:
        found: dict[PodUid, Job] = {}
        by_id: dict[JobId, Job] = {}
        for job in listed:
            uid = pod_job.uid_of(self._settings.cluster_id, job.comment)
            if uid is not None:
                by_id[job.job_id] = job
            # Should a pod ever have two jobs, the claim in its directory lets one of them run it. The one that is still
            # there counts, then the older one.
            if uid is None or job_states.never_placed(job):
                continue
            if uid not in found or _rank(job) < _rank(found[uid]):
                found[uid] = job
        self._jobs = found
        self._by_id = by_id


class _Accounting:
    """How jobs ended. Those asked about while an answer is under way are asked about together, in the next question."""

    def __init__(self, slurm: Slurm) -> None:
        self._slurm = slurm
        self._asked: dict[JobId, asyncio.Future[EndedJob | None]] = {}
        self._turn = asyncio.Lock()

    async def of(self, job_id: JobId) -> EndedJob | None:
        answer = self._asked.get(job_id)
        if answer is None:
            answer = self._asked[job_id] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if not answer.done():
                await self._ask()
        return await answer

    async def _ask(self) -> None:
        asked, self._asked = self._asked, {}
        try:
            ended = await self._slurm.ended(list(asked))
        except SlurmletError as error:
            for answer in asked.values():
                answer.set_exception(error)
        else:
            for job_id, answer in asked.items():
                answer.set_result(ended.get(job_id))


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
