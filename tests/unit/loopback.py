"""What tests of the hub's rooms share: throw-away keys, a scripted API server over real TLS on loopback, waiting."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from slurmlet.kube.client import AT_ONCE, ApiClient
from slurmlet.kube.credentials import by_certificate

Obj = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_keys(directory: Path) -> Path:
    """The authorities and leaves that a hub needs, all good for 127.0.0.1."""
    here = {"dns": ("localhost", "hub.slurmlet"), "addresses": ("127.0.0.1",)}
    pki.ensure(
        directory,
        [
            Leaf("apiserver", "ca", "kube-apiserver", server=True, **here),
            Leaf("hub", "ca", "slurmlet:hub", client=True),
            Leaf("hub-server", "hub-ca", "hub.slurmlet", server=True, **here),
            Leaf("kubelet-client", "hub-ca", "slurmlet:kubelet-client", client=True),
        ],
    )
    return directory


async def until(true: Callable[[], Any], timeout_s: float = 30.0) -> None:
    """Wait for something another task does; a test that waits in vain fails."""
    async with asyncio.timeout(timeout_s):
        while not true():
            await asyncio.sleep(0.002)


@dataclass
class Api:
    """A scripted API server: (method, path or "*") → answers, used up one by one; the last one stays."""

    client: ApiClient
    url: str
    requests: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    routes: dict[tuple[str, str], list[Obj | int | Handler]] = field(default_factory=dict)
    collections: dict[str, Stored] = field(default_factory=dict)

    def on(self, method: str, path: str, *answers: Obj | int | Handler) -> None:
        self.routes[method, path] = list(answers)

    def seen(self, method: str, path: str) -> list[tuple[dict[str, str], Any]]:
        return [(query, body) for how, where, query, body in self.requests if (how, where) == (method, path)]

    async def serve(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.requests.append(
            (request.method, request.path, dict(request.query), json.loads(text) if text else None)
        )
        answers = self.routes.get((request.method, request.path))
        if not answers:
            for path, stored in self.collections.items():
                if request.path == path or request.path.startswith(f"{path}/"):
                    status, body = stored.answer(request.method, request.path, self.requests[-1][3])
                    return web.json_response(body, status=status)
            answers = self.routes.get((request.method, "*"), [404])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, int):
            status = {
                "kind": "Status",
                "message": f"answer {answer}",
                "reason": f"Reason{answer}",
                "code": answer,
            }
            return web.json_response(status, status=answer)
        return web.json_response(answer) if isinstance(answer, dict) else await answer(request)


def watching(*events: Obj | bytes, then: str = "end") -> Handler:
    """A watch that tells `events`, then ends, hangs, or breaks the connection off."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n")
        if then == "break":
            assert request.transport is not None
            request.transport.abort()
        elif then == "hang":
            await asyncio.sleep(60)
        return response

    return handler


class Pushed:
    """A watch that tells what a test pushes, when it does."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Obj] = asyncio.Queue()

    def push(self, type_: str, obj: Obj) -> None:
        self._events.put_nowait({"type": type_, "object": obj})

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(json.dumps(await self._events.get()).encode() + b"\n")


class Stored:
    """A collection that is really kept: create, get, merge patch with conflicts. What is scripted for a path goes first."""

    def __init__(self, api: Api, path: str) -> None:
        self.objects: dict[str, Obj] = {}
        self._version = 0
        self._path = path
        api.collections[path] = self

    def put(self, obj: Obj) -> Obj:
        self._version += 1
        metadata = {**obj["metadata"], "resourceVersion": str(self._version)}
        metadata.setdefault("uid", f"uid-{metadata['name']}")
        stored = self.objects[metadata["name"]] = {**obj, "metadata": metadata}
        return stored

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Obj]:
        name = path.removeprefix(self._path).strip("/").partition("/")[0]
        if method == "POST":
            return self._refusal(409) if body["metadata"]["name"] in self.objects else (201, self.put(body))
        if not name:
            return 200, {
                "metadata": {"resourceVersion": str(self._version)},
                "items": [*self.objects.values()],
            }
        known = self.objects.get(name)
        if known is None:
            return self._refusal(404)
        if method == "DELETE":
            return 200, self.objects.pop(name)
        if method == "PATCH":
            version = (body.get("metadata") or {}).get("resourceVersion")
            if version not in (None, known["metadata"]["resourceVersion"]):
                return self._refusal(409)
            known = self.put(merge(known, body))
        return 200, known

    def _refusal(self, code: int) -> tuple[int, Obj]:
        return code, {"kind": "Status", "message": f"answer {code}", "reason": f"Reason{code}", "code": code}


def merge(old: Any, change: Any) -> Any:
    """RFC 7386."""
    if not isinstance(change, dict):
        return change
    new = dict(old) if isinstance(old, dict) else {}
    for name, value in change.items():
        if value is None:
            new.pop(name, None)
        else:
            new[name] = merge(new.get(name), value)
    return new


@asynccontextmanager
async def api_server(keys: Path, at_once: int = AT_ONCE) -> AsyncIterator[Api]:
    """The server, and a client of it that proves itself by certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(keys / "ca.crt"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(str(keys / "apiserver.crt"), str(keys / "apiserver.key"))
    app = web.Application()
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    api: Api

    async def serve(request: web.Request) -> web.StreamResponse:
        return await api.serve(request)

    app.router.add_route("*", "/{path:.*}", serve)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    files = (keys / name for name in ("ca.crt", "hub.crt", "hub.key"))
    async with ApiClient(by_certificate(url, *files), at_once=at_once) as client:
        api = Api(client, url)
        try:
            yield api
        finally:
            await runner.cleanup()
