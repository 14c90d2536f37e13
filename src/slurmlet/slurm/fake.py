"""A Slurm in memory, with a clock that is turned by hand: what tests of everything above stand on.

It ships with the package and passes the same contract tests as the real ones. Jobs start, run and end when told to
(`start`, `finish`), or by the clock (`advance`): time limits are kept, ended jobs are forgotten after MinJobAge, and the
accounts remember them. `hooks` run before a method does its work, and may raise or wait.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from slurmlet.base.errors import SlurmError
from slurmlet.model.host_lists import expand
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Capabilities, EndedJob, Grant, Job, JobSpec, Partition, SlurmNode

Hook = Callable[[], Awaitable[None] | None]
MIN_JOB_AGE_S = 300.0
_BATCH = Partition(
    name="batch", up=True, default=True, time_limit="infinite", nodes=2, nodes_usable=2, cpus=32, cpus_per_node=16,
    memory_mb=12000, memory_mb_per_node=6000, gpus=0, node_states={"idle": 2}, state="up",
)  # fmt: skip


def away() -> None:
    """A hook: nobody answers."""
    text = "Unable to contact slurm controller (connect failure)"
    raise SlurmError(text, reason="SlurmUnavailable", transient=True)


class FakeSlurm:
    def __init__(self, first_id: int = 101) -> None:
        self.now_s = 1_700_000_000.0
        self.queue: list[Job] = []
        self.accounts: dict[JobId, EndedJob] = {}
        self.listed_partitions: list[Partition] = [_BATCH]
        self.hosts = ["c1", "c2"]
        self.features = Capabilities("24.11.5", accounting=True)
        self.cancels_at_once = True  # else jobs stay until they are finished by hand
        # What was asked for, in order.
        self.submitted: list[JobSpec] = []
        self.cancelled: list[JobId] = []
        self.signalled: list[tuple[JobId, str]] = []
        self.looks = 0
        self.hooks: dict[str, Hook] = {}
        self._ids = itertools.count(first_id)
        self._specs: dict[JobId, JobSpec] = {}

    # What tests do with it

    def advance(self, seconds: float) -> None:
        """Let time pass: limits are reached, ended jobs forgotten."""
        self.now_s += seconds
        for job in list(self.queue):
            if _is_live(job) and job.ends_at_s is not None and job.ends_at_s <= self.now_s:
                self.finish(job.job_id, "TIMEOUT", signal=15, reason="TimeLimit")
        self.queue = [self._aged(job) for job in self.queue if not self._is_forgotten(job)]

    def start(self, job_id: JobId, host: str = "c1") -> None:
        job = self._job(job_id)
        ends_at_s = self.now_s + job.limit_s if job.limit_s is not None else None
        self._put(
            replace(job, state="RUNNING", reason="", nodes=host, starts_at_s=self.now_s, ends_at_s=ends_at_s)
        )

    def finish(
        self, job_id: JobId, state: str = "COMPLETED", code: int = 0, signal: int = 0, reason: str = "",
        by_uid: int | None = None,
    ) -> None:  # fmt: skip
        job = self._job(job_id)
        started_s = job.starts_at_s if job.nodes else None
        self._put(replace(job, state=state, reason=reason, ends_at_s=self.now_s))
        self.accounts[job_id] = EndedJob(
            job_id, state, code, signal, by_uid, started_at_s=started_s, ended_at_s=self.now_s
        )

    # What Slurm does

    async def submit(self, spec: JobSpec) -> JobId:
        self.submitted.append(spec)
        await self._hook("submit")
        partition = spec.asked_partition or self._default()
        if all(one.name != partition for one in self.listed_partitions):
            said = f"invalid partition specified: {partition}"
            raise SlurmError(f"sbatch failed (1): {said}", said=said)
        job_id = JobId(str(next(self._ids)))
        limit_s = _limit_s(spec)
        self._specs[job_id] = spec
        self.queue.append(
            Job(
                job_id, "PENDING", "Priority", "", partition, spec.comment, spec.name, spec.nodes or 1, limit_s,
                limit_s, self.now_s,
            )
        )  # fmt: skip
        return job_id

    async def jobs(self) -> list[Job]:
        self.looks += 1
        seen = list(self.queue)
        await self._hook("jobs")
        return seen

    async def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        await self._hook("ended")
        live = {job.job_id: EndedJob(job.job_id, job.state, 0, 0, None) for job in self.queue}
        known = {**live, **self.accounts}
        return {job_id: known[job_id] for job_id in job_ids if job_id in known}

    async def cancel(self, job_ids: Sequence[JobId]) -> None:
        await self._hook("cancel")
        self.cancelled += job_ids
        for job in list(self.queue):
            if self.cancels_at_once and job.job_id in job_ids and _is_live(job):
                self.finish(job.job_id, "CANCELLED", signal=15 if job.nodes else 0, by_uid=1000)

    async def signal(self, job_id: JobId, name: str) -> None:
        await self._hook("signal")
        self.signalled.append((job_id, name))
        if name == "KILL" and any(job.job_id == job_id and job.state == "RUNNING" for job in self.queue):
            self.finish(job_id, "FAILED", signal=9)

    async def nodes(self) -> list[SlurmNode]:
        await self._hook("nodes")
        names = frozenset(one.name for one in self.listed_partitions)
        return [SlurmNode(host, "idle", True, 16, 0, 6000, names) for host in self.hosts]

    async def partitions(self) -> list[Partition]:
        await self._hook("partitions")
        return list(self.listed_partitions)

    async def grants(self, job_id: JobId) -> dict[str, Grant]:
        await self._hook("grants")
        job = next((one for one in self.queue if one.job_id == job_id and one.state == "RUNNING"), None)
        if job is None:
            return {}
        spec = self._specs.get(job_id, JobSpec("", ""))
        cpus = (spec.cpus_per_task or 1) * (spec.tasks or 1)
        return {host: Grant(cpus, spec.memory_mb or 0, spec.gres) for host in expand(job.nodes)}

    async def capabilities(self) -> Capabilities:
        await self._hook("capabilities")
        return self.features

    # Within

    async def _hook(self, method: str) -> None:
        hook = self.hooks.get(method)
        waited = hook() if hook is not None else None
        if inspect.isawaitable(waited):
            await waited

    def _default(self) -> str:
        return next((one.name for one in self.listed_partitions if one.default), "")

    def _job(self, job_id: JobId) -> Job:
        return next(job for job in self.queue if job.job_id == job_id)

    def _put(self, changed: Job) -> None:
        self.queue = [changed if job.job_id == changed.job_id else job for job in self.queue]

    def _aged(self, job: Job) -> Job:
        if job.ends_at_s is None or not _is_live(job):
            return job
        return replace(job, left_s=max(0.0, job.ends_at_s - self.now_s))

    def _is_forgotten(self, job: Job) -> bool:
        ended_s = job.ends_at_s if not _is_live(job) else None
        return ended_s is not None and self.now_s - ended_s > MIN_JOB_AGE_S


def _is_live(job: Job) -> bool:
    return job.state in ("PENDING", "RUNNING")


def _limit_s(spec: JobSpec) -> float | None:
    written = spec.option("time")
    if written is not None and re.fullmatch(r"\d+", written):
        return float(written) * 60
    return float(spec.time_limit_min) * 60 if spec.time_limit_min is not None else None
