"""The four route-netlink requests that make a pod's network usable: links up, an address, the default route.

There is no `ip` program to rely on, and starting one four times would take longer than all of this.
"""

from __future__ import annotations

import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


_NEWLINK, _NEWADDR, _NEWROUTE = 16, 20, 24
_REQUEST, _ACK, _EXCL, _CREATE = 1, 4, 0x200, 0x400
_ERROR = 2
_IFF_UP = 1
_IFLA_MTU, _IFLA_TXQLEN = 4, 13
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_RTA_OIF, _RTA_PREFSRC = 4, 7
_RT_TABLE_MAIN, _RTPROT_STATIC, _RT_SCOPE_LINK, _RTN_UNICAST = 254, 4, 253, 1
_HEAD = struct.Struct("=IHHII")


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + bytes(-len(value) % 4)


class RouteSocket:
    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def __enter__(self) -> RouteSocket:
        return self

    def __exit__(self, *_about: Any) -> None:
        self._socket.close()

    def set_link(self, index: int, *, up: bool, mtu: int = 0, queue_packets: int = 0) -> None:
        body = struct.pack("=BxHiII", 0, 0, index, _IFF_UP if up else 0, _IFF_UP)
        if mtu:
            body += _attribute(_IFLA_MTU, struct.pack("=I", mtu))
        if queue_packets:
            body += _attribute(_IFLA_TXQLEN, struct.pack("=I", queue_packets))
        self._ask(_NEWLINK, 0, body)

    def add_address(self, index: int, ip: int, prefix: int) -> None:
        raw = ip.to_bytes(4, "big")
        body = struct.pack("=BBBBi", socket.AF_INET, prefix, 0, 0, index)
        self._ask(
            _NEWADDR, _CREATE | _EXCL, body + _attribute(_IFA_LOCAL, raw) + _attribute(_IFA_ADDRESS, raw)
        )

    def add_default(self, index: int, source: int) -> None:
        body = struct.pack(
            "=BBBBBBBBI",
            socket.AF_INET,
            0,
            0,
            0,
            _RT_TABLE_MAIN,
            _RTPROT_STATIC,
            _RT_SCOPE_LINK,
            _RTN_UNICAST,
            0,
        )
        body += _attribute(_RTA_OIF, struct.pack("=i", index))
        body += _attribute(_RTA_PREFSRC, source.to_bytes(4, "big"))
        self._ask(_NEWROUTE, _CREATE | _EXCL, body)

    def _ask(self, kind: int, flags: int, body: bytes) -> None:
        self._socket.send(_HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | _ACK | flags, 1, 0) + body)
        answer = self._socket.recv(65536)
        said, code = struct.unpack_from("=H", answer, 4)[0], struct.unpack_from("=i", answer, _HEAD.size)[0]
        if said != _ERROR or code != 0:
            raise OSError(-code, f"netlink request {kind}: {os.strerror(-code)}")
