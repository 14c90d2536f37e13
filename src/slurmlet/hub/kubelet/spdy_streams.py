"""The server's end of an SPDY connection: streams that the client opens, over anything that carries bytes.

Flow control. Every client of Kubernetes (spdystream, in all kubectls) neither keeps SPDY's windows nor sends WINDOW_UPDATE:
one that waited for it would stop for ever after 64 KiB. So windows are kept only with a peer that has shown that it keeps
them, by a window setting or an update; with all others the connection itself is the brake: nothing is read from it while
too much lies unread here, and a write waits until the peer takes it. Nor are updates sent to peers that do not use them:
spdystream puts them into the same short queues as data, where they can stop an unrelated stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from typing import Protocol

from slurmlet.hub.kubelet import spdy

log = logging.getLogger(__name__)
_CHUNK_BYTES = 32 << 10
_MAX_UNREAD_BYTES = 8 << 20
_MAX_STREAMS = 4096
_LINGER_S = 3.0


class ByteTransport(Protocol):
    async def read(self) -> bytes:
        """Some bytes, b"" at the end."""
        ...

    async def write(self, data: bytes) -> None:
        """Takes the bytes as fast as the peer does; ConnectionError when it is gone."""
        ...


class StreamReset(Exception):
    """The peer gave the stream up, or the whole connection is gone."""


class Refused(Exception):
    """Raised by whoever is offered a stream that it will not have."""


class SpdyStream:
    """One stream that the client opened. Both directions end on their own."""

    def __init__(self, session: SpdySession, frame: spdy.SynStream) -> None:
        self.number = frame.stream
        self.headers = frame.headers
        self._session = session
        self._unread: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._peer_done = frame.fin
        self._done = frame.unidirectional
        self._reset = False
        self._taken_bytes = 0
        self.window_bytes = session.initial_window_bytes

    async def receive(self) -> bytes | None:
        """The next bytes; None when the peer has said all."""
        while not self._unread:
            if self._reset:
                raise StreamReset
            if self._peer_done:
                return None
            self._changed.clear()
            await self._changed.wait()
        data = self._unread.popleft()
        self._taken_bytes += len(data)
        if await self._session.taken(self.number, len(data), self._taken_bytes):
            self._taken_bytes = 0
        return data

    async def send(self, data: bytes) -> None:
        while data:
            size = min(len(data), _CHUNK_BYTES, await self._room())
            self.window_bytes -= size
            await self._session.send(spdy.Data(self.number, data[:size]))
            data = data[size:]

    async def _room(self) -> int:
        while not self._reset and not self._done:
            room = self._session.room_bytes(self)
            if room > 0:
                return room
            self._changed.clear()
            await self._changed.wait()
        raise StreamReset

    async def finish(self) -> None:
        """Nothing more will be sent; the peer may go on."""
        if not self._done and not self._reset:
            self._done = True
            await self._session.send(spdy.Data(self.number, b"", fin=True))
            self._forget_if_over()

    async def reset(self, status: int = spdy.CANCEL) -> None:
        """Give it up in both directions, unless both are over."""
        over = self._reset or (self._done and self._peer_done)
        self.abandon()
        if not over:
            await self._session.send(spdy.RstStream(self.number, status))

    # For the session.

    def take(self, data: bytes, fin: bool) -> int:
        """How many of the bytes are kept for a reader."""
        if self._peer_done or self._reset:
            return 0
        if data:
            self._unread.append(data)
        if fin:
            self._peer_done = True
            self._forget_if_over()
        self._changed.set()
        return len(data)

    def wake(self) -> None:
        self._changed.set()

    def abandon(self) -> None:
        self._reset = True
        self._session.dropped(sum(map(len, self._unread)))
        self._unread.clear()
        self._session.forget(self.number)
        self._changed.set()

    def _forget_if_over(self) -> None:
        if self._done and self._peer_done:
            self._session.forget(self.number)


class SpdySession:
    """`on_stream` is offered each new stream and must not wait; it raises Refused for what it will not have."""

    def __init__(self, transport: ByteTransport, on_stream: Callable[[SpdyStream], None]) -> None:
        self._transport = transport
        self._on_stream = on_stream
        self._encoder = spdy.Encoder()
        self._writing = asyncio.Lock()
        self._streams: dict[int, SpdyStream] = {}
        self._last_stream = 0
        self._unread_bytes = 0
        self._readable = asyncio.Event()
        self._readable.set()
        self._leaving = False
        self._over = False
        self._keeps_windows = False
        self._window_bytes = spdy.INITIAL_WINDOW
        self.initial_window_bytes = spdy.INITIAL_WINDOW

    async def serve(self) -> None:
        """Handle what comes until the connection ends. Streams are dead after it."""
        decoder = spdy.Decoder()
        try:
            while received := await self._transport.read():
                for frame in decoder.feed(received):
                    await self._handle(frame)
                await self._readable.wait()
        except spdy.SpdyError as error:
            log.info("an SPDY connection was ended: %s", error)
            await self._send_quietly(spdy.GoAway(self._last_stream, spdy.GOAWAY_PROTOCOL_ERROR))
        except (ConnectionError, StreamReset):
            pass
        finally:
            self._over = True
            for stream in list(self._streams.values()):
                stream.abandon()

    async def leave(self, serving: asyncio.Task[None]) -> None:
        """Send GOAWAY, and let the peer read it: a connection closed with bytes unread would be reset, and what was
        sent last would be lost with it."""
        self._leaving = True
        await self._send_quietly(spdy.GoAway(self._last_stream, spdy.GOAWAY_OK))
        for stream in list(self._streams.values()):
            stream.abandon()
        await asyncio.wait([serving], timeout=_LINGER_S)
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)

    async def _handle(self, frame: spdy.Frame) -> None:
        match frame:
            case spdy.Data(number, data, fin):
                await self._take(number, data, fin)
            case spdy.SynStream():
                await self._offer(frame)
            case spdy.RstStream(number):
                if (stream := self._streams.get(number)) is not None:
                    stream.abandon()
            case spdy.Headers(number, _, fin):
                if fin and (stream := self._streams.get(number)) is not None:
                    stream.take(b"", fin)
            case spdy.Ping(number) if number % 2:
                # Even numbers are answers to pings of a server.
                await self.send(frame)
            case spdy.Settings(values):
                if spdy.SETTING_INITIAL_WINDOW in values:
                    self._set_initial_window(values[spdy.SETTING_INITIAL_WINDOW])
            case spdy.WindowUpdate(number, delta_bytes):
                self._grow_window(number, delta_bytes)

    async def _offer(self, frame: spdy.SynStream) -> None:
        if self._leaving:
            return
        if frame.stream % 2 == 0 or frame.stream <= self._last_stream:
            await self.send(spdy.RstStream(frame.stream, spdy.PROTOCOL_ERROR))
            return
        self._last_stream = frame.stream
        stream = SpdyStream(self, frame)
        try:
            self._add(stream)
        except Refused as refusal:
            log.info("an SPDY stream was refused: %s", refusal)
            self._streams.pop(stream.number, None)
            await self.send(spdy.RstStream(stream.number, spdy.REFUSED_STREAM))
            return
        # Whatever on_stream set going starts only when we wait here, and queues for the connection behind this.
        await self.send(spdy.SynReply(stream.number, {}))

    def _add(self, stream: SpdyStream) -> None:
        if len(self._streams) >= _MAX_STREAMS:
            raise Refused(f"{_MAX_STREAMS} streams are open")
        self._streams[stream.number] = stream
        self._on_stream(stream)

    async def _take(self, number: int, data: bytes, fin: bool) -> None:
        stream = self._streams.get(number)
        if stream is not None:
            self._unread_bytes += stream.take(data, fin)
            if self._unread_bytes > _MAX_UNREAD_BYTES:
                self._readable.clear()
        elif number > self._last_stream:
            await self.send(spdy.RstStream(number, spdy.INVALID_STREAM))

    # For the streams.

    async def send(self, frame: spdy.Frame) -> None:
        """Encoded and written in one step: compressed headers make sense only in the order they were made."""
        if self._over:
            raise StreamReset
        if isinstance(frame, spdy.Data):
            self._window_bytes -= len(frame.data)
        async with self._writing:
            try:
                await self._transport.write(self._encoder.encode(frame))
            except ConnectionError:
                raise StreamReset from None

    async def _send_quietly(self, frame: spdy.Frame) -> None:
        with contextlib.suppress(StreamReset):
            await self.send(frame)

    async def taken(self, number: int, size: int, since_update_bytes: int) -> bool:
        """A reader took bytes; True when the peer was told of all of them."""
        self.dropped(size)
        if not self._keeps_windows or since_update_bytes < spdy.INITIAL_WINDOW // 2:
            return False
        await self._send_quietly(spdy.WindowUpdate(0, since_update_bytes))
        if number in self._streams:
            await self._send_quietly(spdy.WindowUpdate(number, since_update_bytes))
        return True

    def dropped(self, size: int) -> None:
        self._unread_bytes -= size
        if self._unread_bytes <= _MAX_UNREAD_BYTES // 2:
            self._readable.set()

    def forget(self, number: int) -> None:
        self._streams.pop(number, None)

    # Windows.

    def room_bytes(self, stream: SpdyStream) -> int:
        return min(stream.window_bytes, self._window_bytes) if self._keeps_windows else spdy.MAX_WINDOW

    def _set_initial_window(self, size_bytes: int) -> None:
        self._keeps_windows = True
        for stream in self._streams.values():
            stream.window_bytes += size_bytes - self.initial_window_bytes
        self.initial_window_bytes = size_bytes
        self._wake_all()

    def _grow_window(self, number: int, delta_bytes: int) -> None:
        self._keeps_windows = True
        if number == 0:
            self._window_bytes += delta_bytes
        elif (stream := self._streams.get(number)) is not None:
            stream.window_bytes += delta_bytes
        self._wake_all()

    def _wake_all(self) -> None:
        for stream in self._streams.values():
            stream.wake()
