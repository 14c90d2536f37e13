"""What the hub counts of its own work, for `/metrics`: submissions and how long they took, requests to the API server, what
its controllers do."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from slurmlet.kube.controller import Controller
from slurmlet.model.histogram import Histogram
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Capabilities, EndedJob, Grant, Job, JobSpec, Partition, SlurmNode
from slurmlet.model.stats_summary import SLURM_REQUESTS, Family
from slurmlet.slurm.interface import Slurm


class Counts:
    def __init__(self) -> None:
        self.began_s = time.time()
        self.sbatch = Histogram()
        self.sbatch_failures = 0
        self._requests: Counter[tuple[str, int]] = Counter()
        self._slurm: Counter[str] = Counter()
        self._slurm_lately: deque[float] = deque()
        self._controllers: list[Controller[Any]] = []

    def follow(self, *controllers: Controller[Any]) -> None:
        """Tell of these controllers too."""
        self._controllers += controllers

    def api_answered(self, method: str, status: int) -> None:
        self._requests[method, status] += 1

    def slurm_asked(self, request: str) -> None:
        self._slurm[request] += 1
        # Accounting has a daemon and a database of its own: what counts here is slurmctld's load.
        if request != "ended":
            self._slurm_lately.append(time.monotonic())

    @property
    def slurm_requests_last_minute(self) -> int:
        while self._slurm_lately and self._slurm_lately[0] < time.monotonic() - 60:
            self._slurm_lately.popleft()
        return len(self._slurm_lately)

    def families(self) -> list[Family]:
        requests = Family(
            "slurmlet_api_requests_total", "counter", "Requests to the API server, by their answer"
        )
        for (method, status), count in sorted(self._requests.items()):
            requests.add(count, {"method": method, "code": str(status)})
        failures = Family("slurmlet_sbatch_failures_total", "counter", "Submissions that sbatch did not take")
        failures.add(self.sbatch_failures)
        took = self.sbatch.family("slurmlet_sbatch_duration_seconds", "How long sbatch took to take a job")
        slurm = Family("slurmlet_slurm_requests_total", "counter", "Requests to Slurm, by kind")
        for request, count in sorted(self._slurm.items()):
            slurm.add(count, {"request": request})
        lately = Family(SLURM_REQUESTS, "gauge", "Requests to slurmctld in the last 60 seconds")
        lately.add(self.slurm_requests_last_minute)
        return [requests, took, failures, slurm, lately, *self._of_controllers()]

    def _of_controllers(self) -> list[Family]:
        done = Family("slurmlet_controller_reconciles_total", "counter", "Reconciles, by controller")
        failed = Family(
            "slurmlet_controller_reconcile_errors_total", "counter", "Reconciles that failed, by controller"
        )
        failing = Family(
            "slurmlet_controller_failing_keys", "gauge", "Keys whose last reconcile failed, by controller"
        )
        depth = Family(
            "slurmlet_controller_queue_depth", "gauge", "Keys that wait for a worker, by controller"
        )
        for one in sorted(self._controllers, key=lambda one: one.name):
            label = {"controller": one.name}
            done.add(one.tally.reconciled, label)
            failed.add(one.tally.failed, label)
            failing.add(len(one.tally.failing), label)
            depth.add(len(one.queue), label)
        return [done, failed, failing, depth]


class CountedSlurm:
    """A Slurm whose requests are counted, and whose submissions are timed."""

    def __init__(self, slurm: Slurm, counts: Counts) -> None:
        self._slurm = slurm
        self._counts = counts

    async def submit(self, spec: JobSpec) -> JobId:
        self._counts.slurm_asked("submit")
        began_s = time.monotonic()
        try:
            job_id = await self._slurm.submit(spec)
        except Exception:
            self._counts.sbatch_failures += 1
            raise
        self._counts.sbatch.observe(time.monotonic() - began_s)
        return job_id

    async def jobs(self) -> list[Job]:
        self._counts.slurm_asked("jobs")
        return await self._slurm.jobs()

    async def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        self._counts.slurm_asked("ended")
        return await self._slurm.ended(job_ids)

    async def cancel(self, job_ids: Sequence[JobId]) -> None:
        self._counts.slurm_asked("cancel")
        await self._slurm.cancel(job_ids)

    async def signal(self, job_id: JobId, name: str) -> None:
        self._counts.slurm_asked("signal")
        await self._slurm.signal(job_id, name)

    async def nodes(self) -> list[SlurmNode]:
        self._counts.slurm_asked("nodes")
        return await self._slurm.nodes()

    async def partitions(self) -> list[Partition]:
        self._counts.slurm_asked("partitions")
        return await self._slurm.partitions()

    async def grants(self, job_id: JobId) -> dict[str, Grant]:
        self._counts.slurm_asked("grants")
        return await self._slurm.grants(job_id)

    async def capabilities(self) -> Capabilities:
        return await self._slurm.capabilities()
