"""What the hub counts of its own work, for `/metrics`: submissions and how long they took, requests to the API server."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import JobSpec
from slurmlet.model.stats_summary import Family
from slurmlet.slurm.interface import Slurm

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Histogram:
    """Observed from several threads."""

    def __init__(self, bounds: Sequence[float] = _BOUNDS_S) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        with self._lock:
            self._counts[bisect_left(self._bounds, value)] += 1
            self._sum += value

    def family(self, name: str, text: str) -> Family:
        family = Family(name, "histogram", text)
        with self._lock:
            counts, total = list(self._counts), self._sum
        running = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            running += count
            family.samples.append(("_bucket", {"le": bound}, running, None))
        family.samples.extend([("_sum", {}, total, None), ("_count", {}, running, None)])
        return family


class Counts:
    def __init__(self) -> None:
        self.began_s = time.time()
        self.sbatch = Histogram()
        self.sbatch_failures = 0
        self._requests: Counter[tuple[str, int]] = Counter()

    def api_answered(self, method: str, status: int) -> None:
        self._requests[method, status] += 1

    def families(self) -> list[Family]:
        requests = Family(
            "slurmlet_api_requests_total", "counter", "Requests to the API server, by their answer"
        )
        for (method, status), count in sorted(self._requests.items()):
            requests.add(count, {"method": method, "code": str(status)})
        failures = Family("slurmlet_sbatch_failures_total", "counter", "Submissions that sbatch did not take")
        failures.add(self.sbatch_failures)
        took = self.sbatch.family("slurmlet_sbatch_duration_seconds", "How long sbatch took to take a job")
        return [requests, took, failures]


class CountedSlurm:
    """A Slurm whose submissions are timed."""

    def __init__(self, slurm: Slurm, counts: Counts) -> None:
        self._counts = counts
        self._submit = slurm.submit
        self.jobs, self.ended = slurm.jobs, slurm.ended
        self.cancel, self.signal = slurm.cancel, slurm.signal
        self.nodes, self.partitions = slurm.nodes, slurm.partitions
        self.grants, self.capabilities = slurm.grants, slurm.capabilities

    async def submit(self, spec: JobSpec) -> JobId:
        began_s = time.monotonic()
        try:
            job_id = await self._submit(spec)
        except Exception:
            self._counts.sbatch_failures += 1
            raise
        self._counts.sbatch.observe(time.monotonic() - began_s)
        return job_id
