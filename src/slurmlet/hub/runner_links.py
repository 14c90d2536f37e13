"""Connections of runners: who dialled in, frames in and out, streams with flow control (`protocol/wire.py`).

The server takes only certificates of the hub's own CA that name a pod, or the gateway; a link speaks for that one and
no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.runner_credentials import NODE_NAME_PREFIX, POD_NAME_PREFIX
from slurmlet.model.ids import PodUid
from slurmlet.protocol import wire

log = logging.getLogger(__name__)
HELLO_TIMEOUT_S = 20.0
# A stranger who only connects holds memory of ours no longer than this.
HANDSHAKE_TIMEOUT_S = 15.0
KEEPALIVE_S = 10
GATEWAY_NAME = "slurmlet:gateway"
# In the place of a pod's UID, which it cannot be mistaken for.
GATEWAY = PodUid("gateway")
NODE_PREFIX = "node:"
_CHUNK_BYTES = 64 << 10
_CREDITED = (wire.STDIN, wire.STDOUT, wire.STDERR)


class LinkLost(Exception):
    """The runner went away while somebody used its link."""


class Stream:
    """One exec or logs session over a link."""

    def __init__(self, link: RunnerLink, number: int) -> None:
        self._link = link
        self._number = number
        self._incoming: asyncio.Queue[tuple[int, bytes] | None] = asyncio.Queue()
        self._credit_bytes = wire.INITIAL_WINDOW
        self._credit_came = asyncio.Event()
        self._taken_bytes = 0
        self._ended = False

    async def send(self, channel: int, data: bytes) -> None:
        """Hand bytes to the runner, as fast as it takes them."""
        for start in range(0, max(len(data), 1), _CHUNK_BYTES):
            piece = data[start : start + _CHUNK_BYTES]
            if channel in _CREDITED:
                await self._wait_for_credit(len(piece))
            await self._link.send(wire.data(self._number, channel, piece))

    async def _wait_for_credit(self, size: int) -> None:
        while self._credit_bytes <= 0:
            if self._ended:
                raise LinkLost
            self._credit_came.clear()
            await self._credit_came.wait()
        # May go below zero by one piece: the window is a brake, not a wall.
        self._credit_bytes -= size

    async def receive(self) -> tuple[int, bytes] | None:
        """The next (channel, bytes); None when the runner closed the stream."""
        item = await self._incoming.get()
        if item is not None and item[0] in _CREDITED:
            self._taken_bytes += len(item[1])
            if self._taken_bytes >= wire.INITIAL_WINDOW // 2 and not self._ended:
                # A runner that is gone needs no credit; what it sent before is still to be read.
                with contextlib.suppress(LinkLost):
                    await self._link.send(wire.window(self._number, self._taken_bytes))
                self._taken_bytes = 0
        return item

    async def close(self) -> None:
        await self._link.forget(self._number)

    def take(self, frame: wire.Frame) -> None:
        if frame.kind == wire.DATA:
            self._incoming.put_nowait((frame.payload[0], frame.payload[1:]))
        elif frame.kind == wire.WINDOW:
            self._credit_bytes += int.from_bytes(frame.payload[:4], "big")
            self._credit_came.set()

    def end(self) -> None:
        self._ended = True
        self._incoming.put_nowait(None)
        self._credit_came.set()


class RunnerLink:
    """One runner's connection, from its hello to its end."""

    def __init__(self, uid: PodUid, hello: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        self.uid = uid
        self.hello = hello
        self.has_pod = bool(hello.get("has_pod"))
        self.ephemeral: set[str] = set()  # ephemeral containers handed over on this link
        self.redefined: dict[str, str] = {}  # images handed over on this link, by container
        self._writer = writer
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last_ask = 0
        self._alive = True

    @property
    def alive(self) -> bool:
        return self._alive

    async def send(self, frame: bytes) -> None:
        if not self._alive:
            raise LinkLost
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except (ConnectionError, ssl.SSLError) as error:
            raise LinkLost from error

    async def tell(self, type_: str, **fields: Any) -> None:
        await self.send(wire.pack(wire.CONTROL, 0, json.dumps({"type": type_, **fields}).encode()))

    async def ask(self, what: str, timeout_s: float, **fields: Any) -> dict[str, Any]:
        """The runner's answer to a question. Raises TimeoutError, LinkLost."""
        self._last_ask += 1
        number = self._last_ask
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self.tell("ask", id=number, what=what, **fields)
                told: dict[str, Any] = await answer
                return told
        finally:
            del self._asked[number]

    def answered(self, message: dict[str, Any]) -> None:
        waiting = self._asked.get(message["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def open(self, what: str, **fields: Any) -> Stream:
        self._last_stream += 1
        stream = self._streams[self._last_stream] = Stream(self, self._last_stream)
        await self.tell("open", stream=self._last_stream, what=what, **fields)
        return stream

    async def forget(self, number: int) -> None:
        if self._streams.pop(number, None) is not None:
            with contextlib.suppress(LinkLost):
                await self.send(wire.pack(wire.CLOSE, number))

    def route(self, frame: wire.Frame) -> None:
        stream = self._streams.get(frame.stream)
        if stream is None:
            return  # closed on our side while the frame was under way
        if frame.kind == wire.CLOSE:
            del self._streams[frame.stream]
            stream.end()
        else:
            stream.take(frame)

    def end(self) -> None:
        self._alive = False
        for stream in self._streams.values():
            stream.end()
        self._streams.clear()
        for waiting in self._asked.values():
            if not waiting.done():
                waiting.set_exception(LinkLost())
        self._writer.close()


class Peers(Protocol):
    """Who looks after a kind of link: admits it, hears what it says, sees its end."""

    async def link_came(self, link: RunnerLink) -> None: ...
    async def link_said(self, link: RunnerLink, message: dict[str, Any]) -> None: ...
    def link_ended(self, link: RunnerLink) -> None: ...


class LinkServer:
    """Listens for runners. `on_link` admits a link (False: unknown pod), `on_message` gets its control messages,
    `on_end` its end. Agents of allocation nodes dial in at the same port and are handed to `agents`."""

    def __init__(
        self,
        settings: Settings,
        on_link: Callable[[RunnerLink], Awaitable[None]],
        on_message: Callable[[RunnerLink, dict[str, Any]], Awaitable[None]],
        on_end: Callable[[RunnerLink], None],
        agents: Peers | None = None,
    ) -> None:
        self._settings = settings
        self._on_link = on_link
        self._on_message = on_message
        self._on_end = on_end
        self._agents = agents

    async def start(self, port: int) -> asyncio.Server:
        context = ssl.create_default_context(
            ssl.Purpose.CLIENT_AUTH, cafile=str(self._settings.pki("hub-ca.crt"))
        )
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(
            str(self._settings.pki("hub-server.crt")), str(self._settings.pki("hub-server.key"))
        )
        return await asyncio.start_server(
            self._serve, "0.0.0.0", port, ssl=context, backlog=1024, ssl_handshake_timeout=HANDSHAKE_TIMEOUT_S
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = None
        came, said, ended = self._on_link, self._on_message, self._on_end
        try:
            _notice_dead_peers(writer)
            uid = _peer_of(writer)
            if uid.startswith(NODE_PREFIX) and self._agents is not None:
                came, said, ended = self._agents.link_came, self._agents.link_said, self._agents.link_ended
            link = await asyncio.wait_for(self._greet(uid, reader, writer), HELLO_TIMEOUT_S)
            await came(link)
            while True:
                await self._dispatch(link, await _read_frame(reader), said)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, LinkLost):
            pass
        except (wire.ProtocolError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("a runner's connection was ended: %s: %s", type(error).__name__, error)
        finally:
            if link is not None:
                link.end()
                ended(link)
            writer.close()

    async def _greet(
        self, uid: PodUid, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> RunnerLink:
        frame = await _read_frame(reader)
        hello = json.loads(frame.payload)
        if frame.kind != wire.CONTROL or hello.get("type") != "hello" or hello.get("protocol") != wire.MAJOR:
            raise wire.ProtocolError("no hello of this protocol")
        if _introduced(uid, hello) != uid:
            raise wire.ProtocolError("the hello names another one than the certificate")
        return RunnerLink(uid, hello, writer)

    async def _dispatch(
        self,
        link: RunnerLink,
        frame: wire.Frame,
        said: Callable[[RunnerLink, dict[str, Any]], Awaitable[None]],
    ) -> None:
        if frame.kind == wire.CONTROL:
            message = json.loads(frame.payload)
            if message.get("type") == "answer":
                link.answered(message)
            else:
                await said(link, message)
        else:
            link.route(frame)


def _notice_dead_peers(writer: asyncio.StreamWriter) -> None:
    """A host that lost power says nothing: without this its link would look alive for ever."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_S),
        (socket.TCP_KEEPCNT, 3),
        (socket.TCP_USER_TIMEOUT, 4 * KEEPALIVE_S * 1000),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _introduced(uid: PodUid, hello: dict[str, Any]) -> str:
    """Whom the hello names, in the form of a link's uid."""
    if uid == GATEWAY:
        return GATEWAY if hello.get("gateway") else ""
    return f"{NODE_PREFIX}{hello.get('node')}" if uid.startswith(NODE_PREFIX) else str(hello.get("pod_uid"))


def _peer_of(writer: asyncio.StreamWriter) -> PodUid:
    """The pod, the gateway or (with NODE_PREFIX) the allocation node that the certificate speaks for."""
    certificate = writer.get_extra_info("peercert") or {}
    names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
    if names == [GATEWAY_NAME]:
        return GATEWAY
    if len(names) == 1 and names[0].startswith(NODE_NAME_PREFIX):
        return PodUid(NODE_PREFIX + names[0].removeprefix(NODE_NAME_PREFIX))
    if len(names) != 1 or not names[0].startswith(POD_NAME_PREFIX):
        raise wire.ProtocolError("the certificate names no pod")
    return PodUid(names[0].removeprefix(POD_NAME_PREFIX))


async def _read_frame(reader: asyncio.StreamReader) -> wire.Frame:
    length, kind, stream = wire.parse_header(await reader.readexactly(wire.HEADER_BYTES))
    return wire.Frame(kind, stream, await reader.readexactly(length))
