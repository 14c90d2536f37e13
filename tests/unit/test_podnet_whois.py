"""Strangers at the host port behind a pod's listener: by the port of a connection that a pod had, or is about to have."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.podnet import addresses
from slurmlet.podnet.overlay_socket import Announcement
from slurmlet.podnet.tables import Peer

from .substituted import World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
pytestmark = needs_notifications
ONE, TWO = "10.244.0.1", "10.244.0.2"
HOST_OF_ONE, HOST_OF_TWO = "127.0.1.1", "127.0.1.2"
RESET = struct.pack("ii", 1, 0)


def publish(world: World) -> int:
    """Tell the client's netd where port 80 is, as the hub does; the port of the host."""
    host_port = world.one.published[-1][80]
    world.two.tables.apply({"pods": {ONE: [HOST_OF_ONE, world.one.overlay.port, {"80": host_port}]}})
    return host_port


def serve(count: int) -> Callable[[], Any]:
    """Accept so many; what each said, and the name it came by."""

    def program() -> Any:
        seen = []
        with socket.socket() as server:
            server.bind(("", 80))
            server.listen()
            for _ in range(count):
                connection, peer = server.accept()
                with connection:
                    seen.append([peer[0], connection.recv(100).decode()])
                    connection.sendall(b"served")
        return seen

    return program


def visit(said: bytes = b"pod") -> Any:
    """A connection that is over without a trace in the kernel; the port it had."""
    with socket.create_connection((ONE, 80)) as client:
        port = client.getsockname()[1]
        client.sendall(said)
        client.recv(6)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    return port


def stranger(port: int, host_port: int, host: str = HOST_OF_ONE) -> socket.socket:
    """No program of any pod, on the host of pod two."""
    made = socket.socket()
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((HOST_OF_TWO, port))
        made.connect((host, host_port))
        made.sendall(b"stranger")
    except OSError:
        made.close()
        raise
    return made


