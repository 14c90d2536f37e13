"""The Slurm jobs of one cluster, told by their comment; all that `down` and `status` need of Slurm."""

from __future__ import annotations

import asyncio
import time

from slurmlet.base.errors import SlurmletError
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.model.job_states import holds_resources
from slurmlet.model.pod_job import uid_of
from slurmlet.model.pool import node_of
from slurmlet.model.slurm_values import Job
from slurmlet.slurm.interface import Slurm
from slurmlet.slurm.session import opened

GONE_S = 60.0
_POLL_S = 0.25
_AGAIN_S = 5.0


def live_jobs(config: ClusterConfig) -> list[Job]:
    async def listed() -> list[Job]:
        async with opened(config.connection) as slurm:
            return await jobs_of(config.id, slurm)

    return asyncio.run(listed())


def cancel_all(config: ClusterConfig) -> int:
    """Cancel every job of the cluster and wait until Slurm holds nothing for them; returns how many there were."""

    async def ended() -> int:
        async with opened(config.connection) as slurm:
            return await end_jobs(config.id, slurm)

    return asyncio.run(ended())


async def jobs_of(cluster_id: str, slurm: Slurm) -> list[Job]:
    """Those that still hold or wait for resources."""
    return [
        job
        for job in await slurm.jobs()
        if (uid_of(cluster_id, job) is not None or node_of(cluster_id, job)) and holds_resources(job.state)
    ]


async def end_jobs(cluster_id: str, slurm: Slurm, limit_s: float = GONE_S) -> int:
    deadline_s = time.monotonic() + limit_s
    seen: set[str] = set()
    asked_s = float("-inf")
    while jobs := await jobs_of(cluster_id, slurm):
        if time.monotonic() > deadline_s:
            raise SlurmletError(
                f"{len(jobs)} jobs did not end within {limit_s:g} s, such as {jobs[0].job_id}"
            )
        seen.update(job.job_id for job in jobs)
        # Again from time to time: a submission that was under way when the hub ended shows up late.
        if time.monotonic() - asked_s > _AGAIN_S:
            await slurm.cancel([job.job_id for job in jobs])
            asked_s = time.monotonic()
        await asyncio.sleep(_POLL_S)
    return len(seen)
