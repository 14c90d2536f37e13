"""What netd remembers of each host socket that a program of the pod holds: its names as the pod knows them.

Keyed by the kernel's cookie, which all descriptors of a socket share (dup, fork, SCM_RIGHTS) and which is never given twice.
Nobody tells us of a close(): when the table has grown, those that are gone are found and dropped. It must never be the only
place that knows something a program needs: whatever is not here is taken from the kernel.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional

from slurmlet.podnet import addresses
from slurmlet.podnet.fast import live_sockets
from slurmlet.podnet.fast.pod_listeners import Claim, Ports

FRESH, CONNECTING, CONNECTED, LISTENING = "fresh", "connecting", "connected", "listening"
_SIX_LOOPBACK = bytes(15) + b"\x01"
# Sockets remembered before the first look for those that are gone: it costs the kernel a walk through all of the host's.
_MIN_SWEEP = 16384


class Socket:
    __slots__ = (
        *("cookie", "family", "phase", "claim", "target", "undelivered"),
        *("ip", "port", "peer_ip", "peer_port", "six"),
    )

    def __init__(self, cookie: int, family: int) -> None:
        self.cookie, self.family = cookie, family
        self.phase = FRESH
        self.claim: Optional[Claim] = None
        # Where the host's kernel was told to connect to.
        self.target = b""
        # The last call worked, but its program was interrupted before it heard so; it will call again.
        self.undelivered = False
        # Both ends as the pod knows them; port 0: as the kernel says.
        self.ip = self.port = self.peer_ip = self.peer_port = 0
        # Both are ::1.
        self.six = False

    def named(self, ip: int, port: int, peer_ip: int, peer_port: int, six: bool) -> None:
        self.ip, self.port, self.peer_ip, self.peer_port, self.six = ip, port, peer_ip, peer_port, six

    def local(self) -> bytes:
        return addresses.encode(self.family, self.ip, self.port, _SIX_LOOPBACK if self.six else b"")

    def peer(self) -> bytes:
        return addresses.encode(self.family, self.peer_ip, self.peer_port, _SIX_LOOPBACK if self.six else b"")

    def forget_names(self) -> None:
        self.phase, self.undelivered, self.target = FRESH, False, b""
        self.ip = self.port = self.peer_ip = self.peer_port = 0
        self.six = False


class Table:
    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._sockets: Dict[int, Socket] = {}
        self._sweep_at = _MIN_SWEEP
        self._unread: Any = None
        self.get: Callable[[int], Optional[Socket]] = self._sockets.get
        self.on_swept: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        return len(self._sockets) + (len(self._unread) if self._unread is not None else 0)

    def read_from(self, unread: Any) -> None:
        """More sockets, known by native/records.py until somebody asks for them; None: no more."""
        self._unread = unread
        self.get = self._sockets.get if unread is None else self._get_or_read

    def _get_or_read(self, cookie: int) -> Optional[Socket]:
        sock = self._sockets.get(cookie)
        if sock is None:
            sock = self._unread.pop(cookie)
            if sock is not None:
                self._sockets[cookie] = sock
        return sock

    def take(self, records: bytes) -> List[Socket]:
        """What the library did; gives those sockets that Python knows, changed."""
        changed = []
        for record in self._unread.take(records, self._sockets):
            sock = self._sockets[record.cookie]
            record.apply(sock)
            changed.append(sock)
        if len(self) >= self._sweep_at:
            self.sweep()
        return changed

    def all(self) -> List[Socket]:
        return list(self._sockets.values())

    def add(self, sock: Socket) -> None:
        self._sockets[sock.cookie] = sock
        if len(self) >= self._sweep_at:
            self.sweep()

    def unread(self) -> bytes:
        return b"" if self._unread is None else bytes(self._unread.raw())

    def drop(self, cookie: int) -> None:
        if self._unread is not None:
            self._unread.discard(cookie)
        sock = self._sockets.pop(cookie, None)
        if sock is not None and sock.claim is not None:
            self._ports.release(sock.claim)

    def sweep(self) -> None:
        """Fresh sockets are dropped too: they are known again, from the kernel, when a call comes for one."""
        living = live_sockets.living(live_sockets.CONNECTED | live_sockets.LISTENING)
        held = None
        for cookie, sock in list(self._sockets.items()):
            if cookie in living:
                continue
            if sock.claim is not None:
                # Bound, and neither listening nor connected: in no table of the kernel.
                held = live_sockets.held_sockets() if held is None else held
                if sock.claim.inode in held:
                    continue
            self.drop(cookie)
        if self._unread is not None:
            self._unread.keep_only(living)
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self))
        self.on_swept()
