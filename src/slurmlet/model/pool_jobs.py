"""The jobs behind a cluster's allocation nodes, the pool's and gangs', among all jobs of the user. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from slurmlet.model import pool
from slurmlet.model.gangs import key_of_allocation
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, is_over, stage_of
from slurmlet.model.slurm_values import Job


@dataclass(frozen=True)
class PoolJob:
    job_id: JobId
    node: str  # of a gang: what its nodes' names begin with
    state: str
    left_s: float | None
    limit_s: float | None
    hosts: int = 1
    reason: str = ""


def pool_jobs(cluster_id: str, jobs: Iterable[Job]) -> list[PoolJob]:
    """Those that hold or wait for resources."""
    return [one for one in _allocations(cluster_id, jobs) if not key_of_allocation(one.node)]


def gang_jobs(cluster_id: str, jobs: Iterable[Job]) -> dict[str, PoolJob]:
    """By the key of the gang they are for, less those that are over but for cleaning up."""
    return {
        key: one
        for one in _allocations(cluster_id, jobs)
        if (key := key_of_allocation(one.node)) and stage_of(one.state) is not Stage.ENDING
    }


def _allocations(cluster_id: str, jobs: Iterable[Job]) -> list[PoolJob]:
    return [
        PoolJob(job.job_id, node, job.state, job.left_s, job.limit_s, job.node_count, job.reason)
        for job in jobs
        if (node := pool.node_of(cluster_id, job)) and not is_over(job.state)
    ]
