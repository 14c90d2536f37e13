"""A program on the host's network that reaches pods and Services, and is left alone in all else."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux import syscalls
from slurmlet.podnet import addresses
from slurmlet.podnet.fast import seccomp_filter
from slurmlet.podnet.fast.host_client import HostSupervisor
from slurmlet.podnet.overlay_datagrams import open_socket
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.tables import Tables
from tests.unit.substituted import Program, World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
pytestmark = needs_notifications
# Hosts are loopback addresses here, which no pod would believe: what is shown of this one is another.
HOST, SHOWN, SERVICE, POD = "127.0.1.9", "192.0.2.9", "10.96.0.7", "10.244.0.1"


class OnHost:
    """Beside the two pods of a world; its netd is known to theirs by an address that nobody is shown."""

    def __init__(self, world: World, directory: Path) -> None:
        self.world = world
        self.setup = world.one.setup._replace(ip=addresses.number(SHOWN), host_ip=addresses.number(HOST))
        self.socket = open_socket(self.setup.host_ip)
        self.tables = Tables(self.setup)
        self.overlay = Overlay(world.loop, self.setup, self.tables, self.socket)
        self.supervisor = HostSupervisor(
            world.loop, self.setup, self.tables, self.overlay, str(directory / "journal")
        )
        services = {f"{SERVICE} tcp 8080": {"to": [[POD, 80, "node"]]}}
        world.push(services=services, pods=self._where())
        self.tables.apply({"services": services, "pods": self._where()})

    def _where(self) -> dict[str, Any]:
        pods = (self.world.one, self.world.two)
        where = {pod.ip: [addresses.text(pod.setup.host_ip), pod.overlay.port, {}] for pod in pods}
        return {**where, "10.244.0.99": [HOST, self.overlay.port, {}]}

    def run(self, function: Callable[[], Any]) -> Any:
        program = Program(self, function, _enter_host)
        self.world.programs.append(program)
        return self.world.finish(program)[0]

    def close(self) -> None:
        self.world.loop.forget(self.socket.fileno())
        self.supervisor.close()
        self.socket.close()


def _enter_host() -> int:
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    syscalls._check(syscalls._libc().prctl(4, 1, 0, 0, 0), "prctl")
    return seccomp_filter.install(from_host=True)


@pytest.fixture
def host(world: World, tmp_path: Path) -> Iterator[OnHost]:
    made = OnHost(world, tmp_path)
    yield made
    made.close()


def serve() -> list[Any]:
    with socket.create_server(("", 80)) as server:
        connection, peer = server.accept()
        with connection:
            connection.sendall(b"hello")
        return list(peer[:1])


@pytest.mark.parametrize("to", [(POD, 80), (SERVICE, 8080)])
def test_it_reaches_a_pod_and_sees_whom_it_called(world: World, host: OnHost, to: tuple[str, int]) -> None:
    def client() -> Any:
        with socket.create_connection(to, 5) as made:
            return [made.recv(10).decode(), list(made.getpeername()), made.getsockname()[0]]

    serving = world.one.serve(serve)
    said, peer, own = host.run(client)
    assert (said, peer) == ("hello", list(to))
    assert (own, world.finish(serving)[0]) == (HOST, [SHOWN])


def test_nobody_listens_and_nobody_is_there(host: OnHost) -> None:
    def client() -> Any:
        found = []
        for to in ((POD, 81), (SERVICE, 1)):
            with socket.socket() as made:
                found.append(os.strerror(made.connect_ex(to)))
        return found

    assert host.run(client) == ["Connection refused"] * 2


def test_all_else_is_the_kernels(host: OnHost) -> None:
    """Its listeners are ports of the host, loopback is the host's, and a socket may be used again for another place."""

    def program() -> Any:
        with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as made:
            refused = made.connect_ex((POD, 81))
            made.connect(server.getsockname())
            accepted, peer = server.accept()
            with accepted:
                names = [made.getpeername() == server.getsockname(), peer == made.getsockname()]
            left, right = socket.socketpair()
            with left, right:
                return [os.strerror(refused), *names, right.getpeername()]

    assert host.run(program) == ["Connection refused", True, True, ""]
    assert host.supervisor.counts["connect"] == 1
    assert host.supervisor.listeners == {}
