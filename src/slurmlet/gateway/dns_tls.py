"""One TLS connection to CoreDNS, in the loop: messages with a length before them, both ways (RFC 7858).

It never dials again by itself: whoever owns it does.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Callable

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.encryption.tls_connection import Sealed
from slurmlet.podnet.pod_dial import connect_host

_TIMEOUT_S = 2.0


class TlsClient:
    """`on_message` gets each whole message; `on_up` and `on_lost` come at most once. `room` is for all of a loop."""

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        context: ssl.SSLContext,
        server_name: str,
        room: bytearray,
        on_up: Callable[[], None],
        on_message: Callable[[bytes], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop, self._context, self._server_name, self._room = loop, context, server_name, room
        self._on_up, self._on_message, self._on_lost = on_up, on_message, on_lost
        self._sealed: Sealed | None = None
        self._in, self._out = bytearray(), bytearray()
        self._closed = self.up = False
        self._timer = loop.later(_TIMEOUT_S, lambda: self._lose("no answer"))
        connect_host(loop, addresses.number(address[0]), address[1], self._connected)

    def send(self, message: bytes) -> None:
        self._out += len(message).to_bytes(2, "big") + message
        if self.up:
            self._flush()

    def close(self) -> None:
        self._closed, self.up = True, False
        self._timer.cancel()
        if self._sealed is not None:
            self._sealed.close()

    def _lose(self, why: str) -> None:
        if not self._closed:
            self.close()
            self._on_lost(why)

    # Coming up.

    def _connected(self, made: socket.socket | None, code: int) -> None:
        if made is None:
            self._lose(os.strerror(code))
        elif self._closed:
            made.close()
        else:
            self._sealed = Sealed(
                self._loop, made, self._context, False, self._room, self._shaken, self._server_name
            )

    def _shaken(self, agreed: bool) -> None:
        if self._sealed is None or not agreed:
            self._lose("it is not who it should be, or does not know us")
            return
        self._timer.cancel()
        self.up = True
        self._sealed.on_bytes, self._sealed.on_end = self._received, self._ended
        self._sealed.read(True)
        self._on_up()
        self._flush()

    def _ended(self) -> None:
        self._lose("the connection was closed")

    # Messages.

    def _received(self, data: memoryview) -> None:
        self._in += data
        while len(self._in) >= 2 and not self._closed:
            size = int.from_bytes(self._in[:2], "big")
            if len(self._in) < 2 + size:
                return
            message = bytes(self._in[2 : 2 + size])
            del self._in[: 2 + size]
            self._on_message(message)

    def _flush(self) -> None:
        if self._out and self._sealed is not None:
            ready, self._out = self._out, bytearray()
            self._sealed.send(ready)


def context(ca: str, certificate: str, key: str) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = ssl.TLSVersion.TLSv1_3
    made.load_verify_locations(ca)
    made.load_cert_chain(certificate, key)
    return made
