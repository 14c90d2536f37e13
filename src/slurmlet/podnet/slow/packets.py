"""IPv4, UDP, TCP and ICMP headers as bytes: read, built, rewritten. Pure; it must never touch a socket.

A ones' complement sum of 16-bit words is the number that the bytes spell, modulo 65535. Python counts that at the speed of
C, for a header as for 64 KiB, and a rewritten field changes a checksum by the difference of the field's two values.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Optional, Union

ICMP, TCP, UDP = 1, 6, 17
# ICMP types, and the codes of "unreachable".
ECHO_REPLY, UNREACHABLE, ECHO = 0, 3, 8
HOST, PORT, FRAGMENTATION, PROHIBITED = 1, 3, 4, 13
# Errors carry a piece of the packet they are about: unreachable, source quench, redirect, time exceeded, parameter.
ERRORS = frozenset((3, 4, 5, 11, 12))
# Those that tell a kernel where or how fast to send: a pod has no business with that.
STEERING = frozenset((4, 5))

IP_BYTES, UDP_BYTES, TCP_BYTES, ICMP_BYTES = 20, 8, 20, 8
MORE, DONT, OFFSET = 0x2000, 0x4000, 0x1FFF
_TTL = 64
# An error quotes this much of the packet it is about, so that it never needs to be fragmented itself (RFC 1812).
_QUOTED_BYTES = 548

IP = struct.Struct(">BBHHHBBHII")
PORTS = struct.Struct(">HH")
UDP_HEAD = struct.Struct(">HHHH")
ICMP_HEAD = struct.Struct(">BBHHH")
_H = struct.Struct(">H")
_I = struct.Struct(">I")
# Protocols whose header begins with two ports: TCP, UDP, DCCP, SCTP, UDP-Lite.
_PORTED = frozenset((TCP, UDP, 33, 132, 136))
# Where a transport keeps its checksum.
_CHECKSUM_AT = {UDP: 6, TCP: 16}

Bytes = Union[bytes, bytearray, memoryview]


class Head(NamedTuple):
    """What the forwarder wants to know of a packet. Ports are 0 where there are none (a later fragment, other protocols);
    for ICMP echo both are the echo's identifier."""

    protocol: int
    source: int
    destination: int
    source_port: int
    port: int
    # Where the transport's header starts.
    start: int
    fragment: bool


def head(packet: Bytes) -> Optional[Head]:
    """None for what is no whole IPv4 packet, or has not all of a transport's header where it should be."""
    if len(packet) < IP_BYTES:
        return None
    first, _, total, _, flags, _, protocol, _, source, destination = IP.unpack_from(packet)
    start = (first & 15) * 4
    if first >> 4 != 4 or start < IP_BYTES or not start <= total <= len(packet):
        return None
    source_port = port = 0
    if not flags & OFFSET and (protocol == ICMP or protocol in _PORTED):
        if total - start < 8:
            return None
        if protocol != ICMP:
            source_port, port = PORTS.unpack_from(packet, start)
        elif packet[start] in (ECHO, ECHO_REPLY):
            source_port = port = _H.unpack_from(packet, start + 4)[0]
    return Head(protocol, source, destination, source_port, port, start, bool(flags & (MORE | OFFSET)))


def payload(packet: Bytes, start: int) -> Optional[bytes]:
    """What a UDP datagram carries; None for a length that lies."""
    length: int = _H.unpack_from(packet, start + 4)[0]
    if length < UDP_BYTES or start + length > len(packet):
        return None
    return bytes(packet[start + UDP_BYTES : start + length])


def checksum(data: Bytes, initial: int = 0) -> int:
    """Never 0, which UDP would read as none; 0xffff is the same number."""
    if len(data) & 1:
        data = bytes(data) + b"\0"
    return 0xFFFF - (int.from_bytes(data, "big") + initial) % 0xFFFF


def _fixed(old: int, change: int) -> int:
    return (old + change) % 0xFFFF or 0xFFFF


def pseudo(source: int, destination: int, protocol: int, length: int) -> int:
    """The part of a TCP or UDP checksum that is not in its header."""
    return source + destination + protocol + length


# Building.


def ip(protocol: int, source: int, destination: int, body: Bytes, identification: int = 0) -> bytes:
    total = IP_BYTES + len(body)
    flags = 0 if identification else DONT
    bare = IP.pack(0x45, 0, total, identification, flags, _TTL, protocol, 0, source, destination)
    return b"".join((bare[:10], _H.pack(checksum(bare)), bare[12:], body))


