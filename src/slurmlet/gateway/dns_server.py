"""DNS at the gateway's address, UDP and TCP port 53: what pods ask goes to CoreDNS (naming.py), what it says goes back."""

from __future__ import annotations

import socket
from collections.abc import Callable

from slurmlet.gateway import dns_messages
from slurmlet.gateway.dns_client import Resolver
from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet.overlay_socket import Announcement
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint

PORT = 53
_IDLE_S = 120.0
_MAX_SESSIONS = 1024
# Questions of one connection that are not answered yet; more are read when they are.
_MAX_WAITING = 128
_READ_BYTES = 64 << 10


class DnsServer:
    def __init__(self, loop: Loop, resolver: Resolver, endpoint: UdpEndpoint) -> None:
        self._loop, self._resolver, self._endpoint = loop, resolver, endpoint
        self._sessions: set[_Session] = set()

    def datagram(self, ip: int, ip_port: int, question: bytes) -> None:
        def answered(answer: bytes | None) -> None:
            if answer is None:
                answer = dns_messages.failure(question, dns_messages.SERVFAIL)
            self._endpoint.send(PORT, ip, ip_port, dns_messages.for_udp(answer, limit_bytes))

        if not dns_messages.is_query(question):
            return
        try:
            limit_bytes = dns_messages.udp_limit(question)
            self._resolver.ask(question, answered)
        except dns_messages.Malformed:
            # As on any network: noise gets no answer.
            return

    def connection(self, client: socket.socket, _who: Announcement) -> None:
        if len(self._sessions) >= _MAX_SESSIONS:
            client.close()
            return
        session = _Session(self._loop, self._resolver, client, self._sessions.discard)
        self._sessions.add(session)


class _Session:
    """One TCP connection: questions with their length before them; answers in the order in which they come."""

    def __init__(
        self, loop: Loop, resolver: Resolver, client: socket.socket, ended: Callable[[_Session], None]
    ) -> None:
        self._loop, self._resolver, self._client, self._ended = loop, resolver, client, ended
        self._in, self._out = bytearray(), bytearray()
        self._waiting = 0
        self._closing = False
        self._timer: Timer | None = None
        self._rest()
        loop.reading(client.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            received = self._client.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            self._close()
            return
        if not received:
            # Half-closed: what was asked is still answered.
            self._closing = True
            self._loop.reading(self._client.fileno(), None)
            self._take()
            return
        self._rest()
        self._in += received
        self._take()

    def _take(self) -> None:
        if self._client.fileno() < 0:
            return
        while self._waiting < _MAX_WAITING and len(self._in) >= 2:
            size = int.from_bytes(self._in[:2], "big")
            if len(self._in) < 2 + size:
                break
            question = bytes(self._in[2 : 2 + size])
            del self._in[: 2 + size]
            if not self._ask(question):
                self._close()
                return
        if not self._closing:
            full = self._waiting >= _MAX_WAITING
            self._loop.reading(self._client.fileno(), None if full else self._readable)
        self._close_if_done()

    def _ask(self, question: bytes) -> bool:
        def answered(answer: bytes | None) -> None:
            self._waiting -= 1
            if self._client.fileno() >= 0:
                self._send(answer or dns_messages.failure(question, dns_messages.SERVFAIL))
                self._take()

        self._waiting += 1
        try:
            if dns_messages.is_query(question):
                self._resolver.ask(question, answered)
                return True
        except dns_messages.Malformed:
            pass
        self._waiting -= 1
        return False

    def _send(self, answer: bytes) -> None:
        self._out += len(answer).to_bytes(2, "big") + answer
        self._flush()

    def _flush(self) -> None:
        try:
            sent = self._client.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._close()
            return
        del self._out[:sent]
        self._loop.writing(self._client.fileno(), self._flush if self._out else None)
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self._closing and not self._waiting and not self._out:
            self._close()

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.later(_IDLE_S, self._close)

    def _close(self) -> None:
        if self._client.fileno() < 0:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._loop.forget(self._client.fileno())
        self._client.close()
        self._ended(self)
