"""One TLS connection in the loop: the handshake, then bytes both ways. It knows no frames: its users do.

What it was given and could not send it keeps, without limit: users look at `waiting_bytes` before they give it more. It
never sends close_notify; what the end of the transport means is up to its users, who are called back for it.

OpenSSL never sees the socket, only bytes. Python 3.13 leaves an error of a socket in OpenSSL's queue, where the next
connection finds it: the reset of one would be the end of another. We leave none; others of this process may.
"""

from __future__ import annotations

import socket
import ssl
from typing import Any, Callable, Optional

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.socket_relay import reset

HANDSHAKE_TIMEOUT_S = 10.0
ROOM_BYTES = 256 << 10
# A host that vanished is noticed after two minutes, also where nothing is said.
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))


def _nothing(*_what: object) -> None:
    """Until somebody wants to know."""


class Sealed:
    """`done` gets whether the handshake succeeded, once; a connection that failed is closed by then.

    `room` is where bytes are put before `on_bytes` sees them: one for all connections of a loop.
    """

    def __init__(
        self,
        loop: Loop,
        raw: socket.socket,
        context: ssl.SSLContext,
        server: bool,
        room: bytearray,
        done: Callable[[bool], None],
        server_name: Optional[str] = None,
    ) -> None:
        self._loop, self._raw, self._view, self._done = loop, raw, memoryview(room), done
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._context, self._server, self._server_name = context, server, server_name
        self._tls = self._object(self._came, self._goes)
        self._out: Any = b""
        self._reading = self._shut = False
        # Bytes, valid during the call only; all that waited was sent; the connection ended, not by us.
        self.on_bytes: Callable[[memoryview], None] = _nothing
        self.on_drained: Callable[[], None] = _nothing
        self.on_end: Callable[[], None] = _nothing
        self._timer = loop.later(HANDSHAKE_TIMEOUT_S, self._give_up)
        try:
            raw.setblocking(False)
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:
                raw.setsockopt(socket.IPPROTO_TCP, option, value)
        except OSError:
            # Over already.
            loop.soon(self._give_up)
            return
        loop.soon(self._begin)

    def _object(self, came: ssl.MemoryBIO, goes: ssl.MemoryBIO) -> ssl.SSLObject:
        return self._context.wrap_bio(came, goes, server_side=self._server, server_hostname=self._server_name)

    @property
    def waiting_bytes(self) -> int:
        return len(self._out)

    def close(self, broken: bool = False) -> None:
        if self._shut:
            return
        self._shut = True
        self._timer.cancel()
        self._loop.forget(self._raw.fileno())
        if broken:
            reset(self._raw)
        else:
            self._raw.close()
        # Whoever is behind these holds us: what has ended must go without the garbage collector.
        self._done = self.on_bytes = self.on_drained = self.on_end = _nothing

    # The handshake.

    def _begin(self) -> None:
        if not self._shut:
            self._loop.reading(self._raw.fileno(), self._shaking)
            self._shake()

    def _shaking(self) -> None:
        if self._receive():
            self._shake()
        elif not self._shut:
            self._give_up()

    def _shake(self) -> None:
        try:
            self._calmly(self._tls.do_handshake)
        except ssl.SSLWantReadError:
            self._flush()
        except ssl.SSLError:
            # Says why, to whoever it is.
            self._flush()
            self._give_up()
        else:
            self._flush()
            self._timer.cancel()
            self._loop.reading(self._raw.fileno(), None)
            done, self._done = self._done, _nothing
            done(True)

    def _give_up(self) -> None:
        done = self._done
        self.close(broken=True)
        done(False)

    # In.

    def read(self, wanted: bool) -> None:
        """Call on_bytes from now on, or stop."""
        if self._shut or wanted == self._reading:
            return
        self._reading = wanted
        self._loop.reading(self._raw.fileno(), self._readable if wanted else None)
        if wanted and self._came.pending:
            # Behind the handshake there may be the first bytes, of which the kernel knows nothing any more.
            self._loop.soon(self._decrypt)

    def _readable(self) -> None:
        if self._receive():
            self._decrypt()
        elif not self._shut:
            self._ended()

    def _receive(self) -> bool:
        """False where that was the end."""
        try:
            received = self._raw.recv(ROOM_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._came.write(received)
        return bool(received)

    def _decrypt(self) -> None:
        """All that is there, whatever becomes of it: what has been received is never waited for again."""
        filled = 0
        try:
            while self._came.pending and not self._shut:
                # One record for each call, however large the room.
                filled += self._calmly(self._tls.read, ROOM_BYTES, self._view[filled:])
                if filled > ROOM_BYTES - (32 << 10):
                    self.on_bytes(self._view[:filled])
                    filled = 0
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._ended()
            return
        if filled:
            self.on_bytes(self._view[:filled])
        if self._goes.pending:
            self._flush()

    def _calmly(self, act: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return act(*arguments)
        except ssl.SSLError:
            raise
        except OSError:
            # An error that somebody else's socket has left: a new object begins with an empty queue.
            self._object(ssl.MemoryBIO(), ssl.MemoryBIO())
            return act(*arguments)

    def _ended(self) -> None:
        # Nobody is told who closed it himself meanwhile.
        told = self.on_end
        self.close(broken=True)
        told()

    # Out.

    def send(self, data: Any) -> None:
        if self._shut:
            return
        view, sent = memoryview(data), 0
        while sent < len(view):
            sent += self._tls.write(view[sent:])
        self._flush()

    def _flush(self) -> None:
        """What is encrypted goes out, or waits."""
        if self._shut:
            return
        fresh = self._goes.read()
        if self._out:
            self._out = b"".join((self._out, fresh))
        elif fresh:
            self._out = fresh
            self._write()
            if self._out:
                self._loop.writing(self._raw.fileno(), self._writable)

    def _write(self) -> None:
        try:
            sent = self._raw.send(self._out)
        except BlockingIOError:
            return
        except OSError:
            # Whoever reads is told; nothing may be called back from within send().
            self._out = b""
            self._loop.soon(self._ended)
            return
        self._out = memoryview(self._out)[sent:] if sent < len(self._out) else b""

    def _writable(self) -> None:
        self._write()
        if not self._out:
            self._loop.writing(self._raw.fileno(), None)
            self.on_drained()
