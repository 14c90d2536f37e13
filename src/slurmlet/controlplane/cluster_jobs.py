"""The Slurm jobs of one cluster, told by their comment; all that `down` and `status` need of Slurm."""

from __future__ import annotations

import time

from slurmlet.base.errors import SlurmletError
from slurmlet.model.job_states import holds_resources
from slurmlet.model.pod_job import uid_of
from slurmlet.model.pool import node_of
from slurmlet.model.slurm_values import Job
from slurmlet.slurm.client import Scheduler, SlurmClient

GONE_S = 60.0
_POLL_S = 0.25
_AGAIN_S = 5.0


def live_jobs(cluster_id: str, slurm: Scheduler | None = None) -> list[Job]:
    slurm = slurm or SlurmClient()
    return [
        job
        for job in slurm.jobs()
        if (uid_of(cluster_id, job.comment) is not None or node_of(cluster_id, job.comment))
        and holds_resources(job.state)
    ]


def cancel_all(cluster_id: str, slurm: Scheduler | None = None, *, limit_s: float = GONE_S) -> int:
    """Cancel every job of the cluster and wait until Slurm holds nothing for them; returns how many there were."""
    slurm = slurm or SlurmClient()
    deadline_s = time.monotonic() + limit_s
    seen: set[str] = set()
    asked_s = float("-inf")
    while jobs := live_jobs(cluster_id, slurm):
        if time.monotonic() > deadline_s:
            raise SlurmletError(f"{len(jobs)} jobs do not end within {limit_s:g} s, such as {jobs[0].job_id}")
        seen.update(job.job_id for job in jobs)
        # Again from time to time: an sbatch that was under way when the hub ended shows up late.
        if time.monotonic() - asked_s > _AGAIN_S:
            slurm.cancel([job.job_id for job in jobs])
            asked_s = time.monotonic()
        time.sleep(_POLL_S)
    return len(seen)
