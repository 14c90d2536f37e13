"""The one environment that every command of Slurm's gets: a user's SBATCH_*, SQUEUE_* or SLURM_* variables are defaults
for what they type themselves, and would change what pods ask for and what slurmlet sees of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

# What Slurm's commands need to find and trust the cluster, and what a job's script needs to run. Nothing else.
_KEPT_VARIABLES = (
    "HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF", "LD_LIBRARY_PATH", "KRB5CCNAME",
    "SLURM_JWT", "SLURMLET_UPSTREAM_DIR", "SLURMLET_CACHE", "SLURMLET_HOME",
)  # fmt: skip


def command_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    variables = os.environ if source is None else source
    return {name: variables[name] for name in _KEPT_VARIABLES if name in variables}


def query_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """For commands that only tell: times as seconds since the epoch, in every time zone."""
    return {**environment, "SLURM_TIME_FORMAT": "%s"}
