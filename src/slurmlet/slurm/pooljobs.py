"""The jobs behind a cluster's allocation nodes, the pool's and gangs', as squeue tells them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slurmlet.base.processes import run
from slurmlet.model import pool
from slurmlet.model.gangs import key_of_allocation
from slurmlet.model.job_states import Stage, is_over, stage_of

_FORMAT = "%A|%T|%L|%l|%D|%r|%k"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class PoolJob:
    job_id: str
    node: str  # of a gang: what its nodes' names begin with
    state: str
    left_s: float | None
    limit_s: float | None
    hosts: int = 1
    reason: str = ""


def pool_jobs(cluster_id: str) -> list[PoolJob]:
    """Those that hold or wait for resources. Raises CommandError."""
    return [one for one in _allocations(cluster_id) if not key_of_allocation(one.node)]


def gang_jobs(cluster_id: str) -> dict[str, PoolJob]:
    """By the key of the gang they are for, less those that are over but for cleaning up. Raises CommandError."""
    return {
        key: one
        for one in _allocations(cluster_id)
        if (key := key_of_allocation(one.node)) and stage_of(one.state) is not Stage.ENDING
    }


def _allocations(cluster_id: str) -> list[PoolJob]:
    argv = ["squeue", "--noheader", "--all", "-u", str(os.getuid()), "-o", _FORMAT]
    return parse(cluster_id, run(argv, timeout_s=_TIMEOUT_S).stdout)


def parse(cluster_id: str, text: str) -> list[PoolJob]:
    found = []
    for line in text.split("\n"):
        fields = line.split("|", 6)
        node = pool.node_of(cluster_id, fields[6]) if len(fields) == 7 else ""
        if node and not is_over(fields[1]):
            job_id, state, left, limit, hosts, reason, _ = fields
            found.append(
                PoolJob(
                    job_id,
                    node,
                    state,
                    pool.seconds(left),
                    pool.seconds(limit),
                    int(hosts) if hosts.isdecimal() else 1,
                    "" if reason == "None" else reason,
                )
            )
    return found
