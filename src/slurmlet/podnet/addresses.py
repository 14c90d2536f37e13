"""Addresses as numbers, texts and `sockaddr` bytes. Pure.

Inside netd an IPv4 address is a number: tables are asked on every connect, and a number is the cheapest key.
"""

from __future__ import annotations

import socket
import struct

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional, Tuple


ANY, LOOPBACK = 0, 0x7F000001
_LOOPBACK_NET = 0x7F
_MAPPED = bytes(10) + b"\xff\xff"
_LOOPBACK6 = bytes(15) + b"\x01"
_ANY6 = bytes(16)


class SockAddr(Record):
    """An AF_INET or AF_INET6 address as a program gave it; `ip` is None for an IPv6 one that has no IPv4 meaning."""

    family: int
    ip: Optional[int]
    port: int
    # The 16 bytes of an AF_INET6 address, or b"".
    raw: bytes = b""


def number(text: str) -> int:
    return int.from_bytes(socket.inet_aton(text), "big")


def text(ip: int) -> str:
    return socket.inet_ntoa(ip.to_bytes(4, "big"))


def is_loopback(ip: int) -> bool:
    return ip >> 24 == _LOOPBACK_NET


def network(cidr: str) -> Tuple[int, int]:
    """(base, mask) of an IPv4 range."""
    base, _, length = cidr.partition("/")
    bits = int(length or 32)
    mask = (0xFFFFFFFF << (32 - bits)) & 0xFFFFFFFF
    return number(base) & mask, mask


def decode(raw: bytes) -> Optional[SockAddr]:
    """None for another family, or for fewer bytes than the family has."""
    if len(raw) < 2:
        return None
    family = struct.unpack_from("=H", raw)[0]
    if family == socket.AF_INET and len(raw) >= 8:
        port, ip = struct.unpack_from(">HI", raw, 2)
        return SockAddr(family, ip, port)
    if family == socket.AF_INET6 and len(raw) >= 24:
        return SockAddr(family, _four(raw[8:24]), struct.unpack_from(">H", raw, 2)[0], raw[8:24])
    return None


def _four(six: bytes) -> Optional[int]:
    if six[:12] == _MAPPED:
        return int.from_bytes(six[12:], "big")
    if six == _ANY6:
        return ANY
    if six == _LOOPBACK6:
        return LOOPBACK
    return None


def encode(family: int, ip: int, port: int, raw: bytes = b"") -> bytes:
    """`sockaddr` for a socket of this family; `raw` are the 16 bytes to show instead of a mapped address."""
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack(">HI", port, ip) + bytes(8)
    six = raw or _MAPPED + ip.to_bytes(4, "big")
    return struct.pack("=H", family) + struct.pack(">HI", port, 0) + six + bytes(4)
