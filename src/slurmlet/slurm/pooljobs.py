"""The jobs behind a cluster's pool nodes, as squeue tells them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from slurmlet.base.processes import run
from slurmlet.model import pool
from slurmlet.model.jobstates import is_over

_FORMAT = "%A|%T|%L|%l|%k"
_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class PoolJob:
    job_id: str
    node: str
    state: str
    left_s: float | None
    limit_s: float | None


def pool_jobs(cluster_id: str) -> list[PoolJob]:
    """Those that hold or wait for resources. Raises CommandError."""
    argv = ["squeue", "--noheader", "--all", "-u", str(os.getuid()), "-o", _FORMAT]
    return parse(cluster_id, run(argv, timeout_s=_TIMEOUT_S).stdout)


def parse(cluster_id: str, text: str) -> list[PoolJob]:
    found = []
    for line in text.split("\n"):
        fields = line.split("|", 4)
        node = pool.node_of(cluster_id, fields[4]) if len(fields) == 5 else ""
        if node and not is_over(fields[1]):
            found.append(
                PoolJob(fields[0], node, fields[1], pool.seconds(fields[2]), pool.seconds(fields[3]))
            )
    return found
