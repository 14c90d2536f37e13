"""The runner's one connection to the hub: dialling, TLS, frames in both directions, and dialling again.

Everything happens in the loop's thread; the socket never blocks. What the pod does must not depend on the link being
up: `send` outside a connection drops (reports are whole, so a lost one costs nothing).
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
import sys

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.protocol import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List, Optional, Protocol, Tuple

    from slurmlet.protocol.cluster_files import HubFile

    class Access(Protocol):
        """Where the hub is, and what proves it and us: a pod's directory, or the gateway's."""

        @property
        def hub_ca(self) -> str: ...

        @property
        def chain(self) -> Tuple[str, Optional[str]]:
            """Files of the certificate and of its key; None where the first has both."""
            ...

        def hub(self) -> HubFile: ...


CONNECT_TIMEOUT_S = 5.0
HANDSHAKE_TIMEOUT_S = 10.0
FIRST_DELAY_S, MAX_DELAY_S = 0.2, 5.0
_TCP_USER_TIMEOUT_MS = 20_000
_READ_BYTES = 64 << 10
# OpenSSL wants a write that it could not finish repeated with the same bytes, so they are offered in fixed pieces.
_WRITE_BYTES = 16 << 10


class Link:
    def __init__(
        self,
        loop: Loop,
        access: Access,
        on_up: Callable[[str], None],
        on_frame: Callable[[wire.Frame], None],
        on_down: Callable[[], None],
    ) -> None:
        self._loop, self._access = loop, access
        self._on_up, self._on_frame, self._on_down = on_up, on_frame, on_down
        self._socket: Optional[socket.socket] = None
        self._tls: Optional[ssl.SSLSocket] = None
        self._up = False
        self._decoder = wire.Decoder()
        self._out = bytearray()
        self._piece: bytes = b""
        self._addresses: List[str] = []
        self._hub: Optional[HubFile] = None
        self._delay_s = FIRST_DELAY_S
        self._timer: Optional[Timer] = None
        self._complained = ""

    @property
    def up(self) -> bool:
        return self._up

    def start(self) -> None:
        """Read where the hub is now and try its addresses in turn."""
        try:
            self._hub = hub = self._access.hub()
            self._addresses = [str(address) for address in hub["addresses"]]
        except (OSError, ValueError, KeyError) as error:
            self._lost(f"hub.json: {error}")
            return
        self._next_address("no address in hub.json")

    def send(self, frame: bytes) -> None:
        if not self._up:
            return
        self._out += frame
        self._flush()

    def close(self) -> None:
        self._cancel_timer()
        self._drop()

    def flushed(self) -> bool:
        return not self._out and not self._piece

    # Dialling.

    def _next_address(self, problem: str) -> None:
        self._drop()
        if not self._addresses:
            self._lost(problem)
            return
        assert self._hub is not None
        address = self._addresses.pop(0)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._socket = plain = socket.socket(family, socket.SOCK_STREAM)
        plain.setblocking(False)
        _watch_for_death(plain)
        result = plain.connect_ex((address, int(self._hub["runner_port"])))
        if result not in (0, errno.EINPROGRESS):
            self._next_address(f"{address}: {os.strerror(result)}")
            return
        self._arm(CONNECT_TIMEOUT_S, lambda: self._next_address(f"{address}: no answer"))
        self._loop.writing(plain.fileno(), lambda: self._connected(address))

    def _connected(self, address: str) -> None:
        plain = self._socket
        assert plain is not None
        self._loop.forget(plain.fileno())
        result = plain.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if result:
            self._next_address(f"{address}: {os.strerror(result)}")
            return
        try:
            assert self._hub is not None
            self._tls = _secured(plain, self._hub["server_name"], self._access)
        except (OSError, ValueError) as error:
            self._next_address(f"{address}: {error}")
            return
        self._socket = None
        self._arm(HANDSHAKE_TIMEOUT_S, lambda: self._next_address(f"{address}: no TLS handshake"))
        self._shake_hands()

    def _shake_hands(self) -> None:
        client = self._tls
        assert client is not None
        fd = client.fileno()
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            self._loop.writing(fd, None)
            self._loop.reading(fd, self._shake_hands)
            return
        except ssl.SSLWantWriteError:
            self._loop.reading(fd, None)
            self._loop.writing(fd, self._shake_hands)
            return
        except OSError as error:
            self._next_address(f"TLS: {error}")
            return
        self._cancel_timer()
        self._loop.writing(fd, None)
        self._loop.reading(fd, self._readable)
        self._decoder = wire.Decoder()
        self._up = True
        self._complained = ""
        self._on_up(str(client.getsockname()[0]))

    # Frames.

    def _readable(self) -> None:
        client = self._tls
        assert client is not None
        try:
            received = client.recv(_READ_BYTES)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._lost(str(error))
            return
        if not received:
            self._lost("the hub closed the connection")
            return
        try:
            for frame in self._decoder.feed(received):
                self._on_frame(frame)
                if self._tls is not client:
                    return
        except wire.ProtocolError as error:
            self._lost(str(error))
            return
        # A first frame proves that the hub took us: with TLS 1.3 a refusal arrives only after the handshake.
        self._delay_s = FIRST_DELAY_S
        if client.pending():
            self._loop.soon(lambda: self._readable() if self._tls is client else None)

    def _flush(self) -> None:
        client = self._tls
        if client is None:
            return
        try:
            while self._piece or self._out:
                if not self._piece:
                    self._piece = bytes(self._out[:_WRITE_BYTES])
                    del self._out[:_WRITE_BYTES]
                sent = client.send(self._piece)
                self._piece = self._piece[sent:]
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            self._loop.writing(client.fileno(), self._flush)
            return
        except OSError as error:
            problem = str(error)
            self._loop.writing(client.fileno(), None)
            # Not at once: the caller is in the middle of something that may send more.
            self._loop.soon(lambda: self._lost(problem) if self._tls is client else None)
            return
        self._loop.writing(client.fileno(), None)

    # Loss.

    def _lost(self, problem: str) -> None:
        was_up = self._up
        self._drop()
        if problem != self._complained:
            print(f"link to the hub: {problem}; trying again", file=sys.stderr, flush=True)
            self._complained = problem
        if was_up:
            self._on_down()
        # Spreads the runners out; `random` itself would cost a millisecond or two to import.
        jitter = 0.7 + os.urandom(1)[0] / 255 * 0.6
        self._arm(self._delay_s * jitter, self.start)
        self._delay_s = min(MAX_DELAY_S, self._delay_s * 2)

    def _drop(self) -> None:
        self._up = False
        self._out, self._piece = bytearray(), b""
        for held in (self._socket, self._tls):
            if held is not None:
                self._loop.forget(held.fileno())
                held.close()
        self._socket = self._tls = None

    def _arm(self, delay_s: float, callback: Callable[[], None]) -> None:
        self._cancel_timer()
        self._timer = self._loop.later(delay_s, callback)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _secured(plain: socket.socket, name: str, access: Access) -> ssl.SSLSocket:
    """TLS on a connected socket, before the handshake. Raises OSError, also for files that cannot be used."""
    # Made for clients: asks for a certificate, and for one with the name.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(access.hub_ca)
    context.load_cert_chain(*access.chain)
    return context.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)


def _watch_for_death(plain: socket.socket) -> None:
    """A hub host that vanished without closing the connection is noticed within half a minute."""
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _TCP_USER_TIMEOUT_MS)
