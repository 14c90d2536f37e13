"""connect(): to a pod's listener behind its host port, to a Service's backend, to the outside, or to the pod itself.

The program's socket never waits in here: the kernel's connect() is started without blocking, and a program that would
have waited is answered when the kernel says how it went. What a policy denies looks as it does in other clusters,
where packets are dropped: the connection hangs until the program's patience or the kernel's (about two minutes) ends.
A quick refusal would be kinder, but programs (and the conformance tests) tell "denied" from "nobody listens" by it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from typing import Callable, Dict, List, Optional, Tuple, Type

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses, connection_policy
from slurmlet.podnet.fast import live_sockets
from slurmlet.podnet.fast.host_sockets import BlackHole, HostSockets
from slurmlet.podnet.fast.pod_listeners import Ports
from slurmlet.podnet.fast.seccomp_notify import Call, Processes
from slurmlet.podnet.fast.socket_names import CONNECTED, CONNECTING, FRESH, Socket
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import DENIED as DENIED_BY_PEER
from slurmlet.podnet.overlay_socket import Announcement, Inner, InnerSix, Overlay
from slurmlet.podnet.tables import DENIED, HOST, POD, REFUSED, TCP, Peer, Tables

_MAX_ADDRESS_BYTES = 128
_CHECK_S = 0.5
# A netd that was killed is back within two seconds; each time is 0.8 s.
_ASK_TIMES = 3
# Our latest connections, for netds that missed an announcement.
_MAX_RECENT = 2048
_family = struct.Struct("=H").unpack_from

Name = Tuple[int, int]
# A connected socket and 0, or None and an errno.
OnDialled = Callable[[Optional[socket.socket], int], None]


class _Attempt:
    """One connect() under way: whose socket, which names, and who is to be told."""

    __slots__ = ("asked", "call", "done", "fd", "kind", "peer", "real", "shown", "sock", "source_ip", "waits")

    def __init__(self, fd: int, sock: Socket, call: Optional[Call], shown: Name, source_ip: int) -> None:
        self.fd, self.sock, self.call, self.source_ip = fd, sock, call, source_ip
        self.done: Optional[OnDialled] = None
        # What the program dialled, and the pod and port behind it.
        self.shown = self.real = shown
        # Where that pod is; None: nobody has to be told.
        self.peer: Optional[Peer] = None
        # For a connection of the pod to itself.
        self.kind: Optional[Type[Inner]] = None
        self.asked = 0
        # Registered with the loop.
        self.waits = False


class Connecting:
    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        kernel: HostSockets,
        processes: Processes,
        ports: Ports,
        tables: Tables,
        overlay: Overlay,
        counts: Dict[str, int],
    ) -> None:
        self._loop, self._setup, self._kernel, self._processes = loop, setup, kernel, processes
        self._ports, self._tables, self._overlay, self._counts = ports, tables, overlay, counts
        self._waiting: Dict[int, _Attempt] = {}
        self._checking: Optional[Timer] = None
        # By the cookie of the socket.
        self._recent: Dict[int, Announcement] = {}
        # Hosts that are reached from another address of this one.
        self._elsewhere: Dict[int, bool] = {}
        self._black_hole: Optional[BlackHole] = None
        self.on_named: Callable[[Socket], None] = lambda _sock: None
        self.on_waiting: Callable[[Call], None] = lambda _call: None
        # Connections that the library made and nobody has asked for since.
        self.announced_elsewhere: Callable[[int], Optional[Announcement]] = lambda _cookie: None
        overlay.on_whois = self._whois

    # The call. Every way ends with one answer, and with `fd`, our copy of the socket, closed.

    def connect(self, call: Call, fd: int, sock: Socket) -> None:
        raw = self._processes.read(call.pid, call.a1, call.a2) if 2 <= call.a2 <= _MAX_ADDRESS_BYTES else b""
        if not raw:
            self._answer(call, fd, errno.EFAULT if raw is None else errno.EINVAL)
            return
        family = _family(raw)[0]
        if family == socket.AF_UNSPEC:
            self._answer(call, fd, self._dissolve(fd, sock, raw))
        elif sock.phase != FRESH or sock.cookie in self._waiting:
            self._again(call, fd, sock)
        elif family != sock.family:
            self._answer(call, fd, errno.EAFNOSUPPORT)
        else:
            address = addresses.decode(raw)
            if address is None:
                self._answer(call, fd, errno.EINVAL)
            elif address.ip is None:
                # IPv6 of the world; its names are the kernel's. No range of a policy can name it: they are IPv4 here.
                attempt = _Attempt(fd, sock, call, (0, 0), 0)
                if connection_policy.allows_unnamed(self._tables.egress, TCP, address.port):
                    self._start(attempt, raw)
                else:
                    self._deny(attempt)
            else:
                self._route(_Attempt(fd, sock, call, (address.ip, address.port), self._setup.ip), address)

    def _answer(self, call: Call, fd: int, error: int) -> bool:
        heard = call.answer(error)
        os.close(fd)
        return heard

    def _dissolve(self, fd: int, sock: Socket, raw: bytes) -> int:
        error = self._kernel.connect(fd, raw)
        if not error:
            sock.forget_names()
        return error

    def _again(self, call: Call, fd: int, sock: Socket) -> None:
        waiting = self._waiting.get(sock.cookie)
        if waiting is not None:
            # The same connect() after a signal; or another thread's, which then is the one that waits.
            before, waiting.call = waiting.call, call
            self.on_waiting(call)
            if before is not None:
                before.answer(errno.EALREADY)
            os.close(fd)
        elif sock.phase == CONNECTING:
            self._look(call, fd, sock)
        else:
            delivered, sock.undelivered = sock.undelivered, False
            self._answer(call, fd, 0 if delivered else errno.EISCONN)

    def _look(self, call: Call, fd: int, sock: Socket) -> None:
        """How a connect() of before goes; the kernel looks at no address in this state."""
        error, blocking = self._kernel.connect_at_once(fd, sock.target)
        if error == errno.EALREADY and blocking:
            self._wait(_Attempt(fd, sock, call, (sock.peer_ip, sock.peer_port), sock.ip))
            return
        if error == errno.EALREADY and sock.undelivered:
            error = errno.EINPROGRESS
        if error in (0, errno.EISCONN):
            sock.phase = CONNECTED
        elif error not in (errno.EALREADY, errno.EINPROGRESS):
            sock.forget_names()
        sock.undelivered = not self._answer(call, fd, error)

    # Where to.

    def _route(self, attempt: _Attempt, address: addresses.SockAddr) -> None:
        ip, port = attempt.shown
        if ip in (addresses.ANY, self._setup.ip) or addresses.is_loopback(ip):
            six = address.family == socket.AF_INET6 and address.raw[10:12] != b"\xff\xff"
            attempt.shown = attempt.real = (ip or addresses.LOOPBACK, port)
            self._inner(attempt, six)
            return
        route = self._tables.route(TCP, ip, port)
        attempt.real = (route.ip, route.port)
        if route.kind == POD:
            self._to_pod(attempt)
        elif route.kind == HOST:
            self._counts["connects host"] += 1
            self._start(attempt, addresses.encode(attempt.sock.family, route.ip, route.port))
        elif route.kind == DENIED:
            self._deny(attempt)
        else:
            self._end(attempt, errno.ECONNREFUSED if route.kind == REFUSED else errno.EHOSTUNREACH)

    def _deny(self, attempt: _Attempt) -> None:
        self._counts["connects denied"] += 1
        attempt.peer = None
        self._black_hole = self._black_hole or BlackHole()
        self._start(attempt, self._black_hole.address(attempt.sock.family))

    def _inner(self, attempt: _Attempt, six: bool) -> None:
        """To a listener of this pod."""
        ip, port = attempt.real
        claim = self._ports.find(ip, port, six)
        if claim is None:
            self._end(attempt, errno.ECONNREFUSED)
            return
        self._counts["connects inner"] += 1
        attempt.kind = InnerSix if six else Inner
        if addresses.is_loopback(ip) and attempt.done is None:
            attempt.source_ip = addresses.LOOPBACK
        self._start(attempt, self._ports.address(claim, attempt.sock.family, claim.host_port))

    def _to_pod(self, attempt: _Attempt) -> None:
        ip, port = attempt.real
        if ip == self._setup.ip:
            self._inner(attempt, False)
            return
        peer = attempt.peer = self._tables.peer(ip)
        if peer is None:
            self._end(attempt, errno.EHOSTUNREACH)
            return
        host_port = peer.listeners.get(port)
        if host_port:
            self._counts["connects pod"] += 1
            self._start(attempt, addresses.encode(attempt.sock.family, peer.host_ip, host_port))
        else:
            self._ask(attempt, peer)

    def _ask(self, attempt: _Attempt, peer: Peer) -> None:
        """The table knows no such listener, or an old one; the pod's own netd knows better."""
        self._counts["asked"] += 1
        attempt.asked += 1
        self._waiting[attempt.sock.cookie] = attempt
        if attempt.call is not None:
            self.on_waiting(attempt.call)
        self._check_later()
        self._overlay.ask(
            peer, *attempt.real, lambda host_port: self._told(attempt, peer, host_port), attempt.source_ip
        )

    def _told(self, attempt: _Attempt, peer: Peer, host_port: Optional[int]) -> None:
        if self._waiting.get(attempt.sock.cookie) is not attempt:
            return
        del self._waiting[attempt.sock.cookie]
        if host_port is None and attempt.asked < _ASK_TIMES:
            self._ask(attempt, peer)
        elif host_port == DENIED_BY_PEER:
            self._deny(attempt)
        elif host_port:
            self._counts["connects pod"] += 1
            self._start(attempt, addresses.encode(attempt.sock.family, peer.host_ip, host_port))
        else:
            self._end(attempt, errno.EHOSTUNREACH if host_port is None else errno.ECONNREFUSED)

    # The kernel's connect().

    def _start(self, attempt: _Attempt, target: bytes) -> None:
        fd, sock = attempt.fd, attempt.sock
        if attempt.peer is not None and self._leaves_elsewhere(attempt.peer.host_ip):
            self._kernel.bind_address(fd, addresses.encode(sock.family, self._setup.host_ip, 0))
        error, blocking = self._kernel.connect_at_once(fd, target)
        if error not in (0, errno.EINPROGRESS):
            self._end(attempt, error)
            return
        self._name(attempt)
        sock.phase, sock.target = CONNECTING, target
        if attempt.call is not None and not blocking:
            sock.undelivered = not self._answer(attempt.call, fd, error)
        elif self._kernel.ready(fd, select.POLLOUT):
            self._finish(attempt)
        else:
            self._wait(attempt)
        self.on_named(sock)

    def _leaves_elsewhere(self, host_ip: int) -> bool:
        """Whether the kernel would choose another source address than the one other netds know this host by."""
        known = self._elsewhere.get(host_ip)
        if known is None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                error = self._kernel.connect(probe.fileno(), addresses.encode(socket.AF_INET, host_ip, 9))
                ip = self._kernel.name(probe.fileno())[0]
            known = self._elsewhere[host_ip] = not error and ip != self._setup.host_ip
        return known

    def _name(self, attempt: _Attempt) -> None:
        """Learn the source port and say whose it is, before the handshake is over if we can."""
        sock = attempt.sock
        host_ip, source_port = self._kernel.name(attempt.fd)
        port = source_port if sock.claim is None else sock.claim.port
        ip, peer = attempt.source_ip, attempt.peer
        what = None if peer is None else Announcement(ip, port, *attempt.real)
        self.remember(sock.cookie, what)
        if peer is not None and what is not None:
            self._overlay.announce(peer, source_port, what)
        elif attempt.kind is not None:
            self._overlay.expect(host_ip, source_port, attempt.kind(ip, port, *attempt.real))
        if attempt.shown[1]:
            sock.named(ip, port, *attempt.shown, attempt.kind is InnerSix)

    def remember(self, cookie: int, what: Optional[Announcement]) -> None:
        """What was told of the connection that this socket has now; None: nothing."""
        self._recent.pop(cookie, None)
        if what is not None:
            self._recent[cookie] = what
        if len(self._recent) > _MAX_RECENT:
            del self._recent[next(iter(self._recent))]

    def _whois(self, port: int, host_ip: int, host_port: int) -> List[Announcement]:
        """Only the kernel knows whose the connection from this port is now: a program of ours may have closed it."""
        cookie = live_sockets.connection(self._setup.host_ip, port, host_ip, host_port)
        what = self._recent.get(cookie) or self.announced_elsewhere(cookie)
        return [] if what is None else [what]

    def refused(self, call: Call, fd: int, sock: Socket, shown: Name, real: Name) -> None:
        """A connect() that was begun for us met a port that is closed: the table may be old."""
        attempt = _Attempt(fd, sock, call, shown, self._setup.ip)
        attempt.real = real
        peer = attempt.peer = self._tables.peer(real[0])
        sock.forget_names()
        if peer is None:
            self._end(attempt, errno.ECONNREFUSED)
        else:
            self._ask(attempt, peer)

    def _wait(self, attempt: _Attempt) -> None:
        attempt.waits = True
        self._waiting[attempt.sock.cookie] = attempt
        self._loop.writing(attempt.fd, lambda: self._finish(attempt))
        if attempt.call is not None:
            self.on_waiting(attempt.call)
            patience_s = self._kernel.patience_s(attempt.fd, socket.SO_SNDTIMEO)
            if patience_s is not None:
                self._loop.later(patience_s, lambda: self._give_up(attempt))
            self._check_later()

    def _finish(self, attempt: _Attempt) -> None:
        # Asking for SO_ERROR would leave the socket half-way: a second connect() is how the kernel ends the first.
        error = self._kernel.connect(attempt.fd, attempt.sock.target)
        if error == errno.EALREADY:
            return
        self._rest(attempt)
        peer = attempt.peer
        if error == errno.ECONNREFUSED and peer is not None and not attempt.asked:
            attempt.sock.forget_names()
            self._ask(attempt, peer)
        else:
            self._end(attempt, 0 if error == errno.EISCONN else error)

    def _rest(self, attempt: _Attempt) -> None:
        if attempt.waits:
            attempt.waits = False
            self._loop.forget(attempt.fd)
        self._waiting.pop(attempt.sock.cookie, None)

    def _end(self, attempt: _Attempt, error: int) -> None:
        sock = attempt.sock
        if error:
            sock.forget_names()
            self._counts["connects failed"] += 1
        else:
            sock.phase = CONNECTED
        if attempt.done is not None:
            if error:
                os.close(attempt.fd)
            attempt.done(None if error else socket.socket(fileno=attempt.fd), error)
        elif attempt.call is not None:
            heard = self._answer(attempt.call, attempt.fd, error)
            sock.undelivered = not heard and not error

    def _give_up(self, attempt: _Attempt) -> None:
        """SO_SNDTIMEO is over; the kernel goes on connecting."""
        if attempt.waits and attempt.call is not None:
            self._rest(attempt)
            self._answer(attempt.call, attempt.fd, errno.EINPROGRESS)

    # Calls that wait.

    def waiting(self) -> List[Call]:
        return [attempt.call for attempt in self._waiting.values() if attempt.call is not None]

    def check(self) -> None:
        """Interrupted calls are not notified; a socket must not stay open by our copy."""
        for attempt in list(self._waiting.values()):
            if attempt.call is not None and not attempt.call.waits:
                self._rest(attempt)
                os.close(attempt.fd)

    def _check_later(self) -> None:
        if self._checking is None:
            self._checking = self._loop.later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._checking = None
        self.check()
        if self._waiting:
            self._check_later()

    def close(self) -> None:
        if self._black_hole is not None:
            self._black_hole.close()

    # Connections of netd's own.

    def dial(self, ip: int, port: int, source_ip: int, done: OnDialled) -> None:
        """Connect to a pod, this one or another, as source_ip: probes, port-forward, NodePorts."""
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        sock = Socket(self._kernel.cookie(made.fileno()), socket.AF_INET)
        attempt = _Attempt(made.detach(), sock, None, (ip, port), source_ip)
        attempt.done = done
        if addresses.is_loopback(ip):
            self._inner(attempt, False)
        else:
            self._to_pod(attempt)