def udp(
    source: int, source_port: int, destination: int, port: int, payload: Bytes, identification: int = 0
) -> bytes:
    """Without a checksum of its own: what brought the payload here has verified it, and so does the overlay's tag."""
    body = UDP_HEAD.pack(source_port, port, UDP_BYTES + len(payload), 0)
    return ip(UDP, source, destination, body + payload, identification)


def icmp(source: int, destination: int, kind: int, code: int, rest: bytes) -> bytes:
    """`rest` begins with the four bytes after the checksum."""
    bare = bytes((kind, code, 0, 0)) + rest
    return ip(ICMP, source, destination, b"".join((bare[:2], _H.pack(checksum(bare)), rest)))


def unreachable(packet: Bytes, code: int, source: Optional[int] = None) -> Optional[bytes]:
    """The error about a packet, to its sender; from the address it was for unless told. None where none may be sent."""
    about = head(packet)
    if about is None or IP.unpack_from(packet)[4] & OFFSET:
        return None
    if about.protocol == ICMP and (len(packet) <= about.start or packet[about.start] in ERRORS):
        return None
    quoted = bytes(4) + bytes(packet[:_QUOTED_BYTES])
    return icmp(about.destination if source is None else source, about.source, UNREACHABLE, code, quoted)


def echo(source: int, destination: int, identifier: int, sequence: int = 0, data: bytes = b"") -> bytes:
    return icmp(source, destination, ECHO, 0, PORTS.pack(identifier, sequence) + data)


def echo_reply(packet: Bytes) -> Optional[bytes]:
    about = head(packet)
    if about is None or about.fragment or about.protocol != ICMP or packet[about.start] != ECHO:
        return None
    return icmp(about.destination, about.source, ECHO_REPLY, 0, bytes(packet[about.start + 4 :]))


# Rewriting.


def rewrite(
    packet: bytearray,
    source: Optional[int] = None,
    source_port: Optional[int] = None,
    destination: Optional[int] = None,
    port: Optional[int] = None,
) -> None:
    """New addresses and ports, in place, checksums kept right. Ports only in a packet that is no later fragment."""
    start = (packet[0] & 15) * 4
    addressed = _replace(packet, 12, _I, source) + _replace(packet, 16, _I, destination)
    _H.pack_into(packet, 10, _fixed(_H.unpack_from(packet, 10)[0], addressed))
    if _H.unpack_from(packet, 6)[0] & OFFSET:
        return
    protocol = packet[9]
    if protocol == ICMP:
        _rewrite_echo(packet, start, source_port, port)
        return
    ported = _replace(packet, start, _H, source_port) + _replace(packet, start + 2, _H, port)
    at = _CHECKSUM_AT.get(protocol)
    if at is not None and len(packet) >= start + at + 2:
        old = _H.unpack_from(packet, start + at)[0]
        if old or protocol != UDP:
            _H.pack_into(packet, start + at, _fixed(old, addressed + ported))


def _rewrite_echo(packet: bytearray, start: int, source_port: Optional[int], port: Optional[int]) -> None:
    number = port if source_port is None else source_port
    if number is not None and packet[start] in (ECHO, ECHO_REPLY):
        changed = _replace(packet, start + 4, _H, number)
        _H.pack_into(packet, start + 2, _fixed(_H.unpack_from(packet, start + 2)[0], changed))


def _replace(packet: bytearray, at: int, shape: struct.Struct, value: Optional[int]) -> int:
    """What the change does to a checksum over the field."""
    if value is None:
        return 0
    before: int = shape.unpack_from(packet, at)[0]
    shape.pack_into(packet, at, value)
    return before - value


def quoted(packet: Bytes, start: int) -> Optional[Head]:
    """The head of the packet that an ICMP error is about; a quotation is shorter than the packet was."""
    inner = packet[start + ICMP_BYTES :]
    if len(inner) < IP_BYTES + 8:
        return None
    whole = bytearray(inner)
    _H.pack_into(whole, 2, len(whole))
    return head(whole)


def rewrite_quoted(
    packet: bytearray,
    source: Optional[int] = None,
    source_port: Optional[int] = None,
    destination: Optional[int] = None,
    port: Optional[int] = None,
) -> None:
    """New addresses and ports in the quotation inside an ICMP error."""
    start = (packet[0] & 15) * 4
    inner = bytearray(packet[start + ICMP_BYTES :])
    rewrite(inner, source, source_port, destination, port)
    packet[start + ICMP_BYTES :] = inner
    _H.pack_into(packet, start + 2, 0)
    _H.pack_into(packet, start + 2, checksum(packet[start:]))
