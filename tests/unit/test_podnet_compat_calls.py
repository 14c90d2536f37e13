"""32-bit calls on sockets: those of the host are netd's to give and to connect, however a program came by them."""

from __future__ import annotations

import array
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests import i386

from .substituted import World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
pytestmark = [needs_notifications, pytest.mark.skipif(bool(i386.missing()), reason=i386.missing())]
ONE, TWO = "10.244.0.1", "10.244.0.2"
Calls = dict[str, Any]


@pytest.fixture
def private() -> Iterator[socket.socket]:
    """A server on the host's loopback that is nobody's business."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def knocked(server: socket.socket) -> bool:
    return bool(select.select([server], [], [], 0.1)[0])


WAYS: dict[str, Callable[[Calls, int, int], int]] = {
    "connect": lambda c, fd, port: c["call"](c["CONNECT"], fd, c["address"]("127.0.0.1", port), 16),
    "socketcall connect": lambda c, fd, port: c["socketcall"](3, fd, c["address"]("127.0.0.1", port), 16),
    "sendto": lambda c, fd, port: c["call"](
        *(c["SENDTO"], fd, c["put"](b"x"), 1, c["FASTOPEN"], c["address"]("127.0.0.1", port))
    ),
    "socketcall sendto": lambda c, fd, port: c["socketcall"](
        *(11, fd, c["put"](b"x"), 1, c["FASTOPEN"], c["address"]("127.0.0.1", port), 16)
    ),
    "socketcall setsockopt": lambda c, fd, _port: c["socketcall"](14, fd, 6, 30, c["put"](b"\1\0\0\0"), 4),
    "bind": lambda c, fd, _port: c["call"](c["BIND"], fd, c["address"]("127.0.0.1", 0), 16),
    "socketcall bind": lambda c, fd, _port: c["socketcall"](2, fd, c["address"]("127.0.0.1", 0), 16),
    "listen": lambda c, fd, _port: c["call"](c["LISTEN"], fd, 5),
    "socketcall listen": lambda c, fd, _port: c["socketcall"](4, fd, 5),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passed", [False, True], ids=["own", "passed in"])
def test_a_socket_of_the_host_is_not_theirs(
    world: World, private: socket.socket, way: str, passed: bool
) -> None:
    port = private.getsockname()[1]

    def program() -> Any:
        made = socket.socket()
        if passed:
            ours, theirs = socket.socketpair()
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made.fileno()]))
            ours.sendmsg([b"x"], [rights])
            _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
            made = socket.socket(fileno=fds[0])
        return WAYS[way](i386.load(), made.fileno(), port)

    assert world.two.run(program) == -errno.EOPNOTSUPP
    assert not knocked(private)
    assert world.two.supervisor.counts["compat refused"] == (way != "sendto")


def test_nor_are_connections_that_nobody_announced(world: World) -> None:
    ready, go = os.pipe(), os.pipe()

    def program() -> Any:
        calls = i386.load()
        with socket.socket() as server:
            server.bind(("", 80))
            server.listen()
            os.write(ready[1], b"x")
            os.read(go[0], 1)
            fd = server.fileno()
            taken = [calls["call"](calls["ACCEPT4"], fd, 0, 0, 0)]
            taken += [calls["socketcall"](5, fd, 0, 0), calls["socketcall"](18, fd, 0, 0, 0)]
            return taken

    server = world.one.serve(program)
    world.until(lambda: bool(select.select([ready[0]], [], [], 0)[0]))
    with socket.create_connection(("127.0.1.1", world.one.published[-1][80])):
        os.write(go[1], b"x")
        assert world.finish(server) == [[-errno.EOPNOTSUPP] * 3]
    for fd in (*ready, *go):
        os.close(fd)


def test_a_connection_that_was_made_can_be_used(world: World) -> None:
    def server() -> Any:
        with socket.socket() as made:
            made.bind(("", 80))
            made.listen()
            connection, _ = made.accept()
            said = b""
            while len(said) < 3:
                said += connection.recv(10)
            return said.decode()

    def client() -> Any:
        calls = i386.load()
        with socket.create_connection((ONE, 80)) as made:
            fd = made.fileno()
            codes = [calls["call"](calls["SENDTO"], fd, calls["put"](b"a"), 1, 0)]
            codes.append(calls["socketcall"](11, fd, calls["put"](b"b"), 1, 0, 0, 0))
            codes.append(calls["socketcall"](9, fd, calls["put"](b"c"), 1, 0))
            codes.append(calls["socketcall"](14, fd, 6, socket.TCP_NODELAY, calls["put"](b"\1\0\0\0"), 4))
            return codes

    assert world.finish(world.one.serve(server), world.two.start(client)) == ["abc", [1, 1, 1, 0]]


def test_sockets_of_the_pods_own_namespace_are_the_kernels_business(world: World) -> None:
    """They go the slow path. This pod's namespace has no device that is up, and so says its kernel."""

    def program() -> Any:
        calls = i386.load()
        call, socketcall = calls["call"], calls["socketcall"]
        own = [call(calls["SOCKET"], socket.AF_INET, socket.SOCK_STREAM, 0)]
        own.append(socketcall(1, socket.AF_INET, socket.SOCK_STREAM, 0))
        anywhere, there = calls["address"]("0.0.0.0", 0), calls["address"](ONE, 80)
        codes = [call(calls["BIND"], own[0], anywhere, 16), call(calls["LISTEN"], own[0], 5)]
        codes += [socketcall(2, own[1], anywhere, 16), socketcall(3, own[1], there, 16)]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            codes.append(call(calls["BIND"], udp.fileno(), anywhere, 16))
        return [min(own) >= 0, codes]

    assert world.two.run(program) == [True, [0, 0, 0, -errno.ENETUNREACH, 0]]


def test_mistakes_are_answered_as_the_kernel_would(world: World) -> None:
    def program() -> Any:
        calls = i386.load()
        return [
            calls["call"](calls["CONNECT"], 999, calls["address"](ONE, 80), 16),
            calls["call"](calls["SOCKETCALL"], 3, 8),
            calls["call"](calls["IO_URING_SETUP"], 8, calls["put"](bytes(120))),
        ]

    assert world.two.run(program) == [-errno.EBADF, -errno.EFAULT, -errno.ENOSYS]
