"""Requests to slurmrestd, over TCP with a token or over a Unix socket of the user's own (rest_auth/local).

The newest data parser that both sides know is spoken. An answer with `errors` is an error whatever its HTTP status says:
slurmrestd answers 200 to much that went wrong.
"""

from __future__ import annotations

import asyncio
import getpass
import json
import re
import ssl
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp
from yarl import URL

from slurmlet.base.errors import SlurmError
from slurmlet.slurm.connection import Connection
from slurmlet.slurm.refusals import reason_of
from slurmlet.slurm.rest_token import Token

Query = Sequence[tuple[str, str]]
PARSERS = range(38, 46)
_TIMEOUT_S = 30.0
_AT_ONCE = 8
_MOST_BYTES = 256 << 20


class RestClient:
    """Used as an async context manager: it keeps connections open."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.user = connection.user or getpass.getuser()
        self._token = None if connection.socket else Token(connection.token_file)
        self._session: aiohttp.ClientSession | None = None
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._parser = 0

    async def __aenter__(self) -> RestClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def speak(self) -> int:
        """The number of the newest data parser that both sides know."""
        if self._parser:
            return self._parser
        for path in ("/openapi/v3", "/openapi"):
            status, text = await self._request("GET", path)
            # Some versions write a slash as "\/". Reading the whole, megabytes of JSON, would tell no more.
            found = re.findall(r"/slurm/v0\.0\.(\d+)/", text.replace("\\/", "/")) if status == 200 else []
            if common := {int(one) for one in found} & set(PARSERS):
                self._parser = max(common)
                return self._parser
        raise SlurmError(
            f"slurmrestd at {self._connection.place} knows none of v0.0.{PARSERS[0]} to v0.0.{PARSERS[-1]}",
            reason="SlurmUnavailable", transient=True, hint="Is this the address of a slurmrestd of Slurm 22.05 to 26.05?",
        )  # fmt: skip

    async def ask(
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
        where = f"/{room}/v0.0.{await self.speak()}/{path}"
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
                f"slurmrestd does not let {self.user} in ({status})", said=text.strip()[:200],
                reason="SlurmUnauthorized", transient=True, hint="Is the token of this user, and not too old?",
            )  # fmt: skip
        return status, text

    async def _send(
        self, method: str, path: str, query: Query | None, payload: Any, token: str
    ) -> tuple[int, str]:
        headers = {"X-SLURM-USER-NAME": self.user, "X-SLURM-USER-TOKEN": token} if token else {}
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


def _passing(error: SlurmError) -> SlurmError:
    reason = error.reason if error.transient else "SlurmUnavailable"
    return SlurmError(error.message, said=error.said, hint=error.hint, reason=reason, transient=True)
