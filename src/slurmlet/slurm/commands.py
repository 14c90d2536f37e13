"""Slurm through its own commands: sbatch, squeue, sacct, scancel, sinfo, scontrol.

Plain `-o` formats instead of `--json`: their letters mean the same from 22.05 to 26.05, they cost a tenth of the
CPU, and a poll for thousands of jobs stays cheap (docs/decisions/0010). Every command runs with a small environment of our
own (environment.py) and in a thread of a pool of its own: a home that hangs under other threads must not keep Slurm waiting.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from slurmlet.base.errors import SlurmError
from slurmlet.base.processes import CommandError, Completed, run
from slurmlet.model.host_lists import expand
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import is_over
from slurmlet.model.slurm_values import Capabilities, EndedJob, Grant, Job, JobSpec, Partition, SlurmNode
from slurmlet.slurm import command_output
from slurmlet.slurm.command_options import sbatch_words
from slurmlet.slurm.configuration import capabilities_of, parse_config
from slurmlet.slurm.environment import command_environment, query_environment
from slurmlet.slurm.refusals import sentence, slurm_error

_P = ParamSpec("_P")
_T = TypeVar("_T")

TIMEOUT_S = 30.0
_GRANTS_TIMEOUT_S = 10.0
_CONFIG_TIMEOUT_S = 15.0
# More than the hub submits at once: a look at the queue does not wait for a burst of pods.
_THREADS = 12
_AT_ONCE = 200
# What is no reason to doubt: Slurm answered, and it does not know the job, or the site keeps no accounts.
_UNKNOWN_JOB = ("invalid job id",)
_OVER = (*_UNKNOWN_JOB, "already completing or completed", "job/step already completing")
_NO_ACCOUNTING = ("accounting storage is disabled", "sacct: not found")


class CommandSlurm:
    """Slurm over the command line tools of the site."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = command_environment(environment)
        self._asking = query_environment(self._environment)
        self._uid = str(os.getuid())
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="slurm")
        self._capabilities: Capabilities | None = None

    async def submit(self, spec: JobSpec) -> JobId:
        return await self._do(self._submit, spec)

    async def jobs(self) -> list[Job]:
        return await self._do(self._jobs)

    async def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        return await self._do(self._ended, job_ids) if job_ids else {}

    async def cancel(self, job_ids: Sequence[JobId]) -> None:
        for start in range(0, len(job_ids), _AT_ONCE):
            await self._do(self._tell, ["scancel", "--quiet", *job_ids[start : start + _AT_ONCE]])

    async def signal(self, job_id: JobId, name: str) -> None:
        # Not --quiet: then a job that is over is an error without a word.
        await self._do(self._tell, ["scancel", "--full", f"--signal={name}", job_id])

    async def nodes(self) -> list[SlurmNode]:
        argv = ["sinfo", "--noheader", "--Node", "--exact", "-o", command_output.NODE_FORMAT]
        return command_output.parse_nodes((await self._do(self._ask, argv)).stdout)

    async def partitions(self) -> list[Partition]:
        argv = ["sinfo", "--noheader", "--exact", "-o", command_output.PARTITION_FORMAT]
        return command_output.parse_partitions((await self._do(self._ask, argv)).stdout)

    async def grants(self, job_id: JobId) -> dict[str, Grant]:
        argv = ["scontrol", "--details", "--oneliner", "show", "job", job_id]
        shown = await self._do(self._ask, argv, timeout_s=_GRANTS_TIMEOUT_S, harmless=_UNKNOWN_JOB)
        parts = command_output.parse_details(shown.stdout) if shown.ok else []
        return {host: grant for hosts, grant in parts for host in expand(hosts)}

    async def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            shown = await self._do(self._ask, ["scontrol", "show", "config"], timeout_s=_CONFIG_TIMEOUT_S)
            self._capabilities = capabilities_of(parse_config(shown.stdout))
        return self._capabilities

    async def _do(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **kwargs))

    def _submit(self, spec: JobSpec) -> JobId:
        argv = ["sbatch", "--parsable", *sbatch_words(spec)]
        around = {**self._environment, **spec.environment}
        done = self._run(argv, env=around, stdin=spec.script, cwd=Path.home())
        if not done.ok:
            raise slurm_error(done)
        # "123" or "123;cluster"; a site's wrapper may say something before it.
        job_id = done.stdout.strip().rpartition("\n")[2].partition(";")[0]
        if not job_id.isdecimal():
            raise SlurmError(
                f"sbatch printed no job id: {done.stdout!r}", reason="SlurmUnavailable", transient=True
            )
        return JobId(job_id)

    def _jobs(self) -> list[Job]:
        argv = [
            "squeue",
            "--noheader",
            "--all",
            "--states=all",
            "-u",
            self._uid,
            "-o",
            command_output.QUEUE_FORMAT,
        ]
        return command_output.parse_queue(self._ask(argv).stdout)

    def _ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        found: dict[JobId, EndedJob] = {}
        accounts = self._accounts(job_ids)
        if accounts.ok:
            found = {job.job_id: job for job in command_output.parse_sacct(accounts.stdout)}
        for job_id in job_ids:
            # Accounts that do not know the end yet may lag behind slurmctld, by minutes on a busy site.
            if job_id not in found or not is_over(found[job_id].state):
                job = self._remembered(job_id)
                if job is not None:
                    found[job_id] = job
        if len(found) < len(set(job_ids)):
            _insist(accounts, _NO_ACCOUNTING)
        return found

    def _accounts(self, job_ids: Sequence[JobId]) -> Completed:
        """sacct's answer; a database that is away must not hide what slurmctld knows."""
        argv = ["sacct", "-n", "-P", "-X", "-j", ",".join(job_ids), "-o", command_output.SACCT_FIELDS]
        try:
            return self._run(argv, env=self._asking)
        except SlurmError as error:
            return Completed(tuple(argv), 1, "", error.said)

    def _remembered(self, job_id: JobId) -> EndedJob | None:
        shown = self._ask(["scontrol", "-o", "show", "job", job_id], harmless=_UNKNOWN_JOB)
        return command_output.parse_show_job(shown.stdout) if shown.ok else None

    def _tell(self, argv: Sequence[str]) -> None:
        _insist(self._run(argv, env=self._environment), _OVER)

    def _ask(
        self, argv: Sequence[str], *, timeout_s: float = TIMEOUT_S, harmless: tuple[str, ...] = ()
    ) -> Completed:
        done = self._run(argv, env=self._asking, timeout_s=timeout_s)
        _insist(done, harmless)
        return done

    def _run(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: str | None = None,
        cwd: Path | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Completed:
        """To its end, good or bad. Raises SlurmError where it did not come to one."""
        try:
            return run(argv, stdin=stdin, timeout_s=timeout_s, env=env, check=False, cwd=cwd)
        except CommandError as error:
            raise SlurmError(
                error.message, said=error.stderr, reason="SlurmUnavailable", transient=True
            ) from error


def _insist(done: Completed, harmless: tuple[str, ...]) -> None:
    """Raise unless the command did its work or failed in a harmless way. Nothing that is asked or told can be refused
    for good: what goes wrong here passes."""
    said = f"{done.stdout}{done.stderr}".lower()
    if not done.ok and not any(words in said for words in harmless):
        error = slurm_error(done)
        raise SlurmError(
            error.message,
            said=sentence(done.stderr or done.stdout),
            reason=error.reason if error.transient else "SlurmUnavailable",
            transient=True,
        )
