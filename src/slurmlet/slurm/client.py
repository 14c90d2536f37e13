"""Slurm through its own commands: the one place that calls sbatch, squeue, sacct, scancel and sinfo.

Plain `-o` formats instead of `--json`: their letters mean the same from 22.05 to 26.05, they cost a tenth of the
CPU, and a poll for thousands of jobs stays cheap (docs/decisions/0010). Commands run with a small environment of our
own, so that a user's SBATCH_* variables cannot change what a pod's job asks for.

Methods block; the hub calls them through `asyncio.to_thread`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from slurmlet.base.processes import CommandError, Completed, run
from slurmlet.model.ids import JobId
from slurmlet.model.slurmfacts import EndedJob, Job, Partition
from slurmlet.slurm.parsing import (
    PARTITION_FORMAT,
    QUEUE_FORMAT,
    SACCT_FIELDS,
    parse_partitions,
    parse_queue,
    parse_sacct,
    parse_show_job,
)

TIMEOUT_S = 30.0
# What Slurm's commands need of the user's environment; nothing named SBATCH_*, SQUEUE_* or SLURM_JOB_*.
_KEPT_VARIABLES = (
    "HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TMPDIR", "SLURM_CONF", "LD_LIBRARY_PATH", "KRB5CCNAME",
    "SLURM_JWT", "SLURMLET_UPSTREAM_DIR", "SLURMLET_CACHE", "SLURMLET_HOME",
)  # fmt: skip

# Slurm's words for "not now": the controller is away or busy, or a limit that other jobs will free.
_TRANSIENT_WORDS = (
    "unable to contact slurm controller", "socket timed out", "connection refused", "connection timed out",
    "transport endpoint", "slurm controller is", "zero bytes were transmitted", "unexpected message received",
    "resource temporarily unavailable", "job violates accounting/qos policy", "slurmctld is", "try again",
    "no route to host", "communication connection failure", "slurm backup controller", "maxsubmitjob",
)  # fmt: skip


class Scheduler(Protocol):
    """What the hub needs of Slurm. Every method is idempotent except submit."""

    def submit(self, options: Sequence[str], script: str) -> JobId: ...
    def jobs(self) -> list[Job]: ...
    def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]: ...
    def cancel(self, job_ids: Sequence[JobId]) -> None: ...
    def partitions(self) -> list[Partition]: ...
    def version(self) -> str: ...


class SlurmClient:
    """Scheduler over the command line tools of the site."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        source = os.environ if environment is None else environment
        self._environment = {name: source[name] for name in _KEPT_VARIABLES if name in source}
        self._uid = str(os.getuid())

    def submit(self, options: Sequence[str], script: str) -> JobId:
        """Submit a batch script. A transient CommandError may hide a success: look at jobs() before a retry."""
        done = self._run(["sbatch", "--parsable", *options], stdin=script, cwd=Path.home())
        # "123" or "123;cluster"
        return JobId(done.stdout.strip().splitlines()[-1].split(";")[0])

    def jobs(self) -> list[Job]:
        """Every job of this user that slurmctld remembers, ended ones included (MinJobAge)."""
        done = self._run(["squeue", "--noheader", "--states=all", "-u", self._uid, "-o", QUEUE_FORMAT])
        return parse_queue(done.stdout)

    def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        """How jobs ended: from the accounting database, then from what slurmctld still remembers."""
        found: dict[JobId, EndedJob] = {}
        if not job_ids:
            return found
        sacct = self._run(
            ["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", SACCT_FIELDS], check=False
        )
        if sacct.ok:
            found = {job.job_id: job for job in parse_sacct(sacct.stdout)}
        for job_id in job_ids:
            if job_id not in found:
                shown = self._run(["scontrol", "-o", "show", "job", job_id], check=False)
                job = parse_show_job(shown.stdout) if shown.ok else None
                if job is not None:
                    found[job_id] = job
        return found

    def cancel(self, job_ids: Sequence[JobId]) -> None:
        """Cancel jobs; those already gone are no error."""
        for start in range(0, len(job_ids), 200):
            self._run(["scancel", "--quiet", *job_ids[start : start + 200]], check=False)

    def partitions(self) -> list[Partition]:
        done = self._run(["sinfo", "--noheader", "--exact", "-o", PARTITION_FORMAT])
        return parse_partitions(done.stdout)

    def version(self) -> str:
        return self._run(["sinfo", "--version"]).stdout.split()[-1]

    def _run(
        self, argv: Sequence[str], *, stdin: str | None = None, check: bool = True, cwd: Path | None = None
    ) -> Completed:
        try:
            return run(argv, stdin=stdin, timeout_s=TIMEOUT_S, env=self._environment, check=check, cwd=cwd)
        except CommandError as error:
            said = error.stderr.lower()
            error.transient = error.transient or any(words in said for words in _TRANSIENT_WORDS)
            raise
