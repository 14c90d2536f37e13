"""The UDP socket over which the netds (and the gateway) of one cluster speak: docs/network.md has the datagrams.

Every datagram carries a tag that only holders of the cluster's key can make; whatever does not is dropped silently.
Nothing here waits: answers come to callbacks.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import Any, Callable, Dict, Iterable, NamedTuple, Optional, Protocol, Tuple

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_datagrams import HEAD, TAG_BYTES
from slurmlet.podnet.tables import TCP, Peer, Tables

PACKET, ANNOUNCE, ASK, ANSWER, WHOIS = 1, 2, 3, 4, 5
_ANNOUNCE = struct.Struct(">IHIHH")
_ASK = struct.Struct(">IIHI")
_ANSWER = struct.Struct(">IH")
_WHOIS = struct.Struct(">HH")
_MAX_SKEW_MS = 300_000
_MAX_DATAGRAM_BYTES = 65535
# An answer that is no host port anybody here could have.
DENIED = 1
_ASK_AGAIN_S, _ASK_TIMES = 0.1, 8
# Announcements whose connection nobody has accepted yet: listeners have backlogs of thousands.
_MAX_EXPECTED = 65536
# One that nobody claimed is forgotten: later, the source port may be a stranger's. A connection that really waited so long
# in a backlog is asked for (whois).
_EXPECTED_S = 10.0
# A connection that was asked for may be announced twice, a moment apart: late, and in answer.
_TWICE_S = 0.5
_NOTHING: Tuple[None, float] = (None, 0.0)
_MAX_AT_ONCE = 64

# Which connection: the host and port it comes from, and the pod's port it goes to. A kernel gives one source port to several
# connections at once, as long as they go to different places.
Key = Tuple[int, int, int]
OnAnswer = Callable[[Optional[int]], None]
OnPacket = Callable[[bytes, int, int], None]


class Links(Protocol):
    """slow/links.py"""

    @property
    def port(self) -> int:
        """Where other netds of the cluster connect theirs to."""
        ...

    def send(self, peer: Peer, packet: bytes) -> None: ...


class Announcement(NamedTuple):
    """Who a TCP connection between hosts really is: both ends as pods name them."""

    source_ip: int
    source_port: int
    ip: int
    port: int


class Inner(Announcement):
    """A connection of the pod to itself, known without a datagram: only these may come from 127.0.0.1."""

    __slots__ = ()


class InnerSix(Inner):
    """The same, to ::1."""

    __slots__ = ()


class Overlay:
    def __init__(self, loop: Loop, setup: Setup, tables: Tables, sock: socket.socket) -> None:
        self._loop, self._setup, self._tables, self._socket = loop, setup, tables, sock
        self._hash = hashlib.blake2b(digest_size=TAG_BYTES, key=setup.key)
        # With the time it came; the oldest first.
        self._expected: Dict[Key, Tuple[Announcement, float]] = {}
        self._asked: Dict[int, Tuple[OnAnswer, Timer]] = {}
        self._next_number = int.from_bytes(os.urandom(4), "big")
        # Set by the parts that want them.
        # By the address they are for: get an IPv4 packet, and the host and port of the overlay socket that sent it.
        self.receivers: Dict[int, OnPacket] = {}
        self.on_announced: Callable[[Key, Announcement], None] = lambda _key, _what: None
        # Host port behind a listener of ours on (ip, port), or None.
        self.on_ask: Callable[[int, int], Optional[int]] = lambda _ip, _port: None
        # In its place, for whoever cannot know at once: (ip, port, answer).
        self.on_ask_later: Optional[Callable[[int, int, Callable[[int], None]], None]] = None
        # A connection of our own to be announced again: (source port, host it leads to, port of that host). Nothing but what
        # has this very connection now: the same source port may be a stranger's by then.
        self.on_whois: Callable[[int, int, int], Iterable[Announcement]] = lambda *_connection: ()
        # In an encrypted cluster: carries packets in our place. Those that come in the clear are dropped then.
        self.links: Optional[Links] = None
        self.dropped = self.in_clear = 0
        # Each datagram is read into the same place: a new one of 64 KiB for each would cost more than the rest.
        self._room = bytearray(_MAX_DATAGRAM_BYTES)
        self._view = memoryview(self._room)
        # Reads in our place, and keeps announcements itself.
        self._native: Any = None
        loop.reading(sock.fileno(), self.drain)

    @property
    def room(self) -> bytearray:
        return self._room

    def fileno(self) -> int:
        return self._socket.fileno()

    def lend(self, native: Any) -> None:
        self._native = native
        self._loop.forget(self._socket.fileno())

    @property
    def port(self) -> int:
        return int(self._socket.getsockname()[1])

    # Out.

    def announce(self, peer: Peer, host_source_port: int, what: Announcement) -> None:
        self._send(peer, ANNOUNCE, _ANNOUNCE.pack(*what, host_source_port))

    def send_packet(self, peer: Peer, packet: bytes) -> None:
        if self.links is None:
            self._send(peer, PACKET, packet)
        else:
            self.links.send(peer, packet)

    def ask(
        self, peer: Peer, ip: int, port: int, on_answer: OnAnswer, source_ip: Optional[int] = None
    ) -> None:
        """on_answer gets the host port, 0 when nobody listens, DENIED by policy, None when nobody answered."""
        self._next_number = (self._next_number + 1) & 0xFFFFFFFF
        source = self._setup.ip if source_ip is None else source_ip
        self._try_ask(peer, _ASK.pack(self._next_number, ip, port, source), on_answer, _ASK_TIMES)

    def _try_ask(self, peer: Peer, body: bytes, on_answer: OnAnswer, left: int) -> None:
        number = _ASK.unpack(body)[0]
        if left == 0:
            del self._asked[number]
            on_answer(None)
            return
        self._send(peer, ASK, body)
        timer = self._loop.later(_ASK_AGAIN_S, lambda: self._try_ask(peer, body, on_answer, left - 1))
        self._asked[number] = (on_answer, timer)

    def whois(self, host_ip: int, source_port: int, host_port: int) -> None:
        """Ask every netd of a host whose connection this is; whoever made it announces it again."""
        for peer in self._tables.peers_on(host_ip):
            self._send(peer, WHOIS, _WHOIS.pack(source_port, host_port))

    def _send(self, peer: Peer, kind: int, body: bytes) -> None:
        head = HEAD.pack(kind, time.time_ns() // 1_000_000)
        tag = self._hash.copy()
        tag.update(head)
        tag.update(body)
        to = (addresses.text(peer.host_ip), peer.overlay_port)
        try:
            self._socket.sendmsg((head, body, tag.digest()), (), 0, to)
        except OSError:
            # As on any network: what does not go out is lost, and whoever cares sends again.
            self.dropped += 1

    # In.

    def claim(self, host_ip: int, host_source_port: int, port: int) -> Optional[Announcement]:
        """The announcement of a connection that came from this host and port to the pod's `port`, once."""
        key = (host_ip, host_source_port, port)
        if self._native is not None:
            found: Optional[Announcement] = self._native.claim(*key)
            if found is None:
                self.drain()
                found = self._native.claim(*key)
            return found
        if key not in self._expected:
            self.drain()
        what, came_s = self._expected.pop(key, _NOTHING)
        return what if time.monotonic() - came_s < _EXPECTED_S else None

    def used(self, key: Key) -> None:
        """Whoever waited for this announcement has it: it must be there for nobody else, nor its repetition."""

        def forget() -> None:
            self.claim(*key)

        forget()
        self._loop.later(_TWICE_S, forget)

    def expect(self, host_ip: int, host_source_port: int, what: Announcement) -> None:
        """A connection from ourselves: no datagram is needed to know it."""
        if self._native is not None:
            self._native.expect(host_ip, host_source_port, what)
            return
        now_s = time.monotonic()
        while self._expected:
            oldest = next(iter(self._expected))
            if len(self._expected) < _MAX_EXPECTED and now_s - self._expected[oldest][1] < _EXPECTED_S:
                break
            del self._expected[oldest]
        key = (host_ip, host_source_port, what.port)
        self._expected.pop(key, None)
        self._expected[key] = (what, now_s)

    def drain(self) -> None:
        if self._native is not None:
            for size, host_ip, port in self._native.datagrams():
                self.received(size, host_ip, port)
            return
        for _ in range(_MAX_AT_ONCE):
            try:
                size, (host, port) = self._socket.recvfrom_into(self._room)
            except OSError:
                return
            self._received(self._view[:size], addresses.number(host), port)

    def received(self, size_bytes: int, host_ip: int, port: int) -> None:
        """A datagram that was put into our room."""
        self._received(self._view[:size_bytes], host_ip, port)

    def _received(self, datagram: memoryview, host_ip: int, port: int) -> None:
        if len(datagram) < HEAD.size + TAG_BYTES:
            self.dropped += 1
            return
        tag = self._hash.copy()
        tag.update(datagram[:-TAG_BYTES])
        kind, sent_ms = HEAD.unpack_from(datagram)
        fresh = abs(time.time_ns() // 1_000_000 - sent_ms) <= _MAX_SKEW_MS
        if not fresh or not hmac.compare_digest(tag.digest(), datagram[-TAG_BYTES:]):
            self.dropped += 1
            return
        body = bytes(datagram[HEAD.size : -TAG_BYTES])
        if kind == PACKET:
            if self.links is None:
                self.deliver(body, host_ip, port)
            else:
                self.in_clear += 1
        elif kind == ANNOUNCE:
            *what, source_port = _ANNOUNCE.unpack(body)
            announcement = Announcement(*what)
            self.expect(host_ip, source_port, announcement)
            self.on_announced((host_ip, source_port, announcement.port), announcement)
        elif kind == ASK:
            self._asked_for(Peer(host_ip, port, {}), *_ASK.unpack(body))
        elif kind == ANSWER:
            self._answered(*_ANSWER.unpack(body))
        elif kind == WHOIS:
            source_port, host_port = _WHOIS.unpack(body)
            for mine in self.on_whois(source_port, host_ip, host_port):
                self.announce(Peer(host_ip, port, {}), source_port, mine)

    def _asked_for(self, peer: Peer, number: int, ip: int, port: int, source_ip: int) -> None:
        def answer(host_port: int) -> None:
            self._send(peer, ANSWER, _ANSWER.pack(number, host_port))

        if port == 0:
            # Nobody's port: where links are made. Policy asks about each packet that comes through.
            answer(self.links.port if self.links is not None else 0)
        elif not self._tables.admits(TCP, source_ip, port):
            answer(DENIED)
        elif self.on_ask_later is not None:
            self.on_ask_later(ip, port, answer)
        else:
            answer(self.on_ask(ip, port) or 0)

    def deliver(self, packet: bytes, host_ip: int, port: int) -> None:
        """A packet that came from the overlay socket at this host and port."""
        receiver = self.receivers.get(int.from_bytes(packet[16:20], "big"))
        if receiver is None:
            self.dropped += 1
        else:
            receiver(packet, host_ip, port)

    def _answered(self, number: int, host_port: int) -> None:
        waiting = self._asked.pop(number, None)
        if waiting is not None:
            waiting[1].cancel()
            waiting[0](host_port)
