"""`kubectl exec`: a WebSocket from the API server, a stream to the runner, bytes between them.

The API server sends exec as WebSocket because our nodes declare ExtendWebSocketsToKubelet (docs/decisions/0011).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import WSMsgType, web

from slurmlet.hub.links import LinkLost, Stream
from slurmlet.hub.pods import Pods
from slurmlet.hub.worker import PodWorker
from slurmlet.runner import wire

V5 = "v5.channel.k8s.io"
_PROTOCOLS = (V5, "v4.channel.k8s.io")
_DIAL_IN_S = 5.0


async def serve_exec(request: web.Request, pods: Pods) -> web.StreamResponse:
    where, query = request.match_info, request.query
    worker = pods.named(where["namespace"], where["pod"])
    if worker is None:
        raise web.HTTPNotFound(text=f'pod "{where["pod"]}" not found\n')
    _check_running(worker, where["container"])
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise web.HTTPBadRequest(
            text="this kubelet speaks the WebSocket protocol v5.channel.k8s.io; use kubectl v1.31 or newer\n"
        )
    link = await worker.linked(_DIAL_IN_S)
    if link is None:
        raise web.HTTPServiceUnavailable(text="the pod's runner is not connected just now; try again\n")
    try:
        stream = await link.open(
            "exec",
            container=where["container"],
            command=query.getall("command", []),
            stdin=_wants(query, "input", "stdin"),
            stdout=_wants(query, "output", "stdout"),
            stderr=_wants(query, "error", "stderr"),
            tty=_flag(query.get("tty")),
        )
    except LinkLost:
        raise web.HTTPServiceUnavailable(text="the pod's runner went away; try again\n") from None
    socket = web.WebSocketResponse(protocols=_PROTOCOLS, compress=False, max_msg_size=0, heartbeat=30)
    await socket.prepare(request)
    await _pump(socket, stream, wire.STDERR if _wants(query, "error", "stderr") else wire.STDOUT)
    return socket


def _wants(query: Mapping[str, str], short: str, long: str) -> bool:
    return _flag(query.get(short) or query.get(long))


def _flag(text: str | None) -> bool:
    return (text or "").lower() in ("1", "true")


def _check_running(worker: PodWorker, container: str) -> None:
    report = worker.state.report or {}
    found = {**(report.get("init_containers") or {}), **(report.get("containers") or {})}.get(container)
    if found is None or found["state"] != "running":
        raise web.HTTPNotFound(text=f'unable to upgrade connection: container not found ("{container}")')


async def _pump(socket: web.WebSocketResponse, stream: Stream, complaints: int) -> None:
    upward = asyncio.create_task(_to_runner(socket, stream), name="exec stdin")
    try:
        await _to_client(socket, stream, complaints)
    except (ConnectionError, LinkLost):
        pass
    finally:
        upward.cancel()
        await asyncio.gather(upward, return_exceptions=True)
        await stream.close()
        await socket.close()


async def _to_runner(socket: web.WebSocketResponse, stream: Stream) -> None:
    """Frames of the client: first byte the channel, 255 the end of one."""
    async for message in socket:
        if message.type is not WSMsgType.BINARY or not message.data:
            continue
        channel, data = message.data[0], message.data[1:]
        if channel == wire.END:
            await stream.send(wire.END, data[:1])
        elif channel == wire.RESIZE or (channel == wire.STDIN and data):
            await stream.send(channel, data)
    # The client went away: whoever reads its input sees the end of it.
    await stream.close()
    stream.end()


async def _to_client(socket: web.WebSocketResponse, stream: Stream, complaints: int) -> None:
    while (item := await stream.receive()) is not None:
        channel, data = item
        if channel == wire.STATUS:
            told = json.loads(data)
            if "exit_code" in told and "error" in told:
                # kubectl passes an exit code on or prints an error, never both: scripts get the code (127, 126, as
                # from a shell), people the words, as if the program that was not there had said them.
                ending = "\n" if complaints == wire.STDERR else "\r\n"
                await socket.send_bytes(bytes((complaints,)) + f"{told.pop('error')}{ending}".encode())
            await socket.send_bytes(bytes((wire.STATUS,)) + json.dumps(exec_status(told)).encode())
            return
        if channel in (wire.STDOUT, wire.STDERR):
            await socket.send_bytes(bytes((channel,)) + data)
    lost = {"error": "the connection to the pod's runner was lost", "reason": "InternalError"}
    await socket.send_bytes(bytes((wire.STATUS,)) + json.dumps(exec_status(lost)).encode())


def exec_status(told: dict[str, Any]) -> dict[str, Any]:
    """The Status object that tells kubectl the exit code."""
    status: dict[str, Any] = {"kind": "Status", "apiVersion": "v1", "metadata": {}}
    if "error" in told:
        return {
            **status,
            "status": "Failure",
            "reason": told.get("reason", "InternalError"),
            "message": told["error"],
            "code": 500,
        }
    code = int(told["exit_code"])
    if code == 0:
        return {**status, "status": "Success"}
    return {
        **status,
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }
