"""Python's side of netfast.c: tells it what it may know, hears what it did, and does what it left.

What the library did comes as records and is put into the table and the journal before Python handles anything itself:
so both never hold different opinions of a socket, and either can go on where the other has stopped.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import struct
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Tuple

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet.fast.accept_call import Accepting
from slurmlet.podnet.fast.connect_call import Connecting
from slurmlet.podnet.fast.native.native_records import RECORD_BYTES, Unread
from slurmlet.podnet.fast.native.netd_priority import Yielding
from slurmlet.podnet.fast.pod_listeners import OUTSIDE, Claim, Ports
from slurmlet.podnet.fast.seccomp_notify import (
    NOTIFICATION_BYTES,
    Call,
    Listener,
    decode,
    share_a_processor,
)
from slurmlet.podnet.fast.socket_names import Socket, Table
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import Announcement, Inner, InnerSix, Overlay
from slurmlet.podnet.tables import TCP, Peer, Tables, Target

_NOTHING, _CALL, _DATAGRAM, _ACCEPTED, _REFUSED, _GONE = range(6)
# As in netfast.c, which says what each is.
_event = struct.Struct("=80sQ4i2I2i2I4H")
_state = struct.Struct("=9QIIiI")
_CALLS = ("socket", "connect", "accept", "getsockname", "getpeername")
_COUNTED = (
    *_CALLS,
    *("connects pod", "connects host", "connects failed", "accepted"),
)
_KINDS = (Announcement, Inner, InnerSix)
_MAX_RECORDS = 512
_NO_COUNTS = (0,) * len(_COUNTED)
_CHECK_S, _HOLD_S = 0.5, 0.005
_MAX_AT_ONCE = 64
_NO_SERVICE = 0xFFFFFFFF


class _Event(NamedTuple):
    raw: bytes
    cookie: int
    kind: int
    notify_fd: int
    fd: int
    made: int
    ip: int
    port: int
    size: int
    turn: int
    shown_ip: int
    real_ip: int
    shown_port: int
    real_port: int
    source_port: int
    family: int


class Parts(NamedTuple):
    """What of netd the library works for."""

    loop: Loop
    setup: Setup
    tables: Tables
    overlay: Overlay
    table: Table
    ports: Ports
    connecting: Connecting
    accepting: Accepting
    counts: Dict[str, int]
    # The journal's memory of calls.
    slots: mmap.mmap
    serve: Callable[[Call], None]
    on_named: Callable[[Socket], None]
    # Gets records, for the journal.
    on_done: Callable[[bytes], None]


class FastPath:
    def __init__(self, library: Any, parts: Parts) -> None:
        self._library, self._parts = library, parts
        setup, overlay = parts.setup, parts.overlay
        self._slots = (ctypes.c_char * len(parts.slots)).from_buffer(parts.slots)
        self._room = (ctypes.c_char * len(overlay.room)).from_buffer(overlay.room)
        made = library.netfast_new(
            *(setup.ip, setup.host_ip, setup.key, len(setup.key), overlay.fileno()),
            *(ctypes.addressof(self._slots), len(parts.slots) // NOTIFICATION_BYTES),
            *(ctypes.addressof(self._room), len(overlay.room)),
        )
        if not made:
            raise OSError(errno.ENOMEM, "netfast")
        self._at = ctypes.c_void_p(made)
        library.netfast_ranges(self._at, *setup.pod_range, *setup.service_range)
        at = library.netfast_state(self._at)
        size = _state.size + _MAX_RECORDS * RECORD_BYTES
        self._state = memoryview((ctypes.c_char * size).from_address(at)).cast("B")
        self._records = self._state[_state.size :]
        self._event = bytearray(_event.size)
        self._event_at = ctypes.addressof((ctypes.c_char * _event.size).from_buffer(self._event))
        self._claimed = (ctypes.c_uint32 * 4)()
        self._watched: Dict[int, Tuple[Listener, Callable[[], None]]] = {}
        self._checking: Optional[Timer] = None
        self._yielding = Yielding(parts.loop, share_a_processor())
        self._closed = False
        self._run, self._forget = library.netfast_run, library.netfast_forget
        unread = Unread(parts.connecting.remember)
        parts.table.read_from(unread)
        parts.connecting.announced_elsewhere = unread.announcement_of
        self._attach()

    def _attach(self) -> None:
        loop, overlay, accepting = self._parts.loop, self._parts.overlay, self._parts.accepting
        overlay.lend(self)
        self._parts.tables.follow(self)
        ports = self._parts.ports
        ports.on_opened, ports.on_gone, ports.before_check = (
            self._opened,
            self._closed_listener,
            self._before_check,
        )
        accepting.on_busy = lambda cookie, busy: self._library.netfast_busy(self._at, cookie, busy)
        accepting.on_holding = lambda holding: self._library.netfast_holding(self._at, holding)
        if loop.sleeper is None:
            # Asleep in the library: calls are answered there, and Python wakes up only for what is its own.
            loop.sleeper = self._sleep
            self._library.netfast_outer(self._at, loop.fileno())
        else:
            loop.reading(self._library.netfast_fd(self._at), self._readable)

    def close(self) -> None:
        self._closed = True
        loop = self._parts.loop
        if loop.sleeper == self._sleep:
            loop.sleeper = None
        loop.forget(self._library.netfast_fd(self._at))
        if self._checking is not None:
            self._checking.cancel()
        self._drain()
        self._yielding.close()
        self._parts.tables.follow(None)
        self._records.release()
        self._state.release()
        self._library.netfast_free(self._at)
        # Else the journal's memory could not be given back.
        del self._slots

    # What the library hears.

    def watch(self, listener: Listener, on_gone: Callable[[], None]) -> bool:
        """Whether the library serves this one."""
        if self._library.netfast_watch(self._at, listener.fd):
            return False
        self._watched[listener.fd] = (listener, on_gone)
        return True

    def forget(self, cookie: int) -> None:
        """A socket that Python was asked about is Python's from now on."""
        self._forget(self._at, cookie)

    def _opened(self, claim: Claim) -> None:
        if claim.place == OUTSIDE:
            self._library.netfast_listener(self._at, claim.cookie, claim.family, claim.port)

    def _closed_listener(self, claim: Claim) -> None:
        self._library.netfast_listener(self._at, claim.cookie, 0, 0)
        self._parts.accepting.gone(claim)

    def _before_check(self) -> None:
        self.check()
        self._parts.accepting.check()

    def pod(self, ip: int, before: Optional[Peer], now: Optional[Peer]) -> None:
        tell, at = self._library.netfast_peer, self._at
        for port in before.listeners if before is not None else ():
            tell(at, ip, port, 0, 0, 0)
        if now is not None:
            for port, host_port in now.listeners.items():
                tell(at, ip, port, now.host_ip, now.overlay_port, host_port)

    def service(self, key: int, target: Optional[Target]) -> None:
        if key >> 48 != TCP:
            return
        place = (self._at, key >> 16 & 0xFFFFFFFF, key & 0xFFFF)
        if target is None:
            self._library.netfast_service(*place, 0, _NO_SERVICE, None)
            return
        # Whose clients stay with a backend is Python's to remember; the library is told of it without backends, so
        # that it does not take an external address for a host's.
        to = target.to if not target.affinity_s else []
        flat = (ctypes.c_uint32 * (2 * len(to)))(*(number for backend in to for number in backend))
        self._library.netfast_service(*place, target.next, len(to), flat)

    def policy(self, ingress: bool, egress: bool) -> None:
        self._library.netfast_policy(self._at, ingress, egress)

    # Announcements and datagrams.

    def claim(self, host_ip: int, source_port: int, port: int) -> Optional[Announcement]:
        kind = self._library.netfast_claim(self._at, host_ip, source_port, port, self._claimed)
        return _KINDS[kind - 1](*self._claimed) if kind else None

    def expect(self, host_ip: int, port: int, what: Announcement) -> None:
        self._library.netfast_expect(self._at, host_ip, port, *what, _KINDS.index(type(what)))

    def datagrams(self) -> Iterator[Tuple[int, int, int]]:
        """Those that are no announcements: how many bytes of the overlay's room, and the sender's host and port."""
        for _ in range(_MAX_AT_ONCE):
            size = self._library.netfast_receive(self._at)
            if not size:
                return
            sender = self._library.netfast_sender(self._at)
            yield size, sender >> 16, sender & 0xFFFF

    # What the library says.

    def _sleep(self, wait_s: Optional[float]) -> None:
        self._serve(-1 if wait_s is None else min(int(wait_s * 1000) + 1, 1 << 30) if wait_s else 0)

    def _readable(self) -> None:
        self._serve(0)

    def _serve(self, timeout_ms: int) -> None:
        for _ in range(_MAX_AT_ONCE):
            kind = self._run(self._at, self._event_at, timeout_ms)
            self._drain()
            if kind == _NOTHING:
                return
            self._handle(_Event(*_event.unpack(self._event)))
            timeout_ms = 0

    def _handle(self, event: _Event) -> None:
        if event.kind == _DATAGRAM:
            self._parts.overlay.received(event.size, event.ip, event.port)
            # Packets come in swarms: the rest without asking what else there is.
            self._parts.overlay.drain()
            return
        if event.kind == _GONE:
            self._watched.pop(event.notify_fd)[1]()
            return
        call = decode(self._watched[event.notify_fd][0], event.raw)
        if event.kind == _CALL:
            if event.turn >= 0:
                self._parts.tables.turn(event.ip, event.port, event.turn)
            self._parts.serve(call)
        elif event.kind == _ACCEPTED:
            self._parts.accepting.adopt(call, event.fd, self._socket(event.cookie, event.family), event.made)
        else:
            shown, real = (event.shown_ip, event.shown_port), (event.real_ip, event.real_port)
            self._parts.connecting.refused(
                call, event.fd, self._socket(event.cookie, event.family), shown, real
            )

    def _socket(self, cookie: int, family: int) -> Socket:
        sock = self._parts.table.get(cookie)
        if sock is None:
            sock = Socket(cookie, family)
            self._parts.table.add(sock)
        return sock

    def _drain(self) -> None:
        state = self._state
        *counted, recorded, waiting, dirty, held = _state.unpack_from(state)
        if not dirty:
            return
        records = bytes(self._records[: recorded * RECORD_BYTES]) if recorded else b""
        _state.pack_into(state, 0, *_NO_COUNTS, 0, waiting, 0, held)
        counts = self._parts.counts
        for name, value in zip(_COUNTED, counted):
            counts[name] += value
        self._yielding.heard(sum(counted[: len(_CALLS)]))
        if records:
            for sock in self._parts.table.take(records):
                self._parts.on_named(sock)
            self._parts.on_done(records)
        if waiting and self._checking is None:
            self._checking = self._parts.loop.later(_CHECK_S, self._check)
        if held and self._parts.loop.sleeper != self._sleep:
            self._parts.loop.later(_HOLD_S, self._held_again)

    def _held_again(self) -> None:
        """Connections that are held have a time limit; asleep in the library, it knows itself."""
        if not self._closed:
            self._serve(0)
            if _state.unpack_from(self._state)[-1]:
                self._parts.loop.later(_HOLD_S, self._held_again)

    # Calls that wait in the library.

    def check(self) -> None:
        self._library.netfast_check(self._at)

    def _check(self) -> None:
        self._checking = None
        self.check()
        if _state.unpack_from(self._state)[10]:
            self._checking = self._parts.loop.later(_CHECK_S, self._check)
