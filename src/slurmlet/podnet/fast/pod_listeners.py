"""The pod's TCP ports: who has claimed which, and the ports of the host behind those that listen.

A claim follows the kernel's rules of bind() inside the pod; the host port behind a listener is any. It is held by a
socket of our own as long as the pod lives: a server that starts again has the same one, so nobody's table grows old,
and no stranger on the host can take the place of a server that has just gone. A second socket in the pod's own
namespace, the mirror, shows the listener to `ss` there.
"""

from __future__ import annotations

import errno
import os
import random
import socket
from collections import OrderedDict
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.fast import live_sockets
from slurmlet.podnet.fast.host_sockets import HostSockets
from slurmlet.podnet.netd_setup import Setup

_SIX_LOOPBACK = bytes(15) + b"\x01"
# Where the host's socket of a listener is bound: the node's address, 127.0.0.1, ::1.
OUTSIDE, INSIDE, SIX = "outside", "inside", "six"
# The kernel's usual range for sockets that do not care, and how often it is tried before the range counts as full.
_EPHEMERAL, _EPHEMERAL_TRIES = (32768, 60999), 200
_CHECK_S = 1.0
_MAX_HELD_PORTS = 64
_MIRROR_BACKLOG = 8

Key = Tuple[str, int, int]


class Claim:
    """A port of the pod that one socket has bound."""

    __slots__ = (
        *("cookie", "inode", "family", "four", "six", "port", "reuse_address", "reuse_port"),
        *("chosen", "place", "host_port", "mirror", "raw"),
    )

    def __init__(
        self, cookie: int, family: int, four: Optional[int], six: bool, port: int, raw: bytes = b""
    ) -> None:
        self.cookie, self.family, self.port = cookie, family, port
        self.inode = 0
        # The IPv6 address as the program wrote it.
        self.raw = raw
        # What it serves: an IPv4 address (0: all of the pod's) or none, and whether ::1.
        self.four, self.six = four, six
        self.reuse_address = self.reuse_port = False
        # The program named the port itself.
        self.chosen = port != 0
        self.place = OUTSIDE
        # Not 0: it listens.
        self.host_port = 0
        self.mirror: Optional[socket.socket] = None

    def name(self) -> bytes:
        return addresses.encode(self.family, self.four or 0, self.port, self.raw)

    @property
    def key(self) -> Key:
        return self.place, self.four or 0, self.port

    def overlaps(self, other: Claim) -> bool:
        if self.six and other.six:
            return True
        if self.four is None or other.four is None:
            return False
        return self.four == other.four or addresses.ANY in (self.four, other.four)

    def excludes(self, other: Claim) -> bool:
        """The kernel's rule for two sockets on one port."""
        if not self.overlaps(other) or (self.reuse_port and other.reuse_port):
            return False
        return not (self.reuse_address and other.reuse_address and not other.host_port)


