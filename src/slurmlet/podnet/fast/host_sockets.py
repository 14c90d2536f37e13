"""Sockets of the host's network namespace as numbers: the system calls netd makes on copies of a program's sockets.

Python's socket objects ask the kernel several questions when they are made from a descriptor, and raise for every
errno; on a path that each connection of a pod takes, both are too much. Here a call is one call, an errno a number.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import select
import socket
import struct
from typing import List, Optional, Tuple

from slurmlet.podnet import addresses

_SO_COOKIE, _SO_NETNS_COOKIE, _SO_PROTOCOL, _SO_DOMAIN = 57, 71, 38, 39
_IPV6_V6ONLY, _IP_BIND_ADDRESS_NO_PORT = 26, 24
_ADDRESS_BYTES = 28
_port_and_ip = struct.Struct(">2xHI").unpack_from
_ip = struct.Struct(">I").unpack_from
_seconds = struct.Struct("@ll")
_RESET = struct.pack("=ii", 1, 0)


class HostSockets:
    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        pointer, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint
        self._getsockopt = libc.getsockopt
        self._getsockopt.argtypes = [number, number, number, pointer, pointer]
        self._connect, self._bind = libc.connect, libc.bind
        self._connect.argtypes = self._bind.argtypes = [number, ctypes.c_char_p, size]
        self._listen = libc.listen
        self._listen.argtypes = [number, number]
        self._accept4 = libc.accept4
        self._accept4.argtypes = [number, pointer, pointer, number]
        self._getsockname, self._getpeername = libc.getsockname, libc.getpeername
        self._getsockname.argtypes = self._getpeername.argtypes = [number, pointer, pointer]
        self._address = bytearray(_ADDRESS_BYTES)
        self._size = ctypes.c_uint(_ADDRESS_BYTES)
        self._long, self._long_size = ctypes.c_uint64(), ctypes.c_uint(8)
        self._int, self._int_size = ctypes.c_int(), ctypes.c_uint(4)
        self._address_at = ctypes.addressof(ctypes.c_char.from_buffer(self._address))
        self._size_at = ctypes.addressof(self._size)
        self._long_at, self._long_size_at = ctypes.addressof(self._long), ctypes.addressof(self._long_size)
        self._int_at, self._int_size_at = ctypes.addressof(self._int), ctypes.addressof(self._int_size)
        self._time = bytearray(_seconds.size)
        self._time_size = ctypes.c_uint(_seconds.size)
        self._time_at = ctypes.addressof(ctypes.c_char.from_buffer(self._time))
        self._time_size_at = ctypes.addressof(self._time_size)
        self._poll = select.poll()
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as own:
            self._namespace = self._number(own.fileno(), _SO_NETNS_COOKIE)

    # What a socket is.

    def cookie(self, fd: int) -> int:
        """The kernel's name of a socket, the same for all its descriptors and never given again; 0: not a socket."""
        if self._getsockopt(fd, socket.SOL_SOCKET, _SO_COOKIE, self._long_at, self._long_size_at):
            return 0
        return self._long.value

    def _number(self, fd: int, option: int) -> int:
        failed = self._getsockopt(fd, socket.SOL_SOCKET, option, self._long_at, self._long_size_at)
        return -1 if failed else self._long.value

    def option(self, fd: int, level: int, name: int) -> int:
        """-1 where there is no such option."""
        failed = self._getsockopt(fd, level, name, self._int_at, self._int_size_at)
        return -1 if failed else self._int.value

    def set_option(self, fd: int, level: int, name: int, value: int) -> None:
        with _borrowed(fd) as sock:
            sock.setsockopt(level, name, value)

    def tcp_family(self, fd: int) -> int:
        """AF_INET or AF_INET6 for a TCP socket of the host's namespace, else 0."""
        if self.option(fd, socket.SOL_SOCKET, _SO_PROTOCOL) != socket.IPPROTO_TCP:
            return 0
        if self._number(fd, _SO_NETNS_COOKIE) != self._namespace:
            return 0
        family = self.option(fd, socket.SOL_SOCKET, _SO_DOMAIN)
        return family if family in (socket.AF_INET, socket.AF_INET6) else 0

    def is_host_stream(self, fd: int) -> bool:
        """Whether it is an IP socket of the host's namespace with connections, TCP or any other."""
        return (
            self.option(fd, socket.SOL_SOCKET, _SO_DOMAIN) in (socket.AF_INET, socket.AF_INET6)
            and self.option(fd, socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
            and self._number(fd, _SO_NETNS_COOKIE) == self._namespace
        )

    def only_six(self, fd: int) -> bool:
        return self.option(fd, socket.IPPROTO_IPV6, _IPV6_V6ONLY) == 1

    def patience_s(self, fd: int, option: int) -> Optional[float]:
        """SO_RCVTIMEO or SO_SNDTIMEO; None: for ever."""
        self._getsockopt(fd, socket.SOL_SOCKET, option, self._time_at, self._time_size_at)
        seconds, micros = _seconds.unpack(self._time)
        return seconds + micros / 1e6 or None

    # What is done with it; 0 or an errno.

    def connect(self, fd: int, address: bytes) -> int:
        return ctypes.get_errno() if self._connect(fd, address, len(address)) else 0

    def connect_at_once(self, fd: int, address: bytes) -> Tuple[int, bool]:
        """connect() that never waits, and whether the program's own would have."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_NONBLOCK:
            return self.connect(fd, address), False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        try:
            return self.connect(fd, address), True
        finally:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)

    def bind(self, fd: int, address: bytes) -> int:
        return ctypes.get_errno() if self._bind(fd, address, len(address)) else 0

    def bind_address(self, fd: int, address: bytes) -> int:
        """An address now, a port with connect(): so that ports are shared between connections to different places."""
        self.set_option(fd, socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
        return self.bind(fd, address)

    def listen(self, fd: int, backlog: int) -> int:
        return ctypes.get_errno() if self._listen(fd, backlog) else 0

    def accept(self, fd: int, flags: int) -> Tuple[int, int, int]:
        """(descriptor or minus an errno, peer's IPv4 number, peer's port). May wait: ask ready() first."""
        self._size.value = _ADDRESS_BYTES
        made = self._accept4(fd, self._address_at, self._size_at, flags)
        if made < 0:
            return -ctypes.get_errno(), 0, 0
        ip, port = self._decoded()
        return made, ip, port

    def ready(self, fd: int, events: int) -> bool:
        self._poll.register(fd, events)
        try:
            return bool(self._poll.poll(0))
        finally:
            self._poll.unregister(fd)

    # Names: (IPv4 number, port); 0 where an IPv6 address has no IPv4 meaning.

    def name(self, fd: int) -> Tuple[int, int]:
        self._size.value = _ADDRESS_BYTES
        return (0, 0) if self._getsockname(fd, self._address_at, self._size_at) else self._decoded()

    def peer(self, fd: int) -> Tuple[int, int]:
        self._size.value = _ADDRESS_BYTES
        return (0, 0) if self._getpeername(fd, self._address_at, self._size_at) else self._decoded()

    def raw_name(self, fd: int) -> bytes:
        self._size.value = _ADDRESS_BYTES
        return (
            b""
            if self._getsockname(fd, self._address_at, self._size_at)
            else bytes(self._address[: self._size.value])
        )

    def raw_peer(self, fd: int) -> bytes:
        """Empty for a socket that is not connected."""
        self._size.value = _ADDRESS_BYTES
        return (
            b""
            if self._getpeername(fd, self._address_at, self._size_at)
            else bytes(self._address[: self._size.value])
        )

    def _decoded(self) -> Tuple[int, int]:
        port, ip = _port_and_ip(self._address)
        if self._size.value == _ADDRESS_BYTES:
            decoded = addresses.decode(bytes(self._address))
            ip = (decoded.ip or 0) if decoded is not None else 0
        return ip, port


class BlackHole:
    """An address of the host at which a connection neither comes about nor fails: a listener whose queue is full."""

    def __init__(self) -> None:
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(0)
        self._fillers: List[socket.socket] = []
        for _ in range(2):
            filler = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            filler.connect_ex(self._listener.getsockname())
            self._fillers.append(filler)

    def close(self) -> None:
        for each in (self._listener, *self._fillers):
            each.close()

    def address(self, family: int) -> bytes:
        return addresses.encode(family, addresses.LOOPBACK, self._listener.getsockname()[1])


class _Borrowed:
    """A socket object for a descriptor that stays somebody else's."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=fd)

    def __enter__(self) -> socket.socket:
        return self._socket

    def __exit__(self, *_: object) -> None:
        self._socket.detach()


def _borrowed(fd: int) -> _Borrowed:
    return _Borrowed(fd)


def reset(fd: int) -> None:
    """Close a connection so that its other end sees a reset."""
    with _borrowed(fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    os.close(fd)
