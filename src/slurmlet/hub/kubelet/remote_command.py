"""The client's end of `kubectl exec` and `kubectl attach`, in each of the forms that clients speak.

- WebSocket, one message per piece, its first byte (or digit, in the base64 forms) the channel. kubectl speaks
  v5.channel.k8s.io; libraries and browsers the older ones. The API server passes all of them on as they are, because our
  nodes declare ExtendWebSocketsToKubelet.
- SPDY/3.1, one stream per channel, named by its header `streamType`: kubectl before v1.31, many libraries, and the
  way back of newer ones where a proxy breaks WebSockets.

Both look the same to `execs.py`: `feed` what the client sends to a runner's stream, `send` to it, `finish` with a
status.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from aiohttp import WSMsgType, web

from slurmlet.hub.kubelet.http_upgrade import UpgradedConnection, asks_for_spdy, negotiate
from slurmlet.hub.kubelet.spdy_streams import Refused, SpdySession, SpdyStream, StreamReset
from slurmlet.hub.runner_links import Stream
from slurmlet.protocol import wire

V5, V4, V3, V2, V1 = (f"{name}channel.k8s.io" for name in ("v5.", "v4.", "v3.", "v2.", ""))
_BASE64 = ("v4.base64.channel.k8s.io", "base64.channel.k8s.io")
_WEBSOCKET_PROTOCOLS = (V5, V4, _BASE64[0], V1, _BASE64[1])
_SPDY_PROTOCOLS = (V5, V4, V3, V2, V1)
# Those before v4 carry an error as plain words and say nothing of a success.
_STATUS_IN_WORDS = (V3, V2, V1, _BASE64[1])
_STREAMS_WITHIN_S = 30.0
_CHANNELS = {"stdout": wire.STDOUT, "stderr": wire.STDERR}


class Wants(NamedTuple):
    """Which streams the client asked for."""

    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool


def wants(query: Mapping[str, str]) -> Wants:
    def flag(*names: str) -> bool:
        return any((query.get(name) or "").lower() in ("1", "true") for name in names)

    tty = flag("tty")
    # A terminal has one output; as with a kubelet, asking for a second one is no mistake.
    asked = Wants(flag("input", "stdin"), flag("output", "stdout"), flag("error", "stderr") and not tty, tty)
    if not (asked.stdin or asked.stdout or asked.stderr):
        raise web.HTTPBadRequest(text="you must specify at least 1 of stdin, stdout, stderr\n")
    return asked


class Client(Protocol):
    response: web.StreamResponse

    async def feed(self, stream: Stream) -> None:
        """Pass everything the client sends on; returns when the client has gone."""
        ...

    async def send(self, channel: int, data: bytes) -> None: ...

    async def finish(self, status: Mapping[str, Any]) -> None: ...

    async def close(self) -> None: ...


async def accept(request: web.Request, asked: Wants) -> Client:
    """Upgrade the request to what its client speaks."""
    if asks_for_spdy(request):
        protocol = negotiate(request, _SPDY_PROTOCOLS)
        connection = UpgradedConnection(protocol)
        await connection.take_over(request)
        client = SpdyClient(connection, protocol)
        try:
            await client.wait_for(asked)
        except BaseException:
            await client.close()
            raise
        return client
    if request.headers.get("Upgrade", "").lower() != "websocket":
        raise web.HTTPBadRequest(text="unable to upgrade: neither WebSocket nor SPDY/3.1 was asked for\n")
    socket = web.WebSocketResponse(
        protocols=_WEBSOCKET_PROTOCOLS, compress=False, max_msg_size=0, heartbeat=30
    )
    await socket.prepare(request)
    return WebSocketClient(socket)


class WebSocketClient:
    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.response: web.StreamResponse = socket
        self._socket = socket
        self._protocol = socket.ws_protocol or V1

    async def feed(self, stream: Stream) -> None:
        async for message in self._socket:
            channel, data = self._parse(message.type, message.data)
            if channel == wire.END:
                await stream.send(wire.END, data[:1])
            elif channel == wire.RESIZE or (channel == wire.STDIN and data):
                await stream.send(channel, data)

    def _parse(self, kind: WSMsgType, message: str | bytes) -> tuple[int, bytes]:
        """(channel, bytes); channel -1 for what is to be left alone."""
        content = message.encode() if isinstance(message, str) else message
        if kind not in (WSMsgType.BINARY, WSMsgType.TEXT) or not content:
            return -1, b""
        if self._protocol not in _BASE64:
            return content[0], content[1:]
        try:
            return content[0] - ord("0"), base64.b64decode(content[1:])
        except binascii.Error:
            return -1, b""

    async def send(self, channel: int, data: bytes) -> None:
        if self._protocol in _BASE64:
            await self._socket.send_str(f"{channel}{base64.b64encode(data).decode()}")
        else:
            await self._socket.send_bytes(bytes((channel,)) + data)

    async def finish(self, status: Mapping[str, Any]) -> None:
        if words := _status_text(self._protocol, status):
            await self.send(wire.STATUS, words)

    async def close(self) -> None:
        await self._socket.close()


class SpdyClient:
    def __init__(self, connection: UpgradedConnection, protocol: str) -> None:
        self.response: web.StreamResponse = connection
        self._protocol = protocol
        self._streams: dict[str, SpdyStream] = {}
        self._came = asyncio.Event()
        self._session = SpdySession(connection, self._offered)
        self._serving = asyncio.create_task(self._session.serve(), name="SPDY connection")

    def _offered(self, stream: SpdyStream) -> None:
        kind = stream.headers.get("streamtype", "")
        if kind not in ("error", "stdin", "stdout", "stderr", "resize") or kind in self._streams:
            raise Refused(f'unexpected stream type: "{kind}"')
        self._streams[kind] = stream
        self._came.set()

    async def wait_for(self, asked: Wants) -> None:
        """A client opens its streams one by one after the upgrade; nothing may start before all are there."""
        expected = {"error", *(name for name in ("stdin", "stdout", "stderr") if getattr(asked, name))}
        if asked.tty and self._protocol not in (V2, V1):
            expected.add("resize")
        try:
            async with asyncio.timeout(_STREAMS_WITHIN_S):
                while not expected <= self._streams.keys():
                    self._came.clear()
                    await self._came.wait()
        except TimeoutError:
            raise ConnectionAbortedError("timed out waiting for client to create streams") from None

    async def feed(self, stream: Stream) -> None:
        async with asyncio.TaskGroup() as tasks:
            passing = [
                tasks.create_task(pass_on(self._streams[kind], stream), name=f"SPDY {kind}")
                for kind, pass_on in (("stdin", _pass_input), ("resize", _pass_sizes))
                if kind in self._streams
            ]
            await asyncio.wait([self._serving])
            for task in passing:
                task.cancel()

    async def send(self, channel: int, data: bytes) -> None:
        for name, number in _CHANNELS.items():
            if number == channel and name in self._streams:
                try:
                    await self._streams[name].send(data)
                except StreamReset:
                    raise ConnectionResetError from None

    async def finish(self, status: Mapping[str, Any]) -> None:
        try:
            if words := _status_text(self._protocol, status):
                await self._streams["error"].send(words)
            for stream in self._streams.values():
                await stream.finish()
        except StreamReset:
            raise ConnectionResetError from None

    async def close(self) -> None:
        await self._session.leave(self._serving)


async def _pass_input(source: SpdyStream, stream: Stream) -> None:
    try:
        while (data := await source.receive()) is not None:
            await stream.send(wire.STDIN, data)
        await stream.send(wire.END, bytes((wire.STDIN,)))
    except StreamReset:
        await stream.send(wire.END, bytes((wire.STDIN,)))


async def _pass_sizes(source: SpdyStream, stream: Stream) -> None:
    """A row of JSON objects; frames may cut it anywhere."""
    decoder, text = json.JSONDecoder(), ""
    try:
        while (data := await source.receive()) is not None:
            text = (text + data.decode(errors="replace")).lstrip()
            while text:
                try:
                    _, end = decoder.raw_decode(text)
                except ValueError:
                    break
                await stream.send(wire.RESIZE, text[:end].encode())
                text = text[end:].lstrip()
    except StreamReset:
        pass


def _status_text(protocol: str, status: Mapping[str, Any]) -> bytes:
    if protocol not in _STATUS_IN_WORDS:
        return json.dumps(status).encode()
    return b"" if status["status"] == "Success" else str(status["message"]).encode()
