"""The client half of "How one pod's TCP reaches another's" (docs/network.md), for plain sockets of the host.

For whoever is no program of a pod: the gateway, and relays of NodePorts. It never blocks, and it never routes: Services
are looked up before.
"""

from __future__ import annotations

import errno
import socket
import weakref
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Tuple

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import DENIED, Announcement, Overlay
from slurmlet.podnet.tables import Peer, Tables

if TYPE_CHECKING:
    # Loaded where the cluster asked for encryption, by whoever makes one.
    from slurmlet.podnet.encryption.sealer import Sealer

# Gets a connected, non-blocking socket and 0, or None and an errno.
OnDialled = Callable[[Optional[socket.socket], int], None]
# dial(ip, port, source_ip, done)
Dial = Callable[[int, int, int, OnDialled], None]
CONNECT_TIMEOUT_S = 10.0
_IP_BIND_ADDRESS_NO_PORT = 24


class Dialler:
    """Connects to pods, announced as `source_ip` and sealed where there is a sealer, and to any other address as it is."""

    def __init__(
        self, loop: Loop, setup: Setup, tables: Tables, overlay: Overlay, sealer: Optional[Sealer] = None
    ) -> None:
        self._loop, self._setup, self._tables, self._overlay = loop, setup, tables, overlay
        self._sealer = sealer
        # By source port, for as long as the socket lives: a port that is free again may be a stranger's next.
        self._mine: Dict[int, List[Tuple[weakref.ref[socket.socket], Announcement]]] = {}

    def dial(self, ip: int, port: int, source_ip: int, done: OnDialled, source_port: int = 0) -> None:
        """`source_port` is what the pod will see; 0: that of the socket."""
        if not self._setup.in_pods(ip):
            connect_host(self._loop, ip, port, done)
            return
        peer = self._peer(ip)
        if peer is None:
            self._loop.soon(lambda: done(None, errno.EHOSTUNREACH))
            return
        what = Announcement(source_ip, source_port, ip, port)
        known = peer.listeners.get(port)
        if known is None:
            self._ask(peer, what, done)
        else:
            self._connect(peer, known, what, True, done)

    def recall(self, host_source_port: int, host_ip: int, host_port: int) -> List[Announcement]:
        """For the overlay's on_whois: what was announced for a connection of ours that is still open and leads there."""
        found = []
        for made, what in self._mine.get(host_source_port, ()):
            alive = made()
            if alive is not None and alive.fileno() >= 0 and _leads_to(alive, host_ip, host_port):
                found.append(what)
        return found

    def _peer(self, ip: int) -> Optional[Peer]:
        if ip == self._setup.ip:
            return Peer(self._setup.host_ip, self._overlay.port, {})
        return self._tables.peer(ip)

    def _ask(self, peer: Peer, what: Announcement, done: OnDialled) -> None:
        ip, port = what.ip, what.port

        def answered(host_port: Optional[int]) -> None:
            if not host_port or host_port == DENIED:
                done(None, errno.ECONNREFUSED if host_port == 0 else errno.ETIMEDOUT)
                return
            self._connect(peer, host_port, what, False, done)

        if ip == self._setup.ip:
            own = self._overlay.on_ask(ip, port) or 0
            self._loop.soon(lambda: answered(own))
        else:
            self._overlay.ask(peer, ip, port, answered, what.source_ip)

    def _connect(
        self, peer: Peer, host_port: int, what: Announcement, from_table: bool, done: OnDialled
    ) -> None:
        def ended(made: Optional[socket.socket], code: int) -> None:
            if code == errno.ECONNREFUSED and from_table:
                # The table may be a moment old: the pod's own netd knows better.
                self._ask(peer, what, done)
            elif made is None or self._sealer is None:
                done(made, code)
            else:
                self._sealer.client(made, done)

        own = addresses.text(self._setup.host_ip)
        connecting = _Connecting(self._loop, (addresses.text(peer.host_ip), host_port), own, ended)
        source_port = connecting.source_port
        seen = what if what.source_port else what._replace(source_port=source_port)
        if source_port:
            self._remember(connecting.socket, source_port, seen)
            self._announce(peer, source_port, seen)

    def _remember(self, made: socket.socket, port: int, what: Announcement) -> None:
        others = [held for held in self._mine.get(port, ()) if held[1][2:] != what[2:]]
        self._mine[port] = [*others, (weakref.ref(made, lambda _gone: self._forget(port)), what)]

    def _announce(self, peer: Peer, port: int, what: Announcement) -> None:
        if what.ip == self._setup.ip:
            self._overlay.expect(self._setup.host_ip, port, what)
        else:
            self._overlay.announce(peer, port, what)

    def _forget(self, port: int) -> None:
        left = [held for held in self._mine.pop(port, ()) if held[0]() is not None]
        if left:
            self._mine[port] = left


def _leads_to(made: socket.socket, host_ip: int, host_port: int) -> bool:
    try:
        host, port = made.getpeername()
    except OSError:
        # Over, though not closed yet.
        return False
    return (host, port) == (addresses.text(host_ip), host_port)


class _Connecting:
    """One connect, in the loop. Once made, `source_port` is its local port, or 0 when it failed at once."""

    def __init__(self, loop: Loop, address: Tuple[str, int], source: Optional[str], done: OnDialled) -> None:
        self._loop, self._done = loop, done
        self.socket = made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.source_port = 0
        self._timer: Optional[Timer] = None
        made.setblocking(False)
        try:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if source is not None:
                # The announcement names our host by this address; the port is chosen at connect, where more are free.
                made.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
                made.bind((source, 0))
            code = made.connect_ex(address)
            if code in (0, errno.EINPROGRESS):
                self.source_port = int(made.getsockname()[1])
        except OSError as error:
            code = error.errno or errno.EIO
        if code not in (0, errno.EINPROGRESS):
            loop.soon(lambda: self._finish(code))
            return
        self._timer = loop.later(CONNECT_TIMEOUT_S, lambda: self._finish(errno.ETIMEDOUT))
        loop.writing(made.fileno(), self._writable)

    def _writable(self) -> None:
        self._finish(self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _finish(self, code: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._loop.forget(self.socket.fileno())
        done = self._done
        if code:
            self.socket.close()
            done(None, code)
        else:
            done(self.socket, 0)


def connect_host(loop: Loop, ip: int, port: int, done: OnDialled) -> None:
    """A plain connection to an address that is no pod's."""
    _Connecting(loop, (addresses.text(ip), port), None, done)


def connect_from(loop: Loop, source_ip: int, ip: int, port: int, done: OnDialled) -> None:
    """The same from this address of ours."""
    _Connecting(loop, (addresses.text(ip), port), addresses.text(source_ip), done)
