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
from slurmlet.model.slurm_values import EndedJob, Job, Partition
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
    "HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "SLURM_CONF", "LD_LIBRARY_PATH", "KRB5CCNAME",
    "SLURM_JWT", "SLURMLET_UPSTREAM_DIR", "SLURMLET_CACHE", "SLURMLET_HOME",
)  # fmt: skip

# Slurm's words for "not now": the controller is away or busy, or a limit that other jobs will free.
_TRANSIENT_WORDS = (
    "unable to contact slurm controller", "socket timed out", "connection refused", "connection timed out",
    "transport endpoint", "slurm controller is", "zero bytes were transmitted", "unexpected message received",
    "resource temporarily unavailable", "job violates accounting/qos policy", "slurmctld is", "try again",
    "no route to host", "communication connection failure", "slurm backup controller", "maxsubmitjob",
    "temporarily unable to accept job", "munge",
)  # fmt: skip
# What is no reason to doubt: Slurm answered, and it does not know the job, or the site keeps no accounts.
_UNKNOWN_JOB = ("invalid job id",)
_NO_ACCOUNTING = ("accounting storage is disabled", "sacct: not found")


class Scheduler(Protocol):
    """What the hub needs of Slurm. Every method is idempotent except submit."""

    def submit(self, options: Sequence[str], script: str) -> JobId: ...
    def jobs(self) -> list[Job]: ...
    def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]: ...
    def cancel(self, job_ids: Sequence[JobId]) -> None: ...
    def partitions(self) -> list[Partition]: ...
    def version(self) -> str: ...


def command_environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    """What Slurm's commands are given of the environment."""
    variables = os.environ if source is None else source
    return {name: variables[name] for name in _KEPT_VARIABLES if name in variables}


class SlurmClient:
    """Scheduler over the command line tools of the site."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = command_environment(environment)
        self._uid = str(os.getuid())

    def submit(self, options: Sequence[str], script: str) -> JobId:
        """Submit a batch script. A transient CommandError may hide a success: look at jobs() before a retry."""
        argv = ["sbatch", "--parsable", *options]
        done = self._run(argv, stdin=script, cwd=Path.home())
        # "123" or "123;cluster"; a site's wrapper may say something before it.
        job_id = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        if not job_id.isdecimal():
            raise CommandError(argv, done.code, f"no job id in {done.stdout!r}", transient=True)
        return JobId(job_id)

    def jobs(self) -> list[Job]:
        """Every job of this user that slurmctld remembers, ended ones included (MinJobAge)."""
        done = self._run(
            ["squeue", "--noheader", "--all", "--states=all", "-u", self._uid, "-o", QUEUE_FORMAT]
        )
        return parse_queue(done.stdout)

    def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        """How jobs ended: from the accounting database, then from what slurmctld still remembers.

        A job that is missing here is unknown to both. Raises a transient CommandError while one of them is away.
        """
        found: dict[JobId, EndedJob] = {}
        if not job_ids:
            return found
        sacct = self._accounts(job_ids)
        if sacct.ok:
            found = {job.job_id: job for job in parse_sacct(sacct.stdout)}
        for job_id in job_ids:
            if job_id not in found:
                job = self._remembered(job_id)
                if job is not None:
                    found[job_id] = job
        if len(found) < len(set(job_ids)):
            _insist(sacct, _NO_ACCOUNTING)
        return found

    def _accounts(self, job_ids: Sequence[JobId]) -> Completed:
        """sacct's answer; a database that is away must not hide what slurmctld knows."""
        argv = ["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", SACCT_FIELDS]
        try:
            return self._run(argv, check=False)
        except CommandError as error:
            return Completed(tuple(argv), 1, "", error.stderr)

    def _remembered(self, job_id: JobId) -> EndedJob | None:
        shown = self._run(["scontrol", "-o", "show", "job", job_id], check=False)
        _insist(shown, _UNKNOWN_JOB)
        return parse_show_job(shown.stdout) if shown.ok else None

    def cancel(self, job_ids: Sequence[JobId]) -> None:
        """Cancel jobs; those already gone are no error. Raises a CommandError when Slurm could not be told."""
        for start in range(0, len(job_ids), 200):
            _insist(
                self._run(["scancel", "--quiet", *job_ids[start : start + 200]], check=False), _UNKNOWN_JOB
            )

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
            error.transient = error.transient or _is_transient(error.code, error.stderr)
            raise


def _is_transient(code: int | None, said: str) -> bool:
    """A command that never ran or was killed has told nothing about the job either."""
    return code is None or code < 0 or any(words in said.lower() for words in _TRANSIENT_WORDS)


def _insist(done: Completed, harmless: tuple[str, ...]) -> None:
    """Raise unless the command did its work or failed in a harmless way."""
    said = f"{done.stdout}{done.stderr}".lower()
    if not done.ok and not any(words in said for words in harmless):
        raise CommandError(done.argv, done.code, done.stderr or done.stdout, transient=True)
