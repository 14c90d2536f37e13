"""One TLS connection to CoreDNS, in the loop: messages with a length before them, both ways (RFC 7858).

It never dials again by itself: whoever owns it does.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable

from slurmlet.runner.loop import Loop, Timer

_TIMEOUT_S = 2.0
_READ_BYTES = 64 << 10


class TlsClient:
    """`on_message` gets each whole message; `on_up` and `on_lost` come at most once."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        context: ssl.SSLContext,
        server_name: str,
        on_up: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop, self._context, self._server_name = loop, context, server_name
        self._on_up, self._on_message, self._on_lost = on_up, on_message, on_lost
        self._socket: socket.socket | None = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._tls: ssl.SSLSocket | None = None
        self._in, self._out = bytearray(), bytearray()
        self.up = False
        self._timer: Timer | None = loop.later(_TIMEOUT_S, lambda: self._lose("no answer"))
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        code = self._socket.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            loop.soon(lambda: self._lose(os.strerror(code)))
        else:
            loop.writing(self._socket.fileno(), self._connected)

    def send(self, message: bytes) -> None:
        self._out += len(message).to_bytes(2, "big") + message
        if self.up:
            self._flush()

    def close(self) -> None:
        self.up = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for held in (self._socket, self._tls):
            if held is not None and held.fileno() >= 0:
                self._loop.forget(held.fileno())
                held.close()
        self._socket = self._tls = None

    def _lose(self, why: str) -> None:
        if self._socket is None and self._tls is None:
            return
        self.close()
        self._on_lost(why)

    # Coming up.

    def _connected(self) -> None:
        assert self._socket is not None
        plain, self._socket = self._socket, None
        self._loop.forget(plain.fileno())
        code = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._socket = plain
            self._lose(os.strerror(code))
            return
        self._tls = self._context.wrap_socket(
            plain, server_hostname=self._server_name, do_handshake_on_connect=False
        )
        self._shake_hands()

    def _shake_hands(self) -> None:
        tls = self._tls
        assert tls is not None
        fd = tls.fileno()
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.writing(fd, None)
            self._loop.reading(fd, self._shake_hands)
            return
        except ssl.SSLWantWriteError:
            self._loop.writing(fd, self._shake_hands)
            return
        except OSError as error:
            self._lose(str(error))
            return
        assert self._timer is not None
        self._timer.cancel()
        self._timer = None
        self.up = True
        self._loop.writing(fd, None)
        self._loop.reading(fd, self._readable)
        self._on_up()
        self._flush()

    # Messages.

    def _readable(self) -> None:
        tls = self._tls
        assert tls is not None
        try:
            received = tls.recv(_READ_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._lose(str(error))
            return
        if not received:
            self._lose("the connection was closed")
            return
        self._in += received
        self._take_messages(tls)
        if self._tls is tls and tls.pending():
            # What OpenSSL holds already will not make the socket readable again.
            self._loop.soon(lambda: self._readable() if self._tls is tls else None)

    def _take_messages(self, tls: ssl.SSLSocket) -> None:
        while len(self._in) >= 2 and self._tls is tls:
            size = int.from_bytes(self._in[:2], "big")
            if len(self._in) < 2 + size:
                return
            message = bytes(self._in[2 : 2 + size])
            del self._in[: 2 + size]
            self._on_message(message)

    def _flush(self) -> None:
        tls = self._tls
        if tls is None:
            return
        try:
            while self._out:
                # A write that is tried again must begin with the same bytes: this buffer only grows at its end.
                sent = tls.send(self._out)
                del self._out[:sent]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._loop.writing(tls.fileno(), self._flush)
            return
        except OSError as error:
            problem = str(error)
            # Not at once: the caller is in the middle of something.
            self._loop.soon(lambda: self._lose(problem) if self._tls is tls else None)
            return
        self._loop.writing(tls.fileno(), None)


def context(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_verify_locations(ca)
    made.load_cert_chain(certificate, key)
    return made
