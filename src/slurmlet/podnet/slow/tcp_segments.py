"""TCP segments as bytes: read and built. Pure. Options are only those a short, safe path needs: MSS and window scale."""

from __future__ import annotations

import struct
from typing import NamedTuple, Optional, Tuple

from slurmlet.podnet.slow import packets

FIN, SYN, RST, PSH, ACK = 1, 2, 4, 8, 16
# An address and a port.
Place = Tuple[int, int]

_TCP = struct.Struct(">HHIIBBHHH")
_BARE_IP = struct.Struct(">BBHHHBB")
_SYN_OPTIONS = struct.Struct(">BBHBBBB")
_END, _NOTHING, _MSS, _SCALE = 0, 1, 2, 3
_DEFAULT_MSS = 536
_MAX_SCALE = 14
_MASK = 0xFFFFFFFF


class Segment(NamedTuple):
    sequence: int
    acknowledged: int
    flags: int
    # As written; a SYN's is never scaled.
    window: int
    data: bytes
    # Of a SYN; the scale is None where the sender does not scale.
    mss: int
    scale: Optional[int]


def parse(packet: bytes, start: int) -> Optional[Segment]:
    """The packet has passed packets.head(). Its checksum is not looked at: the kernel that wrote it is on this host."""
    total = int.from_bytes(packet[2:4], "big")
    if total - start < packets.TCP_BYTES:
        return None
    _, _, sequence, acknowledged, offset, flags, window, _, _ = _TCP.unpack_from(packet, start)
    body = start + (offset >> 4) * 4
    if not start + packets.TCP_BYTES <= body <= total:
        return None
    mss, scale = _options(packet[start + packets.TCP_BYTES : body]) if flags & SYN else (_DEFAULT_MSS, None)
    return Segment(sequence, acknowledged, flags, window, packet[body:total], mss, scale)


def _options(raw: bytes) -> Tuple[int, Optional[int]]:
    mss, scale = _DEFAULT_MSS, None
    at = 0
    while at < len(raw) and raw[at] != _END:
        if raw[at] == _NOTHING:
            at += 1
            continue
        if at + 2 > len(raw) or raw[at + 1] < 2 or at + raw[at + 1] > len(raw):
            break
        value = raw[at + 2 : at + raw[at + 1]]
        if raw[at] == _MSS and len(value) == 2:
            mss = max(int.from_bytes(value, "big"), 64)
        elif raw[at] == _SCALE and len(value) == 1:
            scale = min(value[0], _MAX_SCALE)
        at += raw[at + 1]
    return mss, scale


def syn_options(mss: int, scale: Optional[int]) -> bytes:
    if scale is None:
        return _SYN_OPTIONS.pack(_MSS, 4, mss, _NOTHING, _NOTHING, _NOTHING, _NOTHING)
    return _SYN_OPTIONS.pack(_MSS, 4, mss, _NOTHING, _SCALE, 3, scale)


def build(
    source: Place,
    destination: Place,
    sequence: int,
    acknowledged: int,
    flags: int,
    window: int,
    options: bytes = b"",
    data: packets.Bytes = b"",
) -> bytes:
    header_bytes = packets.TCP_BYTES + len(options)
    bare = (
        _TCP.pack(
            source[1],
            destination[1],
            sequence & _MASK,
            acknowledged & _MASK,
            header_bytes << 2,
            flags,
            window,
            0,
            0,
        )
        + options
    )
    size = len(bare) + len(data)
    initial = packets.pseudo(source[0], destination[0], packets.TCP, size)
    # Two sums instead of one over a copy: the header's length is even, so the words stay in step.
    if data:
        initial += 0xFFFF - packets.checksum(data)
    sum_ = packets.checksum(bare, initial)
    body = b"".join((bare[:16], sum_.to_bytes(2, "big"), bare[18:], data))
    return packets.ip(packets.TCP, source[0], destination[0], body)


def reset_for(segment: Segment, source: Place, destination: Place) -> bytes:
    """The answer to a segment that belongs to nothing (RFC 9293, 3.10.7.1); `source` is whom it was for."""
    if segment.flags & ACK:
        return build(source, destination, segment.acknowledged, 0, RST, 0)
    length = len(segment.data) + bool(segment.flags & SYN) + bool(segment.flags & FIN)
    return build(source, destination, 0, segment.sequence + length, RST | ACK, 0)
