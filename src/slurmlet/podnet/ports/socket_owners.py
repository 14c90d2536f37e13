"""Whose a socket of this host is, as /proc/net says: for ports that somebody holds, and for clients on loopback.

Reads only. Numbers of users are as this process's user namespace sees them, which is what os.getuid() speaks too.
"""

from __future__ import annotations

import os
from typing import Iterator, NamedTuple, Optional

_LISTEN = "0A"
_MAPPED = "0000000000000000FFFF0000"


class Entry(NamedTuple):
    local: str
    remote: str
    state: str
    uid: int


def owner_of(udp: bool, port: int) -> str:
    """ "ours", "another's", or "" when nobody has the port (any more)."""
    found = ""
    for entry in _entries("udp" if udp else "tcp"):
        if int(entry.local.rpartition(":")[2], 16) != port or (not udp and entry.state != _LISTEN):
            continue
        if entry.uid != os.getuid():
            return "another's"
        found = "ours"
    return found


def client_uid(host: str, port: int, server_port: int) -> Optional[int]:
    """The user at the other end of a TCP connection to our `server_port` on the same host; None when it is gone."""
    local, remote = f"{_hex(host)}:{port:04X}", f"{_hex(host)}:{server_port:04X}"
    wanted = {(local, remote), (_MAPPED + local, _MAPPED + remote)}
    for entry in _entries("tcp"):
        if (entry.local, entry.remote) in wanted:
            return entry.uid
    return None


def _hex(host: str) -> str:
    """As the kernel prints it: the four bytes in the order of the machine."""
    import socket
    import sys

    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}"


def _entries(name: str) -> Iterator[Entry]:
    for path in (f"/proc/net/{name}", f"/proc/net/{name}6"):
        try:
            with open(path, encoding="ascii") as file:
                next(file, "")
                for line in file:
                    words = line.split()
                    yield Entry(words[1], words[2], words[3], int(words[7]))
        except OSError:
            # A host without IPv6 has no such file.
            continue
