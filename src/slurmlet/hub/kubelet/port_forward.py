"""`kubectl port-forward`: connections of the client to ports of the pod, many over one SPDY connection.

Each is a pair of SPDY streams that the client opens, data and error, held together by the header `requestID`, and one
stream to the runner, which connects to the port. kubectl carries SPDY inside WebSocket messages
(`SPDY/3.1+portforward.k8s.io`); older clients upgrade the HTTP connection itself. Client libraries also use an older form
without SPDY: `ports` in the query, and for each port two WebSocket channels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
from collections.abc import Awaitable, Callable

from aiohttp import WSMsgType, web

from slurmlet.hub.kubelet.http_upgrade import UpgradedConnection, asks_for_spdy, negotiate
from slurmlet.hub.kubelet.spdy_streams import ByteTransport, Refused, SpdySession, SpdyStream, StreamReset
from slurmlet.hub.pods.pod_manager import Pods
from slurmlet.hub.pods.pod_worker import PodWorker
from slurmlet.hub.runner_links import LinkLost, Stream
from slurmlet.protocol import wire

log = logging.getLogger(__name__)
_V1 = "portforward.k8s.io"
_TUNNEL = f"SPDY/3.1+{_V1}"
_CHANNELS = "v4.channel.k8s.io"
_DIAL_IN_S = 5.0
_PAIR_WITHIN_S = 30.0
_MAX_PORTS = 128


class ForwardFailed(Exception):
    """The port could not be reached; the message is for the client's error stream."""


async def serve_forward(request: web.Request, pods: Pods) -> web.StreamResponse:
    where = request.match_info
    worker = pods.named(where["namespace"], where["pod"])
    if worker is None:
        raise web.HTTPNotFound(text=f'pod "{where["pod"]}" not found\n')
    if await worker.linked(_DIAL_IN_S) is None:
        raise web.HTTPServiceUnavailable(text="the pod's runner is not connected just now; try again\n")
    if asks_for_spdy(request):
        connection = UpgradedConnection(negotiate(request, (_V1,)))
        await connection.take_over(request)
        await _Forwarding(worker, connection).serve()
        return connection
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise web.HTTPBadRequest(text="unable to upgrade: neither WebSocket nor SPDY/3.1 was asked for\n")
    ports = _ports(request) if _TUNNEL not in request.headers.get("Sec-WebSocket-Protocol", "") else []
    socket = web.WebSocketResponse(
        protocols=(_TUNNEL, _CHANNELS), compress=False, max_msg_size=0, heartbeat=30
    )
    await socket.prepare(request)
    try:
        if ports:
            await _serve_channels(worker, socket, ports)
        else:
            await _Forwarding(worker, _Tunnel(socket)).serve()
    finally:
        await socket.close()
    return socket


async def _open(worker: PodWorker, port: int) -> Stream:
    try:
        link = await worker.linked(_DIAL_IN_S)
        if link is None:
            raise ForwardFailed("the pod's runner is not connected")
        return await link.open(
            lambda stream: {"type": "open", "stream": stream, "what": "forward", "port": port}
        )
    except LinkLost:
        raise ForwardFailed("the pod's runner went away") from None


async def _from_runner(stream: Stream, deliver: Callable[[bytes], Awaitable[None]]) -> None:
    """Everything the port sends, until it has said all."""
    while (item := await stream.receive()) is not None:
        channel, data = item
        if channel == wire.STDOUT:
            await deliver(data)
        elif channel == wire.END:
            return
        elif channel == wire.STATUS and "error" in (told := json.loads(data)):
            raise ForwardFailed(told["error"])


def _complaint(worker: PodWorker, port: int, problem: ForwardFailed) -> bytes:
    metadata = worker.state.pod["metadata"]
    pod = f"{metadata['name']}_{metadata['namespace']}"
    return f"error forwarding port {port} to pod {pod}, uid {metadata['uid']}: {problem}".encode()


# SPDY.


