"""`kubectl exec`, and what it has in common with attach: a client of any form (`remotecommand.py`), a stream to the
runner, bytes between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from slurmlet.hub.kubelet.remote_command import Client, Wants, accept, wants
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.hub.pods.pod_worker import PodWorker
from slurmlet.hub.runner_links import LinkLost, Stream
from slurmlet.model.container_reports import containers_of
from slurmlet.protocol import wire
from slurmlet.protocol.messages import Open

_DIAL_IN_S = 5.0
# Runners try every 6.5 s at the latest.
_REDIAL_S = 8.0
_LOST = {"error": "the connection to the pod's runner was lost", "reason": "InternalError"}


async def serve_exec(request: web.Request, pods: Pods) -> web.StreamResponse:
    command = request.query.getall("command", [])

    def asked(stream: int, container: str, want: Wants) -> Open:
        return {
            "type": "open",
            "stream": stream,
            "what": "exec",
            "container": container,
            "command": command,
            "stdin": want.stdin,
            "stdout": want.stdout,
            "stderr": want.stderr,
            "tty": want.tty,
        }

    return await serve_command(request, pods, asked)


async def serve_command(
    request: web.Request, pods: Pods, opening: Callable[[int, str, Wants], Open]
) -> web.StreamResponse:
    """Connect a client with a process in the pod: a new one (exec) or the container's own (attach)."""
    where = request.match_info
    worker = pods.named(where["namespace"], where["pod"])
    if worker is None:
        raise web.HTTPNotFound(text=f'pod "{where["pod"]}" not found\n')
    await check_running(worker, where["container"])
    asked = wants(request.query)
    link = await worker.linked(_DIAL_IN_S)
    if link is None:
        raise web.HTTPServiceUnavailable(text="the pod's runner is not connected just now; try again\n")
    client = await accept(request, asked)
    try:
        stream = await link.open(lambda number: opening(number, where["container"], asked))
    except LinkLost:
        await _say(client, exec_status(_LOST))
    else:
        await _pump(client, stream, wire.STDERR if asked.stderr else wire.STDOUT)
    return client.response


async def _say(client: Client, status: dict[str, Any]) -> None:
    try:
        await client.finish(status)
    except ConnectionError:
        pass
    finally:
        await client.close()


async def check_running(worker: PodWorker, container: str) -> None:
    if worker.state.report is None and worker.state.began_before:
        # This hub is new, and the runner is about to find it and to tell what it has.
        await worker.linked(_REDIAL_S)
    found = containers_of(worker.state.report).get(container)
    if found is None or found["state"] != "running":
        raise web.HTTPNotFound(text=f'unable to upgrade connection: container not found ("{container}")')


async def _pump(client: Client, stream: Stream, complaints: int) -> None:
    upward = asyncio.create_task(_to_runner(client, stream), name="exec stdin")
    try:
        await _to_client(client, stream, complaints)
    except (ConnectionError, LinkLost):
        pass
    finally:
        # Before anything that waits: the server cancels this task once more when it sees the connection lost, and a
        # stream left open would keep the process in the pod blocked on its output for ever.
        await stream.close()
        upward.cancel()
        await asyncio.gather(upward, return_exceptions=True)
        await client.close()


async def _to_runner(client: Client, stream: Stream) -> None:
    await client.feed(stream)
    # The client went away: whoever reads its input sees the end of it.
    await stream.close()
    stream.end()


async def _to_client(client: Client, stream: Stream, complaints: int) -> None:
    while (item := await stream.receive()) is not None:
        channel, data = item
        if channel == wire.STATUS:
            told = json.loads(data)
            if "exit_code" in told and "error" in told:
                # kubectl passes an exit code on or prints an error, never both: scripts get the code (127, 126, as
                # from a shell), people the words, as if the program that was not there had said them.
                ending = "\n" if complaints == wire.STDERR else "\r\n"
                await client.send(complaints, f"{told.pop('error')}{ending}".encode())
            await client.finish(exec_status(told))
            return
        if channel in (wire.STDOUT, wire.STDERR):
            await client.send(channel, data)
    await client.finish(exec_status(_LOST))


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
