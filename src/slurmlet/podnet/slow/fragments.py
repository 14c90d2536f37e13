"""Fragments of IPv4 packets, put together and taken apart again. Pure.

Policy and Services need ports, host sockets need whole payloads: only the first fragment, or all of them together, have
these. A pod's MTU is so large that fragments are rare; they must still be right. What is held is bounded in number and time.
"""

from __future__ import annotations

import time
from typing import Callable, Dict, Iterator, List, Optional, Tuple

from slurmlet.podnet.slow import packets

_HOLD_S = 30.0
_MAX_HELD = 64
_MAX_BYTES = 65535

Key = Tuple[int, int, int, int]


class _Held:
    __slots__ = ("due_s", "end", "first", "pieces")

    def __init__(self, due_s: float) -> None:
        self.due_s = due_s
        self.pieces: Dict[int, bytes] = {}
        self.first = b""
        self.end: Optional[int] = None

    def whole(self) -> Optional[bytes]:
        """The payload, once no byte of it is missing."""
        if self.end is None or not self.first or len(self.first) + self.end > _MAX_BYTES:
            return None
        parts: List[bytes] = []
        at = 0
        for offset, piece in sorted(self.pieces.items()):
            # Overlapping pieces are nobody's honest work (RFC 5722 for IPv6): such a packet stays incomplete and times out.
            if offset != at:
                return None
            parts.append(piece)
            at += len(piece)
        return b"".join(parts) if at == self.end else None


class Reassembler:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held: Dict[Key, _Held] = {}
        self.dropped = 0

    def add(self, packet: bytes) -> Optional[bytes]:
        """The whole packet once its last missing piece is here. The piece must have passed packets.head()."""
        first, _, total, identification, flags, _, protocol, _, source, destination = packets.IP.unpack_from(
            packet
        )
        start, offset = (first & 15) * 4, (flags & packets.OFFSET) * 8
        body = packet[start:total]
        if offset + len(body) > _MAX_BYTES - packets.IP_BYTES or not body:
            self.dropped += 1
            return None
        key = (source, destination, identification, protocol)
        held = self._held.get(key)
        if held is None:
            held = self._hold(key)
        held.pieces[offset] = body
        if offset == 0:
            held.first = packet[:start]
        if not flags & packets.MORE:
            held.end = offset + len(body)
        whole = held.whole()
        if whole is None:
            return None
        del self._held[key]
        return _packet(held.first, whole, 0)

    def _hold(self, key: Key) -> _Held:
        now_s = self._clock()
        for old in [key for key, held in self._held.items() if held.due_s <= now_s]:
            del self._held[old]
            self.dropped += 1
        if len(self._held) >= _MAX_HELD:
            del self._held[next(iter(self._held))]
            self.dropped += 1
        made = self._held[key] = _Held(now_s + _HOLD_S)
        return made


def split(packet: bytes, mtu: int) -> Iterator[bytes]:
    """The packet itself where it fits, else its fragments."""
    if len(packet) <= mtu:
        yield packet
        return
    start = (packet[0] & 15) * 4
    room = (mtu - start) & ~7
    for at in range(start, len(packet), room):
        more = packets.MORE if at + room < len(packet) else 0
        yield _packet(packet[:start], packet[at : at + room], more | (at - start) >> 3)


def _packet(header: bytes, body: bytes, flags: int) -> bytes:
    made = bytearray(header)
    made[2:4] = (len(header) + len(body)).to_bytes(2, "big")
    made[6:8] = flags.to_bytes(2, "big")
    made[10:12] = b"\0\0"
    made[10:12] = packets.checksum(made).to_bytes(2, "big")
    return bytes(made) + body
