"""Slurm through slurmrestd: the requests are rest_client.py's, the shapes rest_values.py's and rest_submission.py's."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from dataclasses import replace

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import is_over
from slurmlet.model.slurm_values import Capabilities, EndedJob, Grant, Job, JobSpec, Partition, SlurmNode
from slurmlet.slurm import rest_values
from slurmlet.slurm.connection import Connection
from slurmlet.slurm.environment import command_environment
from slurmlet.slurm.rest_client import Query, RestClient
from slurmlet.slurm.rest_submission import body

_BATCH = 100  # ids in one URL
_STEPS_QUERY = 40  # the first parser that takes a list of jobs to look up in accounting
_UNKNOWN_JOB, _ALREADY_DONE, _JOB_HELD, _NOTHING_FOUND = 2017, 2021, 2042, 9003
# The first parser whose accounts tell exit codes: v0.0.38 says 0 of whatever ended by itself.
_EXIT_CODES = 39
# A site without accounting: slurmdbd is not configured, or slurmrestd was started without that part.
_NO_ACCOUNTING = (
    "accounting storage is disabled", "slurmdbd is not configured", "not running a supported accounting",
    "unable find requested url",
)  # fmt: skip


class RestSlurm:
    """Used as an async context manager: it keeps connections open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._client = RestClient(connection)
        self._capabilities: Capabilities | None = None

    async def __aenter__(self) -> RestSlurm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    # The interface

    async def submit(self, spec: JobSpec) -> JobId:
        parser = await self._client.speak()
        around = command_environment()
        around.pop("SLURM_JWT", None)
        payload = body(spec, parser, around)
        # A job that is held on request is queued, and told as an error by v0.0.38.
        answer = await self._client.ask("POST", "slurm", "job/submit", payload=payload, harmless=(_JOB_HELD,))
        job_id = answer.get("job_id") or (answer.get("result") or {}).get("job_id")
        if not job_id:
            raise SlurmError(
                "slurmrestd named no job for a submission", reason="SlurmUnavailable", transient=True
            )
        return JobId(str(job_id))

    async def jobs(self) -> list[Job]:
        answer = await self._client.ask("GET", "slurm", "jobs/")
        return rest_values.jobs(answer, self._client.user, os.getuid(), time.time())

    async def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        if not job_ids:
            return {}
        found: dict[JobId, EndedJob] = {}
        problem: SlurmError | None = None
        try:
            found = await self._accounts(list(dict.fromkeys(job_ids)))
        except SlurmError as error:
            # A database that is away must not hide what slurmctld knows.
            problem = None if _keeps_no_accounts(error) else error
        no_codes = await self._client.speak() < _EXIT_CODES
        # Accounts that do not know the end yet may lag behind slurmctld, by minutes on a busy site.
        certain = {
            one.job_id
            for one in found.values()
            if is_over(one.state) and (one.exit_code or one.signal or not no_codes)
        }
        missing = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in certain]
        for job in await asyncio.gather(*(self._remembered(job_id) for job_id in missing)):
            if job is not None:
                known = found.get(job.job_id, job)
                if not is_over(known.state):
                    known = job
                found[job.job_id] = replace(known, exit_code=job.exit_code, signal=job.signal)
        if problem is not None and len(found) < len(set(job_ids)):
            raise problem
        return found

    async def cancel(self, job_ids: Sequence[JobId]) -> None:
        await asyncio.gather(*(self._end(job_id, ()) for job_id in job_ids))

    async def signal(self, job_id: JobId, name: str) -> None:
        await self._end(job_id, (("signal", name), ("flags", "FULL_JOB")))

    async def nodes(self) -> list[SlurmNode]:
        return rest_values.nodes(await self._client.ask("GET", "slurm", "nodes/"))

    async def partitions(self) -> list[Partition]:
        answer, nodes = await asyncio.gather(self._client.ask("GET", "slurm", "partitions/"), self.nodes())
        return rest_values.partitions(answer, nodes, self._connection.default_partition)

    async def grants(self, job_id: JobId) -> dict[str, Grant]:
        answer = await self._client.ask("GET", "slurm", f"job/{job_id}", harmless=(_UNKNOWN_JOB,))
        return rest_values.grants(answer)

    async def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            parser = await self._client.speak()
            # Not ping, which answers 200 whatever it finds.
            answer = await self._client.ask("GET", "slurm", "partitions/")
            self._capabilities = Capabilities(
                version=rest_values.release(answer),
                accounting=await self._has_accounting(),
                immediate_problem="jobs are submitted through slurmrestd, which only knows the queue",
                parser=f"v0.0.{parser}",
            )
        return self._capabilities

    # How each of them asks

    async def _accounts(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        if await self._client.speak() >= _STEPS_QUERY:
            batches = [job_ids[start : start + _BATCH] for start in range(0, len(job_ids), _BATCH)]
            parts = await asyncio.gather(*(self._account(batch) for batch in batches))
            return {job_id: job for part in parts for job_id, job in part.items()}
        answers = await asyncio.gather(
            *(self._client.ask("GET", "slurmdb", f"job/{one}", harmless=(_NOTHING_FOUND,)) for one in job_ids)
        )
        return {job_id: job for answer in answers for job_id, job in rest_values.accounted(answer).items()}

    async def _account(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        # Not with commas between, as its description says: slurmrestd takes that for one id.
        query = [("skip_steps", "true"), *(("step", job_id) for job_id in job_ids)]
        answer = await self._client.ask("GET", "slurmdb", "jobs/", query=query, harmless=(_NOTHING_FOUND,))
        return rest_values.accounted(answer)

    async def _remembered(self, job_id: JobId) -> EndedJob | None:
        answer = await self._client.ask("GET", "slurm", f"job/{job_id}", harmless=(_UNKNOWN_JOB,))
        listed = [raw for raw in answer.get("jobs") or () if str(raw.get("job_id")) == job_id]
        return rest_values.remembered(listed[-1]) if listed else None

    async def _end(self, job_id: JobId, query: Query) -> None:
        harmless = (_UNKNOWN_JOB, _ALREADY_DONE)
        await self._client.ask("DELETE", "slurm", f"job/{job_id}", query=query, harmless=harmless)

    async def _has_accounting(self) -> bool:
        try:
            await self._client.ask("GET", "slurmdb", "tres/")
        except SlurmError as error:
            if _keeps_no_accounts(error):
                return False
            raise
        return True


def _keeps_no_accounts(error: SlurmError) -> bool:
    return any(words in error.said.lower() for words in _NO_ACCOUNTING)
