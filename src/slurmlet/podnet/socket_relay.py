"""Bytes between two connected sockets, both ways, in the loop: half-close, backpressure, resets passed on.

A connection that says little goes through a buffer; one that says much is handed to the kernel (`splice`, Python 3.10),
which moves pages instead of copying them. Pipes are few on a shared host, so nobody gets one before he needs it.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from typing import Any, Callable, List, Optional

from slurmlet.linux.event_loop import Loop

_CHUNK_BYTES = 256 << 10
# Beyond this a direction is worth a pipe.
_SPLICE_AFTER_BYTES = 1 << 20
_PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
# So that one busy connection does not starve the others of the loop.
_ROUNDS = 8
_RESET = struct.pack("ii", 1, 0)
_splice: Optional[Callable[..., int]] = getattr(os, "splice", None)
_SPLICE_FLAGS: int = getattr(os, "SPLICE_F_MOVE", 1) | getattr(os, "SPLICE_F_NONBLOCK", 2)


def reset(connection: socket.socket) -> None:
    """Close with a reset: the other end sees that this was no orderly end."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    except OSError:
        pass
    connection.close()


def is_over(connection: socket.socket) -> bool:
    """Whether the other end has reset it. What it sent can still be read, but its port may be another's by now."""
    try:
        connection.getpeername()
    except OSError:
        return True
    return False


class Relay:
    """Owns both sockets and closes them when both directions are over, or at the first error."""

    def __init__(
        self, loop: Loop, left: socket.socket, right: socket.socket, on_end: Callable[[], None] = lambda: None
    ) -> None:
        self._loop, self._on_end = loop, on_end
        self._sockets = (left, right)
        for end in self._sockets:
            end.setblocking(False)
            _prepare(end)
        self._ways: List[_Way] = []
        self._ways = [_Way(loop, left, right, self._changed), _Way(loop, right, left, self._changed)]
        for way in self._ways:
            way.begin()

    def close(self) -> None:
        self._end(broken=False)

    def _changed(self, broken: bool) -> None:
        if broken or all(way.over for way in self._ways):
            self._end(broken)

    def _end(self, broken: bool) -> None:
        if self._sockets[0].fileno() < 0:
            return
        for way in self._ways:
            way.release()
        for end in self._sockets:
            self._loop.forget(end.fileno())
            if broken:
                reset(end)
            else:
                end.close()
        self._on_end()


def _prepare(end: socket.socket) -> None:
    if end.family != socket.AF_UNIX:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


class _Way:
    """One direction."""

    def __init__(
        self, loop: Loop, source: socket.socket, target: socket.socket, changed: Callable[[bool], None]
    ) -> None:
        self._loop, self._source, self._target, self._changed = loop, source, target, changed
        self.over = False
        self._ended = False
        self._moved_bytes = 0
        self._left: Any = b""
        self._pipe: Optional[List[int]] = None
        self._in_pipe_bytes = 0
        self._stalled = False

    def begin(self) -> None:
        self._loop.reading(self._source.fileno(), self._readable)

    def release(self) -> None:
        for fd in self._pipe or []:
            os.close(fd)
        self._pipe = None

    def _readable(self) -> None:
        try:
            if self._pipe is not None:
                self._pump()
            else:
                self._copy()
        except OSError:
            self._changed(True)

    def _writable(self) -> None:
        try:
            if self._pipe is not None:
                self._drain()
            else:
                self._send(self._left)
        except OSError:
            self._changed(True)
            return
        if not self._waiting:
            self._stall(False)
            if self._ended:
                self._finish()

    @property
    def _waiting(self) -> bool:
        return bool(self._left) or self._in_pipe_bytes > 0

    # Through a buffer.

    def _copy(self) -> None:
        try:
            received = self._source.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        if not received:
            self._finish()
            return
        self._moved_bytes += len(received)
        self._send(received)
        if self._left:
            self._stall(True)
        elif self._moved_bytes > _SPLICE_AFTER_BYTES:
            self._moved_bytes = 0
            self._pipe = _pipe()

    def _send(self, data: Any) -> None:
        try:
            sent = self._target.send(data)
        except BlockingIOError:
            sent = 0
        self._left = b"" if sent == len(data) else memoryview(data)[sent:]

    # Through a pipe.

    def _pump(self) -> None:
        assert self._pipe is not None
        assert _splice is not None
        for _ in range(_ROUNDS):
            try:
                moved = _splice(self._source.fileno(), self._pipe[1], _PIPE_BYTES, flags=_SPLICE_FLAGS)
            except BlockingIOError:
                return
            if moved == 0:
                self._finish()
                return
            self._in_pipe_bytes += moved
            self._drain()
            if self._in_pipe_bytes:
                self._stall(True)
                return

    def _drain(self) -> None:
        assert self._pipe is not None
        assert _splice is not None
        while self._in_pipe_bytes:
            try:
                moved = _splice(
                    self._pipe[0], self._target.fileno(), self._in_pipe_bytes, flags=_SPLICE_FLAGS
                )
            except BlockingIOError:
                return
            self._in_pipe_bytes -= moved

    # The state of the direction.

    def _stall(self, wait: bool) -> None:
        """Read no more until the other end has taken what is left; and the other way round."""
        if wait == self._stalled:
            return
        self._stalled = wait
        self._loop.reading(self._source.fileno(), None if wait or self._ended else self._readable)
        self._loop.writing(self._target.fileno(), self._writable if wait else None)

    def _finish(self) -> None:
        if not self._ended:
            self._ended = True
            self._loop.reading(self._source.fileno(), None)
        if self._waiting:
            return
        self.over = True
        try:
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            # The other end is gone already; its own direction notices.
            pass
        self._changed(False)


def _pipe() -> Optional[List[int]]:
    """None where the system has no splice, or this user has too many pipes: the buffer does it too."""
    if _splice is None:
        return None
    try:
        made = list(os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK))
    except OSError:
        return None
    try:
        fcntl.fcntl(made[1], _F_SETPIPE_SZ, _PIPE_BYTES)
    except OSError:
        pass
    return made