def successor(world: World, host_port: int) -> socket.socket:
    """A stranger with the port of a pod's connection; the next one's where another program of this machine has it."""
    while True:
        port = world.two.run(visit)
        try:
            return stranger(port, host_port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise


def is_reset(world: World, made: socket.socket) -> bool:
    made.setblocking(False)
    world.until(lambda: bool(select.select([made], [], [], 0)[0]))
    with made:
        try:
            return made.recv(6) == b""
        except ConnectionResetError:
            return True


def spoken_of(world: World) -> Any:
    """What pod two's netd says when it is asked for a connection."""
    return world.two.overlay.on_whois


def test_the_port_of_a_pods_connection_is_worth_nothing_after_its_end(world: World) -> None:
    server = world.one.serve(serve(100))
    assert is_reset(world, successor(world, publish(world)))
    assert world.one.supervisor.counts["strangers"] == 1
    before = world.one.supervisor.counts["accepted"]
    world.two.run(visit)
    assert world.one.supervisor.counts["accepted"] == before + 1
    server.kill()


def test_only_the_connection_that_is_asked_for_is_told_of(world: World) -> None:
    told, leave = os.pipe(), os.pipe()

    def client() -> Any:
        made = socket.create_connection((ONE, 80))
        os.write(told[1], f"{made.getsockname()[1]:5}".encode())
        os.read(leave[0], 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        made.close()

    server = world.one.serve(serve(1))
    host_port = publish(world)
    running = world.two.start(client)
    world.until(lambda: bool(select.select([told[0]], [], [], 0)[0]))
    port = int(os.read(told[0], 5))
    one, two = addresses.number(HOST_OF_ONE), addresses.number(HOST_OF_TWO)
    assert spoken_of(world)(port, one, host_port) == [
        Announcement(addresses.number(TWO), port, addresses.number(ONE), 80)
    ]
    for other in ((port, one, host_port + 1), (port, two, host_port), (port + 1, one, host_port)):
        assert spoken_of(world)(*other) == []
    os.write(leave[1], b"x")
    world.finish(running)
    assert spoken_of(world)(port, one, host_port) == []
    server.kill()
    for fd in (*told, *leave):
        os.close(fd)


def test_a_connection_that_its_program_has_closed_is_still_the_pods(world: World) -> None:
    """It waits in a backlog while its client is gone already, and its announcement was lost."""
    accept = os.pipe()

    def slow() -> Any:
        with socket.socket() as server:
            server.bind(("", 80))
            server.listen()
            os.read(accept[0], 1)
            connection, peer = server.accept()
            return [peer[0], connection.recv(100).decode()]

    def client() -> Any:
        with socket.create_connection((ONE, 80)) as made:
            made.sendall(b"pod")

    server = world.one.serve(slow)
    publish(world)
    running = world.two.start(client)
    world.finish(running)
    world.one.overlay.drain()
    port = _source_port(world)
    assert world.one.overlay.claim(addresses.number(HOST_OF_TWO), port, 80) is not None
    os.write(accept[1], b"x")
    assert world.finish(server) == [[TWO, "pod"]]
    for fd in accept:
        os.close(fd)


def _source_port(world: World) -> int:
    """Of the one connection to pod one's listener."""
    wanted = (_hex(HOST_OF_ONE), f"{world.one.published[-1][80]:04X}")
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    found = [words[1] for words in lines if tuple(words[2].split(":")) == wanted]
    return int(found[0].split(":")[1], 16)


def _hex(host: str) -> str:
    return socket.inet_aton(host)[::-1].hex().upper()


@pytest.mark.parametrize("accepted", [True, False])
def test_what_a_stranger_left_behind_is_not_the_next_pods(world: World, accepted: bool) -> None:
    """Sent and reset, then a pod gets the same port and is announced: whether netd had taken the first, or not yet."""
    accept = os.pipe()

    def patient() -> Any:
        with socket.socket() as server:
            server.bind(("", 80))
            server.listen()
            os.read(accept[0], 1)
            connection, peer = server.accept()
            return [peer[0], connection.recv(100).decode()]

    server = world.one.serve(patient)
    host_port = publish(world)
    if accepted:
        os.write(accept[1], b"x")
    left = stranger(0, host_port)
    port = left.getsockname()[1]
    if accepted:
        world.until(lambda: world.one.supervisor.counts["announced late"] == 1)
    left.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    left.close()
    _announce(world, port)
    if not accepted:
        os.write(accept[1], b"x")
    world.loop.run_until(lambda: server.done, 0.1)
    assert not server.done, server.result
    running = world.two.start(visit)
    world.finish(server)
    assert server.result == [TWO, "pod"]
    running.kill()
    for fd in accept:
        os.close(fd)


def _announce(world: World, port: int) -> None:
    peer = Peer(addresses.number(HOST_OF_ONE), world.one.overlay.port, {})
    what = Announcement(addresses.number(TWO), port, addresses.number(ONE), 80)
    world.two.overlay.announce(peer, port, what)


def test_a_client_that_comes_again_from_the_same_port_ends_nothing(world: World) -> None:
    server = world.one.serve(serve(1))
    host_port = publish(world)
    port = 0
    for _ in range(3):
        made = stranger(port, host_port)
        port = made.getsockname()[1]
        world.loop.run_until(lambda: False, 0.05)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        made.close()
    world.loop.run_until(lambda: False, 1.2)
    world.two.run(visit)
    assert world.finish(server) == [[[TWO, "pod"]]]


def test_an_announcement_that_came_twice_is_there_once(world: World) -> None:
    """Late, and in answer to the question for it: the second must not wait for a stranger."""
    server = world.one.serve(serve(1))
    host_port = publish(world)
    made = stranger(0, host_port)
    port = made.getsockname()[1]
    world.until(lambda: world.one.supervisor.counts["announced late"] == 1)
    for _ in range(2):
        _announce(world, port)
    world.finish(server)
    world.loop.run_until(lambda: False, 0.7)
    assert world.one.overlay.claim(addresses.number(HOST_OF_TWO), port, 80) is None
    made.close()


def test_nobody_is_led_to_a_listener_on_the_pods_loopback(world: World) -> None:
    """It is a port of the host's loopback, and the announcement is that of a connection to another listener."""

    def program() -> Any:
        with socket.socket() as outside, socket.socket() as inside:
            outside.bind((ONE, 80))
            inside.bind(("127.0.0.1", 80))
            inside.listen()
            outside.listen()
            return inside.accept()[1][0]

    server = world.one.serve(program)
    ports = world.one.supervisor._ports
    inside = next(claim.host_port for claim in ports.listening() if claim.place == "inside")
    made = stranger(0, inside, "127.0.0.1")
    _announce(world, made.getsockname()[1])
    assert is_reset(world, made)
    world.loop.run_until(lambda: server.done, 0.2)
    assert not server.done, server.result
    assert world.one.supervisor.counts["refused in"] == 1
    server.kill()