class Ports:
    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        kernel: HostSockets,
        pod_sockets: Any,
        on_listeners: Callable[[Dict[int, int]], None],
    ) -> None:
        self._loop, self._setup, self._kernel = loop, setup, kernel
        self._pod_sockets, self._on_listeners = pod_sockets, on_listeners
        self._claims: Dict[int, List[Claim]] = {}
        self._holders: OrderedDict[Key, Tuple[socket.socket, int]] = OrderedDict()
        # Host ports that an earlier netd had given.
        self._remembered: Dict[Key, int] = {}
        self._published: Dict[int, int] = {}
        self._checking: Optional[Timer] = None
        # Set by those who keep copies of listeners, or queues of theirs.
        self.before_check: Callable[[], None] = lambda: None
        self.on_opened: Callable[[Claim], None] = lambda _claim: None
        self.on_gone: Callable[[Claim], None] = lambda _claim: None
        self.on_mirror: Callable[[Claim], None] = lambda _claim: None

    # bind().

    def claim(
        self, fd: int, cookie: int, family: int, address: addresses.SockAddr
    ) -> Tuple[Optional[Claim], int]:
        """A claim on a port of the pod, or an errno."""
        served = self._served(fd, family, address)
        if served is None:
            return None, errno.EADDRNOTAVAIL
        claim = Claim(cookie, family, served[0], served[1], address.port, address.raw)
        claim.inode = os.fstat(fd).st_ino
        claim.reuse_address = self._kernel.option(fd, socket.SOL_SOCKET, socket.SO_REUSEADDR) == 1
        claim.reuse_port = self._kernel.option(fd, socket.SOL_SOCKET, socket.SO_REUSEPORT) == 1
        claim.place = self._place(claim)
        if not self._settle(claim):
            return None, errno.EADDRINUSE
        self._claims.setdefault(claim.port, []).append(claim)
        return claim, 0

    def _served(
        self, fd: int, family: int, address: addresses.SockAddr
    ) -> Optional[Tuple[Optional[int], bool]]:
        six_only = family == socket.AF_INET6 and self._kernel.only_six(fd)
        if address.family == socket.AF_INET6 and address.raw == _SIX_LOOPBACK:
            return None, True
        if address.ip == addresses.ANY and not any(address.raw):
            return (None if six_only else addresses.ANY), family == socket.AF_INET6
        if address.ip is None or six_only:
            return None
        own = address.ip in (addresses.ANY, self._setup.ip) or addresses.is_loopback(address.ip)
        return (address.ip, False) if own else None

    def _place(self, claim: Claim) -> str:
        if claim.four is None:
            return SIX
        return OUTSIDE if claim.four in (addresses.ANY, self._setup.ip) else INSIDE

    def _settle(self, claim: Claim) -> bool:
        if claim.port:
            # Whoever is in the way may have been closed since.
            return not self._rivals(claim) or (self._drop_gone(claim.port) and not self._rivals(claim))
        for _ in range(_EPHEMERAL_TRIES):
            claim.port = random.randint(*_EPHEMERAL)  # noqa: S311 - any free port will do
            if claim.port not in self._claims:
                return True
        return False

    def _rivals(self, claim: Claim) -> List[Claim]:
        return [
            each for each in self._claims.get(claim.port, ()) if each is not claim and claim.excludes(each)
        ]

    def _drop_gone(self, port: int) -> bool:
        self.before_check()
        claims = self._claims.get(port, [])
        listening = live_sockets.living(live_sockets.LISTENING)
        held = live_sockets.held_sockets() if any(not each.host_port for each in claims) else set()
        gone = [
            each
            for each in claims
            if (each.cookie not in listening if each.host_port else each.inode not in held)
        ]
        for each in gone:
            self.release(each)
        return bool(gone)

    def release(self, claim: Claim) -> None:
        left = [each for each in self._claims.get(claim.port, ()) if each is not claim]
        if left:
            self._claims[claim.port] = left
        else:
            self._claims.pop(claim.port, None)
        if claim.mirror is not None:
            self._loop.forget(claim.mirror.fileno())
            claim.mirror.close()
            claim.mirror = None
        if claim.host_port:
            claim.host_port = 0
            if not claim.chosen and not any(each.key == claim.key for each in left):
                self._let_go(claim.key)
            self.on_gone(claim)
            self._publish()

    # listen().

    def open(self, fd: int, claim: Claim, backlog: int) -> int:
        """Make the program's socket listen on a port of the host; 0 or an errno."""
        if any(each.host_port for each in self._rivals(claim)):
            self._drop_gone(claim.port)
            if any(each.host_port for each in self._rivals(claim)):
                return errno.EADDRINUSE
        # Stays set: the next server must get this port although connections of this one linger on it.
        self._kernel.set_option(fd, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        error = self._bind(fd, claim, backlog)
        if error == errno.EADDRINUSE:
            self._let_go(claim.key)
            self._remembered.pop(claim.key, None)
            error = self._bind(fd, claim, backlog)
        if error:
            return error
        self._reflect(claim)
        self.on_opened(claim)
        self._publish()
        self._check_later()
        return 0

    def _bind(self, fd: int, claim: Claim, backlog: int) -> int:
        try:
            holder, host_port = self._holder(claim)
        except OSError as problem:
            return problem.errno or errno.EADDRINUSE
        # Two sockets may have one port if both say so and neither listens; ours says so only for this moment, or
        # anybody on the host could join in later.
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            error = self._kernel.bind(fd, self.address(claim, claim.family, host_port))
            error = error or self._kernel.listen(fd, backlog)
        finally:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        if not error:
            claim.host_port = host_port
        return error

    def _holder(self, claim: Claim) -> Tuple[socket.socket, int]:
        known = self._holders.get(claim.key)
        if known is not None:
            self._holders.move_to_end(claim.key)
            return known
        family = socket.AF_INET6 if claim.place == SIX else socket.AF_INET
        holder = socket.socket(family, socket.SOCK_STREAM)
        before = self._remembered.pop(claim.key, 0)
        error = self._kernel.bind(holder.fileno(), self.address(claim, family, before))
        if error and before:
            error = self._kernel.bind(holder.fileno(), self.address(claim, family, 0))
        if error:
            holder.close()
            raise OSError(error, os.strerror(error))
        made = (holder, int(holder.getsockname()[1]))
        if len(self._holders) >= _MAX_HELD_PORTS:
            self._holders.popitem(last=False)[1][0].close()
        self._holders[claim.key] = made
        return made

    def _let_go(self, key: Key) -> None:
        known = self._holders.pop(key, None)
        if known is not None:
            known[0].close()

    def address(self, claim: Claim, family: int, host_port: int) -> bytes:
        """`sockaddr` of the host for a socket of this family, to bind a listener or to reach it."""
        if claim.place == SIX:
            return addresses.encode(socket.AF_INET6, 0, host_port, _SIX_LOOPBACK)
        ip = self._setup.host_ip if claim.place == OUTSIDE else addresses.LOOPBACK
        return addresses.encode(family, ip, host_port)

    def _reflect(self, claim: Claim) -> None:
        if self._pod_sockets is None:
            return
        try:
            mirror = claim.mirror = self._pod_sockets.tcp(claim.family)
            mirror.setblocking(False)
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                mirror.setsockopt(socket.SOL_SOCKET, option, 1)
            if claim.family == socket.AF_INET6:
                mirror.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(claim.four is None))
            error = self._kernel.bind(mirror.fileno(), claim.name())
            if not error:
                mirror.listen(_MIRROR_BACKLOG)
        except OSError:
            # Only a picture: the listener itself works without it.
            return
        self._loop.reading(mirror.fileno(), lambda: self.on_mirror(claim))

    # Who listens.

    def listening(self) -> Iterator[Claim]:
        return (each for claims in self._claims.values() for each in claims if each.host_port)

    def find(self, ip: int, port: int, six: bool) -> Optional[Claim]:
        """The listener behind an address of this pod: of ours alone, or of all."""
        found = None
        for each in self._claims.get(port, ()):
            if not each.host_port:
                continue
            if each.six if six else each.four == ip:
                return each
            if not six and each.four == addresses.ANY:
                found = each
        return found

    def host_port(self, ip: int, port: int) -> Optional[int]:
        """For the netds of other pods: the host port behind a listener that they may reach."""
        claim = self.find(ip, port, False) if ip == self._setup.ip else None
        return claim.host_port if claim is not None else None

    def _publish(self) -> None:
        now = {each.port: each.host_port for each in self.listening() if each.place == OUTSIDE}
        if now != self._published:
            self._published = now
            self._on_listeners(dict(now))

    @property
    def published(self) -> Dict[int, int]:
        return dict(self._published)

    def _check_later(self) -> None:
        if self._checking is None:
            self._checking = self._loop.later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._checking = None
        self.check()
        if any(True for _ in self.listening()):
            self._check_later()

    def check(self) -> None:
        """Notice listeners that were closed."""
        self.before_check()
        living = live_sockets.living(live_sockets.LISTENING)
        for claim in [each for each in self.listening() if each.cookie not in living]:
            self.release(claim)

    def close(self) -> None:
        if self._checking is not None:
            self._checking.cancel()
        for key in list(self._holders):
            self._let_go(key)
        for claim in self.listening():
            if claim.mirror is not None:
                self._loop.forget(claim.mirror.fileno())
                claim.mirror.close()

    # After a netd that died.

    def restore(self, claim: Claim, host_port: int, alive: bool) -> None:
        """A listener that an earlier netd opened; one that is gone still has its port of the host kept for it."""
        claim.place = self._place(claim)
        self._remembered[claim.key] = host_port
        if alive:
            claim.host_port = host_port
            self._claims.setdefault(claim.port, []).append(claim)
            self._reflect(claim)
            self.on_opened(claim)
            self._publish()
            self._check_later()
