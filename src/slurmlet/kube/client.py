"""Requests to the API server: plain dictionaries over one aiohttp session.

Objects stay the dictionaries that JSON gives: a kubelet must hand on every field of a pod, also those a typed model
would drop (docs/decisions/0009). Writes are patches or creates, never read-modify-replace.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
from yarl import URL

from slurmlet.base.errors import SlurmletError
from slurmlet.kube.credentials import Credentials, Token

Obj = dict[str, Any]
MERGE = "application/merge-patch+json"
STRATEGIC = "application/strategic-merge-patch+json"
# JSON is YAML.
_APPLY = "application/apply-patch+yaml"
# What to accept to get objects without their contents.
METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
METADATA_LIST = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
REQUEST_TIMEOUT_S = 30.0
# Requests of one client under way at the same time, watches aside.
AT_ONCE = 64
# The server ends a watch by itself after this; we allow some more before calling the connection dead.
WATCH_S = 300


class ApiError(SlurmletError):
    """The API server said no, or could not be reached (status 0)."""

    reason = "ApiError"

    def __init__(self, status: int, message: str, api_reason: str = "") -> None:
        super().__init__(message, transient=status in (0, 429, 500, 502, 503, 504))
        self.status = status
        self.api_reason = api_reason


class ApiClient:
    """One user of one API server (kube/credentials says how it proves itself).

    `at_once`: more requests than this wait here, in their order. A server that has only a share of a busy host works off
    what it was given all at the same time, and somebody's `kubectl exec` would stand behind a whole burst of pods.
    """

    def __init__(
        self,
        credentials: Credentials,
        on_answer: Callable[[str, int], None] = lambda _method, _status: None,
        at_once: int = AT_ONCE,
    ) -> None:
        server = URL(credentials.server)
        self._origin, self._prefix = server.origin(), server.path.rstrip("/")
        self._server_name = credentials.server_name or None
        self._slots = asyncio.Semaphore(at_once)
        self._unsent: dict[str, asyncio.Task[Obj]] = {}  # reads that still wait for a slot
        self._on_answer = on_answer
        self._ssl = credentials.ssl_context()
        self._token = Token(credentials) if credentials.has_token else None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ApiClient:
        self._session = aiohttp.ClientSession(
            base_url=self._origin,
            connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0),
            timeout=aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S),
            headers={"Accept": "application/json", "User-Agent": "slurmlet-hub"},
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    @property
    def busy(self) -> bool:
        """Whether a request would have to wait for others now."""
        return self._slots.locked()

    async def get(self, path: str, *, accept: str = "", **query: str) -> Obj:
        return await self._request("GET", path, query=query, accept=accept)

    async def read(self, path: str) -> Obj:
        """As `get`, but many who ask for the same object at once get one answer; nobody may change it.

        Only a request that has not been sent yet is shared, so an answer is never older than the question.
        """
        task = self._unsent.get(path)
        if task is None:
            sent = self._unsent.__delitem__
            work = self._request("GET", path, on_slot=lambda: sent(path))
            task = self._unsent[path] = asyncio.create_task(work, name=f"read {path}")
        return await asyncio.shield(task)

    async def create(self, path: str, obj: Mapping[str, Any]) -> Obj:
        return await self._request("POST", path, body=obj)

    async def patch(self, path: str, change: Mapping[str, Any], kind: str = MERGE) -> Obj:
        return await self._request("PATCH", path, body=change, content_type=kind)

    async def apply(self, path: str, obj: Mapping[str, Any], manager: str, *, force: bool = False) -> Obj:
        """Server-side apply: make or change the object so that it has these fields, and be known as their manager.

        A field that another manager set differently is a conflict (409), unless it is taken over by `force`.
        """
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        return await self._request("PATCH", path, query=query, body=obj, content_type=_APPLY)

    async def patch_latest(
        self, path: str, change: Callable[[], Mapping[str, Any] | None], kind: str = MERGE
    ) -> Obj | None:
        """Patch with what `change` says at the moment of sending: what happened while it waited for its turn is in it.

        None where by then nothing was left to write.
        """
        async with self._slots:
            body = change()
            return None if body is None else await self._send("PATCH", path, None, body, kind, "")

    async def delete(self, path: str, options: Mapping[str, Any]) -> Obj:
        return await self._request("DELETE", path, body=options)

    async def watch(self, path: str, *, accept: str = "", **query: str) -> AsyncIterator[Obj]:
        """Watch events as they come; ends when the server ends the watch."""
        assert self._session is not None
        query = {**query, "watch": "1", "allowWatchBookmarks": "true", "timeoutSeconds": str(WATCH_S)}
        timeout = aiohttp.ClientTimeout(total=WATCH_S + 60, sock_connect=10)
        try:
            async with self._session.get(
                self._prefix + path,
                params=query,
                timeout=timeout,
                headers=await self._headers(accept),
                server_hostname=self._server_name,
            ) as response:
                if response.status != 200:
                    self._check_token(response.status)
                    raise await _error(response)
                # Lines can be far longer than a StreamReader's limit, so they are cut here.
                rest = b""
                async for chunk in response.content.iter_any():
                    *lines, rest = (rest + chunk).split(b"\n")
                    for line in lines:
                        if line:
                            event: Obj = json.loads(line)
                            yield {**event, "object": _lean(event["object"])}
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(
                0, f"the watch of {path} was interrupted: {str(error) or type(error).__name__}"
            ) from error

    async def _request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        accept: str = "",
        on_slot: Callable[[], None] = lambda: None,
    ) -> Obj:
        async with self._slots:
            on_slot()
            return await self._send(method, path, query, body, content_type, accept)

    async def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        accept: str,
    ) -> Obj:
        again = self._token is not None and self._token.can_change
        while True:
            try:
                return await self._ask(method, checked_path(path), query, body, content_type, accept)
            except ApiError as error:
                # The token may have been replaced since it was read: one more try with what the file says now.
                if error.status != 401 or not again:
                    raise
                again = False

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
        content_type: str,
        accept: str,
    ) -> Obj:
        assert self._session is not None
        data = None if body is None else json.dumps(body).encode()
        headers = await self._headers(accept)
        if data is not None:
            headers["Content-Type"] = content_type
        try:
            async with self._session.request(
                method,
                self._prefix + path,
                params=query or None,
                data=data,
                headers=headers,
                server_hostname=self._server_name,
            ) as response:
                self._on_answer(method, response.status)
                if response.status >= 400:
                    self._check_token(response.status)
                    raise await _error(response)
                return _lean(json.loads(await response.read()))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, f"{method} {path}: {str(error) or type(error).__name__}") from error

    async def _headers(self, accept: str) -> dict[str, str]:
        headers = {"Accept": accept} if accept else {}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {await self._token.value()}"
        return headers

    def _check_token(self, status: int) -> None:
        if status == 401 and self._token is not None:
            self._token.refused()


def _lean(obj: Obj) -> Obj:
    """Without managedFields: half of a pod's size, of use to nobody here."""
    for one in (obj, *(obj.get("items") or ())):
        one.get("metadata", {}).pop("managedFields", None)
    return obj


def checked_path(path: str) -> str:
    """The path, unless a name in it is none: `..` or a query would make the hub ask for what the pod may not have.

    The API server leaves the names of secrets and config maps in a pod's spec unchecked; its own client refuses these.
    """
    if {".", "..", ""} & set(path.split("/")[1:]) or set(path) & set("?#%\\"):
        raise ApiError(404, f"{path!r} is not a path of the API", "NotFound")
    return path


async def _error(response: aiohttp.ClientResponse) -> ApiError:
    text = await response.text(errors="replace")
    try:
        status = json.loads(text)
        return ApiError(response.status, status.get("message", text), status.get("reason", ""))
    except (json.JSONDecodeError, AttributeError):
        return ApiError(response.status, text[:500] or response.reason or "")
