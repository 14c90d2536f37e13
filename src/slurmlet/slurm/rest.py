"""Slurm through slurmrestd, over TCP with a token or over a Unix socket of the user's own (rest_auth/local).

The newest data parser that both sides know is spoken (rest_values.py, rest_submission.py). An answer with `errors` is an
error whatever its HTTP status says: slurmrestd answers 200 to much that went wrong.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import is_over
from slurmlet.model.slurm_values import Capabilities, EndedJob, Grant, Job, JobSpec, Partition, SlurmNode
from slurmlet.slurm import rest_values
from slurmlet.slurm.connection import Connection
from slurmlet.slurm.environment import command_environment
from slurmlet.slurm.refusals import reason_of
from slurmlet.slurm.rest_submission import body
from slurmlet.slurm.rest_token import Token

Query = Sequence[tuple[str, str]]
PARSERS = range(38, 46)
_TIMEOUT_S = 30.0
_AT_ONCE = 8
# slurmrestd of 22.05 was seen to stop answering for good after several requests at once.
_FIRST_OF_MANY = 39
_BATCH = 100  # ids in one URL
_MOST_BYTES = 256 << 20
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
        self._user = connection.user or getpass.getuser()
        self._token = None if connection.socket else Token(connection.token_file)
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._parser = 0
        self._capabilities: Capabilities | None = None

    async def __aenter__(self) -> RestSlurm:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # The interface

    async def submit(self, spec: JobSpec) -> JobId:
        parser = await self._speak()
        around = command_environment()
        around.pop("SLURM_JWT", None)
        payload = body(spec, parser, around)
        # A job that is held on request is queued, and told as an error by v0.0.38.
        answer = await self._ask("POST", "slurm", "job/submit", payload=payload, harmless=(_JOB_HELD,))
        job_id = answer.get("job_id") or (answer.get("result") or {}).get("job_id")
        if not job_id:
            raise SlurmError(
                "slurmrestd named no job for a submission", reason="SlurmUnavailable", transient=True
            )
        return JobId(str(job_id))

    async def jobs(self) -> list[Job]:
        answer = await self._ask("GET", "slurm", "jobs/")
        return rest_values.jobs(answer, self._user, os.getuid(), time.time())

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
        doubtful = {
            one.job_id
            for one in found.values()
            if not one.exit_code and not one.signal and is_over(one.state)
        }
        certain = found.keys() - (doubtful if await self._speak() < _EXIT_CODES else set())
        missing = [job_id for job_id in dict.fromkeys(job_ids) if job_id not in certain]
        for job in await asyncio.gather(*(self._remembered(job_id) for job_id in missing)):
            if job is not None:
                known = found.get(job.job_id, job)
                found[job.job_id] = replace(known, exit_code=job.exit_code, signal=job.signal)
        if problem is not None and len(found) < len(set(job_ids)):
            raise problem
        return found

    async def cancel(self, job_ids: Sequence[JobId]) -> None:
        await asyncio.gather(*(self._end(job_id, ()) for job_id in job_ids))

    async def signal(self, job_id: JobId, name: str) -> None:
        await self._end(job_id, (("signal", name), ("flags", "FULL_JOB")))

    async def nodes(self) -> list[SlurmNode]:
        return rest_values.nodes(await self._ask("GET", "slurm", "nodes/"))

    async def partitions(self) -> list[Partition]:
        answer, nodes = await asyncio.gather(self._ask("GET", "slurm", "partitions/"), self.nodes())
        return rest_values.partitions(answer, nodes, self._connection.default_partition)

    async def grants(self, job_id: JobId) -> dict[str, Grant]:
        answer = await self._ask("GET", "slurm", f"job/{job_id}", harmless=(_UNKNOWN_JOB,))
        return rest_values.grants(answer)

    async def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            parser = await self._speak()
            # Not ping, which answers 200 whatever it finds.
            answer = await self._ask("GET", "slurm", "partitions/")
            self._capabilities = Capabilities(
                version=rest_values.release(answer),
                accounting=await self._has_accounting(),
                immediate_problem="jobs are submitted through slurmrestd, which only knows the queue",
                parser=f"v0.0.{parser}",
            )
        return self._capabilities

    # How each of them asks

    async def _accounts(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        if await self._speak() >= _STEPS_QUERY:
            batches = [job_ids[start : start + _BATCH] for start in range(0, len(job_ids), _BATCH)]
            parts = await asyncio.gather(*(self._account(batch) for batch in batches))
            return {job_id: job for part in parts for job_id, job in part.items()}
        answers = await asyncio.gather(
            *(self._ask("GET", "slurmdb", f"job/{one}", harmless=(_NOTHING_FOUND,)) for one in job_ids)
        )
        return {job_id: job for answer in answers for job_id, job in rest_values.accounted(answer).items()}

    async def _account(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        # Not with commas between, as its description says: slurmrestd takes that for one id.
        query = [("skip_steps", "true"), *(("step", job_id) for job_id in job_ids)]
        answer = await self._ask("GET", "slurmdb", "jobs/", query=query, harmless=(_NOTHING_FOUND,))
        return rest_values.accounted(answer)

    async def _remembered(self, job_id: JobId) -> EndedJob | None:
        answer = await self._ask("GET", "slurm", f"job/{job_id}", harmless=(_UNKNOWN_JOB,))
        listed = [raw for raw in answer.get("jobs") or () if str(raw.get("job_id")) == job_id]
        return rest_values.remembered(listed[-1]) if listed else None

    async def _end(self, job_id: JobId, query: Query) -> None:
        harmless = (_UNKNOWN_JOB, _ALREADY_DONE)
        await self._ask("DELETE", "slurm", f"job/{job_id}", query=query, harmless=harmless)

    async def _has_accounting(self) -> bool:
        try:
            await self._ask("GET", "slurmdb", "tres/")
        except SlurmError as error:
            if _keeps_no_accounts(error):
                return False
            raise
        return True

    async def _speak(self) -> int:
        """The number of the newest data parser that both sides know."""
        if self._parser:
            return self._parser
        for path in ("/openapi/v3", "/openapi"):
            status, text = await self._request("GET", path)
            # Some versions write a slash as "\/". Reading the whole, megabytes of JSON, would tell no more.
            found = re.findall(r"/slurm/v0\.0\.(\d+)/", text.replace("\\/", "/")) if status == 200 else []
            if common := {int(one) for one in found} & set(PARSERS):
                self._parser = max(common)
                if self._parser < _FIRST_OF_MANY:
                    self._slots = asyncio.Semaphore(1)
                return self._parser
        raise SlurmError(
            f"slurmrestd at {self._connection.place} knows none of v0.0.{PARSERS[0]} to v0.0.{PARSERS[-1]}",
            reason="SlurmUnavailable", transient=True, hint="Is this the address of a slurmrestd of Slurm 22.05 to 26.05?",
        )  # fmt: skip

    async def _ask(
        self,
        method: str,
        room: str,
        path: str,
        *,
        query: Query | None = None,
        payload: Any = None,
        harmless: tuple[int, ...] = (),
    ) -> dict[str, Any]:
        """What slurmrestd answered. Raises SlurmError for what is one; `harmless`: numbers of errors that are none."""
        where = f"/{room}/v0.0.{await self._speak()}/{path}"
        status, text = await self._request(method, where, query=query, payload=payload)
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise _of_status(status, f"{method} {where}", text)
        errors = [one for one in answer.get("errors") or () if _number(one) not in harmless]
        if errors or (status >= 400 and not answer.get("errors")):
            error = _of_errors(status, f"{method} {where}", errors)
            # Only a submission can be refused for good: of all else that goes wrong nobody knows what it means.
            raise error if method == "POST" else _passing(error)
        return answer

    async def _request(
        self, method: str, path: str, *, query: Query | None = None, payload: Any = None
    ) -> tuple[int, str]:
        """(status, body). A token that is refused is renewed once."""
        self._connection.check_transport()
        token = await self._token.current() if self._token else ""
        status, text = await self._send(method, path, query, payload, token)
        if status == 401 and self._token is not None:
            token = await self._token.renewed(token)
            status, text = await self._send(method, path, query, payload, token)
        if status in (401, 403):
            raise SlurmError(
                f"slurmrestd does not let {self._user} in ({status})", said=text.strip()[:200],
                reason="SlurmUnauthorized", transient=True, hint="Is the token of this user, and not too old?",
            )  # fmt: skip
        return status, text

    async def _send(
        self, method: str, path: str, query: Query | None, payload: Any, token: str
    ) -> tuple[int, str]:
        headers = {"X-SLURM-USER-NAME": self._user, "X-SLURM-USER-TOKEN": token} if token else {}
        asked = f"?{urlencode(query)}" if query else ""
        url = URL(f"{self._connection.base_url}{path}{asked}", encoded=True)
        try:
            async with self._slots, self._opened().request(
                method, url, json=payload, headers=headers, allow_redirects=False
            ) as answer:  # fmt: skip
                raw = await answer.content.read(_MOST_BYTES)
                while piece := await answer.content.read(_MOST_BYTES):
                    raw += piece
                return answer.status, raw.decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = str(error) or type(error).__name__
            raise SlurmError(
                f"slurmrestd at {self._connection.place} does not answer: {said}", said=said,
                reason="SlurmUnavailable", transient=True,
            ) from error  # fmt: skip

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector: aiohttp.BaseConnector
            if self._connection.socket:
                connector = aiohttp.UnixConnector(str(self._connection.socket))
            else:
                ca = self._connection.ca_file
                trusted = ssl.create_default_context(cafile=str(ca) if ca else None)
                connector = aiohttp.TCPConnector(ssl=trusted)
            timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
            # Not the proxy of the user's environment: a token goes to slurmrestd and nobody else.
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False)
        return self._session


def _number(error: Any) -> int:
    found = error.get("error_number", error.get("error_code")) if isinstance(error, Mapping) else None
    return int(found or 0)


def _of_errors(status: int, what: str, errors: Sequence[Any]) -> SlurmError:
    lines = [
        ": ".join(dict.fromkeys(str(one[key]) for key in ("description", "error") if one.get(key)))
        for one in errors
        if isinstance(one, Mapping)
    ]
    said = "; ".join(dict.fromkeys(filter(None, lines))) or f"HTTP status {status}"
    reason = "SlurmBusy" if status == 429 else reason_of(said, 0 if lines else None)
    return SlurmError(
        f"slurmrestd: {said} ({what})", said=said, reason=reason, transient=reason != "SlurmRefused"
    )


def _of_status(status: int, what: str, text: str) -> SlurmError:
    """An answer that is not slurmrestd's own: a proxy's, or one that was cut short."""
    said = text.strip()[:200] or f"HTTP status {status}"
    reason = "SlurmBusy" if status == 429 else "SlurmUnavailable"
    return SlurmError(
        f"slurmrestd answered {status} to {what}: {said}", said=said, reason=reason, transient=True
    )


def _keeps_no_accounts(error: SlurmError) -> bool:
    return any(words in error.said.lower() for words in _NO_ACCOUNTING)


def _passing(error: SlurmError) -> SlurmError:
    reason = error.reason if error.transient else "SlurmUnavailable"
    return SlurmError(error.message, said=error.said, hint=error.hint, reason=reason, transient=True)
