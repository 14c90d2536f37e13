"""Connections of runners: who dialled in, frames in and out, streams with flow control (`protocol/wire.py`).

The server takes only certificates of the hub's own CA that name a pod, or the gateway; a link speaks for that one and
no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol, cast

from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.runner_credentials import NODE_NAME_PREFIX, POD_NAME_PREFIX
from slurmlet.model.ids import PodUid
from slurmlet.protocol import checks, wire
from slurmlet.protocol.messages import (
    AgentHello,
    AgentToHub,
    Answer,
    AnyMessage,
    FromHub,
    GatewayToHub,
    Hello,
    Open,
    RunnerHello,
    RunnerToHub,
)
from slurmlet.protocol.pod_report import PodUsage
from slurmlet.protocol.version import refusal, version_of

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

    def __init__(self, uid: PodUid, hello: Hello, writer: asyncio.StreamWriter) -> None:
        self.uid = uid
        self.hello = hello
        self.has_pod = bool(hello.get("has_pod"))
        self.ephemeral: set[str] = set()  # ephemeral containers handed over on this link
        self.redefined: dict[str, str] = {}  # images handed over on this link, by container
        self._writer = writer
        self._streams: dict[int, Stream] = {}
        self._last_stream = 0
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._last_ask = 0
        self._alive = True

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def runner(self) -> RunnerHello:
        """The hello of a link whose uid is a pod's."""
        return cast("RunnerHello", self.hello)

    @property
    def agent(self) -> AgentHello:
        """The hello of a link whose uid has NODE_PREFIX."""
        return cast("AgentHello", self.hello)

    async def send(self, frame: bytes) -> None:
        if not self._alive:
            raise LinkLost
        try:
            self._writer.write(frame)
            await self._writer.drain()
        except (ConnectionError, ssl.SSLError) as error:
            raise LinkLost from error

    async def tell(self, message: FromHub) -> None:
        await self.send(wire.control(message))

    async def ask_usage(self, timeout_s: float, *, disk: bool) -> PodUsage | None:
        """What the pod uses; None before it has begun. Raises TimeoutError, LinkLost."""
        self._last_ask += 1
        number = self._last_ask
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self.tell({"type": "ask", "id": number, "what": "usage", "disk": disk})
                told: Answer = await answer
                return told["usage"]
        finally:
            del self._asked[number]

    def answered(self, message: Answer) -> None:
        waiting = self._asked.get(message["id"])
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    async def open(self, asked: Callable[[int], Open]) -> Stream:
        """`asked` makes the message, with the number that the stream has."""
        self._last_stream += 1
        stream = self._streams[self._last_stream] = Stream(self, self._last_stream)
        await self.tell(asked(self._last_stream))
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


class AgentPeers(Protocol):
    """Who looks after the links of agents: admits one, hears what it says, sees its end."""

    async def link_came(self, link: RunnerLink) -> None: ...
    async def link_said(self, link: RunnerLink, message: AgentToHub) -> None: ...
    def link_ended(self, link: RunnerLink) -> None: ...


class _Kind(NamedTuple):
    """One kind of peer: who looks after its links, and what may come from it."""

    hello: Callable[[AnyMessage], Hello]
    message: Callable[[AnyMessage], Any]
    came: Callable[[RunnerLink], Awaitable[None]]
    said: Callable[[RunnerLink, Any], Awaitable[None]]
    ended: Callable[[RunnerLink], None]


class LinkServer:
    """Listens for runners and the gateway. `on_link` admits a link, `on_message` gets its control messages, `on_end` its
    end, `on_refused` why one was sent away. Agents of allocation nodes dial in at the same port, for `agents`."""

    def __init__(
        self,
        settings: Settings,
        on_link: Callable[[RunnerLink], Awaitable[None]],
        on_message: Callable[[RunnerLink, RunnerToHub | GatewayToHub], Awaitable[None]],
        on_end: Callable[[RunnerLink], None],
        agents: AgentPeers | None = None,
        on_refused: Callable[[PodUid, str], None] = lambda _uid, _why: None,
    ) -> None:
        self._settings = settings
        ours = (on_link, on_message, on_end)
        self._runners = _Kind(checks.runner_hello, checks.from_runner, *ours)
        self._gateway = _Kind(checks.gateway_hello, checks.from_gateway, *ours)
        self._agents = self._runners
        if agents is not None:
            theirs = (agents.link_came, agents.link_said, agents.link_ended)
            self._agents = _Kind(checks.agent_hello, checks.from_agent, *theirs)
        self._on_refused = on_refused

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
        link, uid, kind = None, PodUid("a stranger"), self._runners
        try:
            _notice_dead_peers(writer)
            uid = _peer_of(writer)
            kind = self._kind_of(uid)
            link = await asyncio.wait_for(self._greet(uid, kind, reader, writer), HELLO_TIMEOUT_S)
            await kind.came(link)
            while True:
                await _dispatch(link, await _read_frame(reader), kind)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, LinkLost):
            pass
        except (wire.ProtocolError, ValueError, LookupError, TypeError, AttributeError) as error:
            log.warning("the connection of %s was ended: %s: %s", uid, type(error).__name__, error)
        finally:
            if link is not None:
                link.end()
                kind.ended(link)
            writer.close()

    def _kind_of(self, uid: PodUid) -> _Kind:
        if uid == GATEWAY:
            return self._gateway
        return self._agents if uid.startswith(NODE_PREFIX) else self._runners

    async def _greet(
        self, uid: PodUid, kind: _Kind, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> RunnerLink:
        frame = await _read_frame(reader)
        if frame.kind != wire.CONTROL:
            raise wire.ProtocolError("no hello")
        hello: AnyMessage = wire.parse(frame.payload)
        if hello["type"] != "hello" or _introduced(uid, hello) != uid:
            raise wire.ProtocolError("no hello of the one whom the certificate names")
        why = refusal(version_of(hello))
        if why:
            self._on_refused(uid, why)
            writer.write(wire.control({"type": "refused", "reason": why}))
            await writer.drain()
            raise wire.ProtocolError(why)
        return RunnerLink(uid, kind.hello(hello), writer)


async def _dispatch(link: RunnerLink, frame: wire.Frame, kind: _Kind) -> None:
    if frame.kind != wire.CONTROL:
        link.route(frame)
        return
    message = kind.message(wire.parse(frame.payload))
    if message is None:
        return  # of a newer version, which may say more than we know
    if message["type"] == "answer":
        link.answered(message)
    else:
        await kind.said(link, message)


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


def _introduced(uid: PodUid, hello: AnyMessage) -> str:
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
