"""What netfast.c did, kept as it wrote it: a record per connection, read only when somebody asks for that socket.

Most connections come and go without Python ever being asked about them, so nothing is made of their records but an entry
in a table, all of a batch at once. The latest record of a socket is the one that holds.
"""

from __future__ import annotations

import socket
import struct
from typing import Callable, Dict, Iterator, List, NamedTuple, Optional, Set

from slurmlet.podnet import addresses
from slurmlet.podnet.fast.socket_names import CONNECTED, CONNECTING, Socket
from slurmlet.podnet.overlay_socket import Announcement

MADE_CONNECTING, MADE_CONNECTED, MADE_ACCEPTED, FAILED = range(1, 5)
# As in types.h.
_record = struct.Struct("=QIIIHHHBBBB2x")
RECORD_BYTES = _record.size
_cookie_and_rest = struct.Struct(f"=Q{RECORD_BYTES - 8}s")
# The kernel does not look at it while a connection is under way, but wants one.
_TARGETS: Dict[int, bytes] = {
    family: addresses.encode(family, addresses.LOOPBACK, 1) for family in (socket.AF_INET, socket.AF_INET6)
}


class Record(NamedTuple):
    cookie: int
    ip: int
    peer_ip: int
    real_ip: int
    port: int
    peer_port: int
    real_port: int
    kind: int
    family: int
    undelivered: int
    announced: int

    def announcement(self) -> Optional[Announcement]:
        """What was told of it to the netd of the other pod."""
        if not self.announced or self.kind in (MADE_ACCEPTED, FAILED):
            return None
        return Announcement(self.ip, self.port, self.real_ip, self.real_port)

    def apply(self, sock: Socket) -> None:
        if self.kind == FAILED:
            sock.forget_names()
            return
        sock.ip, sock.port, sock.peer_ip, sock.peer_port = self.ip, self.port, self.peer_ip, self.peer_port
        sock.undelivered = self.undelivered != 0
        sock.phase = CONNECTING if self.kind == MADE_CONNECTING else CONNECTED
        if self.kind != MADE_ACCEPTED:
            sock.target = _TARGETS[self.family]


def read(raw: bytes) -> Iterator[Record]:
    return map(Record._make, _record.iter_unpack(raw))


class Unread:
    """For `sockets.Table`: sockets that it does not know yet, because nobody asked."""

    def __init__(self, remember: Callable[[int, Optional[Announcement]], None]) -> None:
        self._remember = remember
        self._rest: Dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._rest)

    def take(self, raw: bytes, known: Dict[int, Socket]) -> List[Record]:
        """Keep them all; those of sockets in `known` are the caller's to apply."""
        batch = dict(_cookie_and_rest.iter_unpack(raw))
        asked_for = known.keys() & batch.keys()
        found = [self._parsed(cookie, batch.pop(cookie)) for cookie in asked_for]
        for record in found:
            self._remember(record.cookie, record.announcement())
        self._rest.update(batch)
        return found

    def pop(self, cookie: int) -> Optional[Socket]:
        rest = self._rest.pop(cookie, None)
        if rest is None:
            return None
        record = self._parsed(cookie, rest)
        self._remember(cookie, record.announcement())
        sock = Socket(cookie, record.family)
        record.apply(sock)
        return sock

    def discard(self, cookie: int) -> None:
        self._rest.pop(cookie, None)

    def keep_only(self, living: Set[int]) -> None:
        self._rest = {cookie: rest for cookie, rest in self._rest.items() if cookie in living}

    def raw(self) -> bytes:
        return b"".join(_cookie_and_rest.pack(*each) for each in self._rest.items())

    def announcement_of(self, cookie: int) -> Optional[Announcement]:
        rest = self._rest.get(cookie)
        return None if rest is None else self._parsed(cookie, rest).announcement()

    @staticmethod
    def _parsed(cookie: int, rest: bytes) -> Record:
        return Record._make(_record.unpack(_cookie_and_rest.pack(cookie, rest)))
