"""One TCP connection of a pod in mode "packets" and the host's socket that carries it: bytes, ends and resets, both ways."""

from __future__ import annotations

import errno
import socket
from typing import Callable, List, Optional

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet.slow.tcp_endpoint import Events, TcpEnd
from slurmlet.podnet.socket_relay import reset

_READ_BYTES = 256 << 10


class Carried(Events):
    def __init__(
        self, loop: Loop, make_end: Callable[[Events], TcpEnd], forget: Callable[[TcpEnd], None]
    ) -> None:
        self._loop, self._forget = loop, forget
        self.end = make_end(self)
        self._socket: Optional[socket.socket] = None
        self._waiting: List[memoryview] = []
        self._ended = self._reading = self._read_all = self._writing = self._closing = False
        # For a connection to the pod: gets 0 or an errno, once.
        self.on_opened: Optional[Callable[[int], None]] = None
        self.timer: Optional[Timer] = None

    # Before it is open.

    def hold(self, made: socket.socket) -> None:
        made.setblocking(False)
        self._socket = made

    def begin(self, made: socket.socket) -> None:
        self.hold(made)
        self._read(True)

    def refuse(self) -> None:
        self.end.refuse()
        self.forget()

    def forget(self) -> None:
        self._forget(self.end)

    def drop(self) -> None:
        """A probe has seen enough."""
        self.end.abort()
        self.forget()

    def give_up(self) -> None:
        if self.on_opened is not None:
            self.end.abort()
            self.forget()
            self._tell(errno.ETIMEDOUT)

    def _tell(self, code: int) -> None:
        told, self.on_opened = self.on_opened, None
        if self.timer is not None:
            self.timer.cancel()
        if told is not None:
            told(code)

    # From the pod.

    def opened(self) -> None:
        if self.on_opened is None:
            return
        self._tell(0)
        if self._socket is not None:
            self._read(True)

    def data(self, data: bytes) -> None:
        if self._socket is None:
            return
        self._waiting.append(memoryview(data))
        if len(self._waiting) == 1:
            self._write()

    def finished(self) -> None:
        self._ended = True
        self._write()

    def room(self) -> None:
        self._read(True)

    def over(self, refused: bool) -> None:
        self.forget()
        if self.on_opened is not None:
            self._tell(errno.ECONNREFUSED if refused else errno.ETIMEDOUT)
        else:
            self._close(broken=True)

    def closed(self) -> None:
        self.forget()
        # The pod is done; the socket may still have to take what it said.
        self._closing = True
        if not self._waiting:
            self._close(broken=False)

    def _close(self, broken: bool) -> None:
        made, self._socket = self._socket, None
        if made is not None:
            self._loop.forget(made.fileno())
            if broken:
                reset(made)
            else:
                made.close()

    # The socket.

    def _read(self, wanted: bool) -> None:
        if self._socket is not None and wanted != self._reading and not self._read_all:
            self._reading = wanted
            self._loop.reading(self._socket.fileno(), self._readable if wanted else None)

    def _readable(self) -> None:
        assert self._socket is not None
        free = self.end.free_bytes
        if free <= 0:
            self._read(False)
            return
        try:
            received = self._socket.recv(min(free, _READ_BYTES))
        except BlockingIOError:
            return
        except OSError:
            self._broken()
            return
        if received:
            self.end.write(received)
        else:
            self._read(False)
            self._read_all = True
            self.end.finish()

    def _write(self) -> None:
        if self._socket is None:
            return
        taken = 0
        try:
            while self._waiting:
                first = self._waiting[0]
                sent = self._socket.send(first)
                taken += sent
                if sent < len(first):
                    self._waiting[0] = first[sent:]
                else:
                    self._waiting.pop(0)
        except BlockingIOError:
            pass
        except OSError:
            self._broken()
            return
        if taken:
            self.end.consumed(taken)
        if self._writing != bool(self._waiting):
            self._writing = not self._writing
            self._loop.writing(self._socket.fileno(), self._write if self._writing else None)
        if self._ended and not self._waiting:
            self._shut()
            if self._closing:
                self._close(broken=False)

    def _shut(self) -> None:
        assert self._socket is not None
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            # Gone already; reading tells how.
            pass

    def _broken(self) -> None:
        self.end.abort()
        self.forget()
        self._close(broken=True)