class _Tunnel:
    """SPDY's bytes in WebSocket messages, cut anywhere."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self._socket = socket

    async def read(self) -> bytes:
        async for message in self._socket:
            if message.type is WSMsgType.BINARY and message.data:
                data: bytes = message.data
                return data
        return b""

    async def write(self, data: bytes) -> None:
        await self._socket.send_bytes(data)


class _Pair:
    """The two streams of one connection, as they come."""

    def __init__(self) -> None:
        self.streams: dict[str, SpdyStream] = {}
        self.complete = asyncio.Event()

    def add(self, kind: str, stream: SpdyStream) -> None:
        if kind in self.streams:
            raise Refused(f"{kind} stream already assigned")
        self.streams[kind] = stream
        if len(self.streams) == 2:
            self.complete.set()


class _Forwarding:
    """One client and all its connections."""

    def __init__(self, worker: PodWorker, transport: ByteTransport) -> None:
        self._worker = worker
        self._session = SpdySession(transport, self._offered)
        self._pairs: dict[str, _Pair] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        serving = asyncio.create_task(self._session.serve(), name="port-forward")
        try:
            await asyncio.shield(serving)
        finally:
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._session.leave(serving)

    def _offered(self, stream: SpdyStream) -> None:
        kind, port = stream.headers.get("streamtype", ""), stream.headers.get("port", "")
        if kind not in ("error", "data"):
            raise Refused(f'invalid stream type "{kind}"')
        if not _is_port(port):
            raise Refused(f'unable to parse "{port}" as a port')
        # Clients older than the header open the error stream first, then the data stream right after it.
        number = stream.number if kind == "error" else stream.number - 2
        request_id = stream.headers.get("requestid") or str(number)
        pair = self._pairs.get(request_id)
        if pair is None:
            pair = self._pairs[request_id] = _Pair()
            task = asyncio.create_task(self._connect(request_id, pair, int(port)), name=f"forward {port}")
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        pair.add(kind, stream)

    async def _connect(self, request_id: str, pair: _Pair, port: int) -> None:
        try:
            async with asyncio.timeout(_PAIR_WITHIN_S):
                await pair.complete.wait()
        except TimeoutError:
            await self._give_up(pair, f"(request={request_id}) timed out waiting for streams")
            return
        finally:
            del self._pairs[request_id]
        data, error = pair.streams["data"], pair.streams["error"]
        try:
            await self._forward(data, error, port)
        except (StreamReset, LinkLost):
            pass
        finally:
            with contextlib.suppress(StreamReset):
                await error.finish()
                await data.reset()

    async def _give_up(self, pair: _Pair, words: str) -> None:
        with contextlib.suppress(StreamReset):
            if "error" in pair.streams:
                await pair.streams["error"].send(words.encode())
            for stream in pair.streams.values():
                await stream.finish()

    async def _forward(self, data: SpdyStream, error: SpdyStream, port: int) -> None:
        try:
            runner = await _open(self._worker, port)
        except ForwardFailed as problem:
            await self._complain(data, error, port, problem)
            return
        upward = asyncio.create_task(_to_runner(data, runner), name=f"forward to {port}")
        try:
            try:
                await _from_runner(runner, data.send)
            except ForwardFailed as problem:
                await self._complain(data, error, port, problem)
                return
            # The client looks at the error stream as soon as the port has said all; it may go on sending all the same.
            await data.finish()
            await error.finish()
            await upward
        finally:
            upward.cancel()
            await asyncio.gather(upward, return_exceptions=True)
            await runner.close()

    async def _complain(self, data: SpdyStream, error: SpdyStream, port: int, problem: ForwardFailed) -> None:
        words = _complaint(self._worker, port, problem)
        log.info("%s", words.decode())
        await error.send(words)
        await error.finish()
        await data.finish()


async def _to_runner(data: SpdyStream, runner: Stream) -> None:
    try:
        while (received := await data.receive()) is not None:
            await runner.send(wire.STDIN, received)
        await runner.send(wire.END, bytes((wire.STDIN,)))
    except StreamReset:
        # The client wants no more of it, in either direction.
        await runner.close()
        runner.end()
    except LinkLost:
        pass


def _is_port(text: str) -> bool:
    # Python refuses to read a number of thousands of digits with a ValueError.
    return text.isdecimal() and len(text) <= 5 and 0 < int(text) < 1 << 16


# Channels.


def _ports(request: web.Request) -> list[int]:
    found = [text for line in request.query.getall("ports", []) for text in line.split(",")]
    found += [text for line in request.query.getall("port", []) for text in line.split(",")]
    if not found or len(found) > _MAX_PORTS:
        raise web.HTTPBadRequest(text='query parameter "port" is required\n')
    if not all(map(_is_port, found)):
        raise web.HTTPBadRequest(text=f"unable to parse {','.join(found)!r} as ports\n")
    return [int(text) for text in found]


async def _serve_channels(worker: PodWorker, socket: web.WebSocketResponse, ports: list[int]) -> None:
    """Port n of the list: its data on channel 2n, its error on 2n+1; each begins with the port's number."""
    inputs: list[asyncio.Queue[bytes]] = [asyncio.Queue(maxsize=16) for _ in ports]
    tasks = [
        asyncio.create_task(_serve_channel(worker, socket, 2 * n, port, inputs[n]), name=f"forward {port}")
        for n, port in enumerate(ports)
    ]
    try:
        async for message in socket:
            if message.type is WSMsgType.BINARY and len(message.data) > 1:
                n, is_error = divmod(message.data[0], 2)
                if not is_error and n < len(ports):
                    await _put(inputs[n], message.data[1:], tasks[n])
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _put(queue: asyncio.Queue[bytes], data: bytes, taker: asyncio.Task[None]) -> None:
    """Wait for room, but not for a taker that has left."""
    putting = asyncio.create_task(queue.put(data))
    await asyncio.wait([putting, taker], return_when=asyncio.FIRST_COMPLETED)
    putting.cancel()


async def _serve_channel(
    worker: PodWorker, socket: web.WebSocketResponse, channel: int, port: int, source: asyncio.Queue[bytes]
) -> None:
    async def say(number: int, data: bytes) -> None:
        await socket.send_bytes(bytes((number,)) + data)

    for number in (channel, channel + 1):
        await say(number, struct.pack("<H", port))
    try:
        runner = await _open(worker, port)
    except ForwardFailed as problem:
        await say(channel + 1, _complaint(worker, port, problem))
        return

    async def upward() -> None:
        with contextlib.suppress(LinkLost):
            while True:
                await runner.send(wire.STDIN, await source.get())

    sending = asyncio.create_task(upward(), name=f"forward to {port}")
    try:
        await _from_runner(runner, lambda data: say(channel, data))
    except ForwardFailed as problem:
        await say(channel + 1, _complaint(worker, port, problem))
    except ConnectionError:
        pass
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await runner.close()
