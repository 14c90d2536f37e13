"""Which of our sockets still exist, and which one a connection of this host belongs to. close() is not trapped, so somebody
has to ask the kernel now and then.

sock_diag tells of sockets that listen or are connected; one that is only bound is nowhere in the kernel's tables, and
has to be found among the descriptors of the pod's processes.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Iterator, Set

_NETLINK_SOCK_DIAG, _BY_FAMILY, _REQUEST, _DUMP = 4, 20, 0x1, 0x300
_DONE, _ERROR = 3, 2
LISTENING, SYN_SENT = 1 << 10, 1 << 2
# All but SYN_RECV (3, 12), TIME_WAIT (6) and CLOSE (7), which are no sockets, or not in the tables.
CONNECTED = sum(1 << state for state in (1, 2, 4, 5, 8, 9, 11))
_ALL_STATES = 0xFFF
_HEAD = struct.Struct("=IHHII")
_ANY_OF = struct.Struct("=BBBxI48x")
# Family, protocol, states; ports and addresses of both ends, as on the wire; any interface, any cookie.
_ONE = struct.Struct("=BBxxI4s4s12x4s12xIQ")
_NO_COOKIE = (1 << 64) - 1
_both_ports = struct.Struct(">HH").pack
_ip = struct.Struct(">I").pack
_COOKIE_AT, _INODE_AT = 16 + 44, 16 + 68
_cookie = struct.Struct("=Q").unpack_from
_word = struct.Struct("=I").unpack_from
_length = struct.Struct("=IH").unpack_from
_BUFFER_BYTES = 1 << 17
_TIMEOUT_S = 2.0


def living(states: int) -> Set[int]:
    """Cookies of this network namespace's TCP sockets in these states that a process holds."""
    found: Set[int] = set()
    with _opened() as sock:
        for family in (socket.AF_INET, socket.AF_INET6):
            _ask(sock, _ANY_OF.pack(family, socket.IPPROTO_TCP, 0, states), _REQUEST | _DUMP)
            found.update(_cookies(sock))
    return found


def connection(ip: int, port: int, peer_ip: int, peer_port: int) -> int:
    """The cookie of the socket that has this TCP connection of our network namespace now; 0: there is none.

    One that was closed keeps its cookie until the kernel has finished it (TIME_WAIT included), and until then nobody else
    can have the same connection.
    """
    ends = (_both_ports(port, peer_port), _ip(ip), _ip(peer_ip))
    body = _ONE.pack(socket.AF_INET, socket.IPPROTO_TCP, _ALL_STATES, *ends, 0, _NO_COOKIE)
    try:
        with _opened() as sock:
            _ask(sock, body, _REQUEST)
            data = sock.recv(_BUFFER_BYTES)
    except OSError:
        return 0
    return int(_cookie(data, _COOKIE_AT)[0]) if _length(data)[1] == _BY_FAMILY else 0


def _opened() -> socket.socket:
    sock = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
    sock.settimeout(_TIMEOUT_S)
    return sock


def _ask(sock: socket.socket, body: bytes, flags: int) -> None:
    sock.send(_HEAD.pack(_HEAD.size + len(body), _BY_FAMILY, flags, 1, 0) + body)


def _cookies(sock: socket.socket) -> Iterator[int]:
    while True:
        data = sock.recv(_BUFFER_BYTES)
        at, end = 0, len(data)
        while at + 16 <= end:
            size, kind = _length(data, at)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -struct.unpack_from("=i", data, at + 16)[0]
                raise OSError(number, f"sock_diag: {os.strerror(number)}")
            # inode 0: nobody holds it; the kernel only finishes it.
            if _word(data, at + _INODE_AT)[0]:
                yield _cookie(data, at + _COOKIE_AT)[0]
            at += (size + 3) & ~3


def held_sockets() -> Set[int]:
    """Inodes of all sockets of the processes we can see, our own left out."""
    found: Set[int] = set()
    own = str(os.getpid())
    for name in os.listdir("/proc"):
        if name.isdigit() and name != own:
            found.update(_sockets_of(f"/proc/{name}"))
    return found


def _sockets_of(process: str) -> Set[int]:
    found = _sockets_in(process + "/fd")
    if not found:
        # The first thread of a process may have ended before the others.
        try:
            threads = os.listdir(process + "/task")
        except OSError:
            return found
        for thread in threads if len(threads) > 1 else ():
            found |= _sockets_in(f"{process}/task/{thread}/fd")
    return found


def _sockets_in(directory: str) -> Set[int]:
    found: Set[int] = set()
    try:
        names = os.listdir(directory)
    except OSError:
        return found
    for name in names:
        try:
            target = os.readlink(f"{directory}/{name}")
        except OSError:
            # Closed in this moment.
            continue
        if target.startswith("socket:["):
            found.add(int(target[8:-1]))
    return found
