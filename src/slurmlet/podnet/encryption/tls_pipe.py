"""A TLS connection made to look like a plain socket: its user gets one end of a pair; bytes, ends and resets are exact.

Inside of TLS there are frames: length(4, big-endian) and as many bytes; length 0 says that the sender has finished. A
transport that ends without it was cut: the user sees a reset.

The pair is TCP on loopback, because only TCP knows resets: a unix socket closes in one way. It is made with a listener that
lives for one connection, and the accepted end must be ours by its port, so nobody slips in between.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from typing import Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.encryption.tls_connection import Sealed
from slurmlet.podnet.socket_relay import reset

HEAD = struct.Struct(">I")
_CHUNK_BYTES = 128 << 10
_PAIR_TIMEOUT_S, _PAIR_TRIES = 1.0, 8


def pair() -> Tuple[socket.socket, socket.socket]:
    """(inner, outer): two connected, non-blocking sockets."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(_PAIR_TRIES)
        outer = socket.socket()
        try:
            outer.setblocking(False)
            outer.connect_ex(listener.getsockname())
            # The kernel has answered within connect, or will in a moment.
            listener.settimeout(_PAIR_TIMEOUT_S)
            inner = _accepted(listener, outer.getsockname())
        except OSError:
            outer.close()
            raise
    for end in (inner, outer):
        end.setblocking(False)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return inner, outer


def _accepted(listener: socket.socket, wanted: Tuple[str, int]) -> socket.socket:
    for _ in range(_PAIR_TRIES):
        came, peer = listener.accept()
        if peer == wanted:
            return came
        came.close()
    raise OSError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))


class Pipe:
    """Owns both sides and closes them when both directions have finished, or at the first break."""

    def __init__(
        self, loop: Loop, sealed: Sealed, inner: socket.socket, room: bytearray, heard: bytes = b""
    ) -> None:
        """`heard` has come already."""
        self._loop, self._sealed, self._inner = loop, sealed, inner
        # Shared as Sealed's is: what is read is sealed, or copied, before anybody else reads.
        self._room = memoryview(room)[: HEAD.size + _CHUNK_BYTES]
        self._head = b""
        self._left_bytes = 0
        self._waiting = bytearray()
        self._said_end = self._heard_end = self._reading = False
        sealed.on_bytes, sealed.on_drained, sealed.on_end = self._take, self._drained, self._break
        sealed.read(True)
        self._read_inner(True)
        if heard:
            self._take(memoryview(heard))

    # From the user.

    def _read_inner(self, wanted: bool) -> None:
        if wanted != self._reading:
            self._reading = wanted
            self._loop.reading(self._inner.fileno(), self._inner_readable if wanted else None)

    def _inner_readable(self) -> None:
        try:
            got = self._inner.recv_into(self._room[HEAD.size :])
        except BlockingIOError:
            return
        except OSError:
            self._break()
            return
        if not got:
            self._said_end = True
            self._read_inner(False)
        HEAD.pack_into(self._room, 0, got)
        self._sealed.send(self._room[: HEAD.size + got])
        if self._sealed.waiting_bytes:
            self._read_inner(False)
        self._maybe_over()

    def _drained(self) -> None:
        if not self._said_end:
            self._read_inner(True)
        self._maybe_over()

    # From the other side.

    def _take(self, view: memoryview) -> None:
        at = 0
        while at < len(view) and self._inner.fileno() >= 0:
            if self._heard_end:
                self._break()
                return
            if self._left_bytes == 0:
                piece = bytes(view[at : at + HEAD.size - len(self._head)])
                at += len(piece)
                self._head += piece
                if len(self._head) == HEAD.size:
                    self._left_bytes = HEAD.unpack(self._head)[0]
                    self._head = b""
                    self._heard_end = self._left_bytes == 0
                continue
            end = min(len(view), at + self._left_bytes)
            self._left_bytes -= end - at
            self._give(view[at:end])
            at = end
        if self._heard_end and not self._waiting:
            self._finish_inner()

    def _give(self, piece: memoryview) -> None:
        sent = 0
        if not self._waiting:
            try:
                sent = self._inner.send(piece)
            except BlockingIOError:
                pass
            except OSError:
                self._break()
                return
        if sent < len(piece):
            # No more than what one turn of the loop has brought.
            self._waiting += piece[sent:]
            self._sealed.read(False)
            self._loop.writing(self._inner.fileno(), self._inner_writable)

    def _inner_writable(self) -> None:
        try:
            del self._waiting[: self._inner.send(self._waiting)]
        except BlockingIOError:
            return
        except OSError:
            self._break()
            return
        if self._waiting:
            return
        self._loop.writing(self._inner.fileno(), None)
        if self._heard_end:
            self._finish_inner()
        # Also after the end: a transport that is cut then must be noticed.
        self._sealed.read(True)

    def _finish_inner(self) -> None:
        if self._inner.fileno() < 0:
            return
        try:
            self._inner.shutdown(socket.SHUT_WR)
        except OSError:
            self._break()
            return
        self._maybe_over()

    # The end.

    def _maybe_over(self) -> None:
        if self._said_end and self._heard_end and not self._waiting and not self._sealed.waiting_bytes:
            self._end(broken=False)

    def _break(self) -> None:
        self._end(broken=True)

    def _end(self, broken: bool) -> None:
        if self._inner.fileno() < 0:
            return
        self._loop.forget(self._inner.fileno())
        self._sealed.close(broken)
        if broken:
            reset(self._inner)
        else:
            self._inner.close()
