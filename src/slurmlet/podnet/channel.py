"""Messages between a runner and its netd, over a socket pair: the frames of `protocol/wire.py`, control messages only."""

from __future__ import annotations

import socket

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Union

    from slurmlet.protocol.messages import NetdToRunner, RunnerToNetd

    OnMessage = Callable[[Any], None]


_READ_BYTES = 256 << 10


class Channel:
    def __init__(
        self, loop: Loop, sock: socket.socket, on_message: OnMessage, on_end: Callable[[], None]
    ) -> None:
        self._loop, self._socket = loop, sock
        self._on_message, self._on_end = on_message, on_end
        self._decoder = wire.Decoder()
        self._out = bytearray()
        sock.setblocking(False)
        loop.reading(sock.fileno(), self._readable)

    def send(self, message: Union[RunnerToNetd, NetdToRunner]) -> None:
        self.send_frame(wire.control(message))

    def send_frame(self, frame: bytes) -> None:
        self._out += frame
        self._flush()

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())
            self._socket.close()

    def _flush(self) -> None:
        if self._socket.fileno() < 0:
            return
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            self._loop.writing(self._socket.fileno(), self._flush)
            return
        except OSError:
            # The other end is gone; whoever reads will see.
            self._out.clear()
        self._loop.writing(self._socket.fileno(), None)

    def _readable(self) -> None:
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self.close()
            self._on_end()
            return
        for frame in self._decoder.feed(received):
            self._on_message(wire.parse(frame.payload))
