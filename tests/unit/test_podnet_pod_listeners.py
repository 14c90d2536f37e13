"""Ports of a pod: the kernel's rules of bind() and listen(), and the host's ports behind them."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable
from typing import Any

import pytest

from .substituted import World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
pytestmark = needs_notifications
ONE = "10.244.0.1"
ANY4, LOCAL4, POD = (socket.AF_INET, ""), (socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ONE)
OTHER_LOCAL4, ANY6, LOCAL6 = (socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::"), (socket.AF_INET6, "::1")
ONLY6 = (socket.AF_INET6, "only ::")


def bound(where: tuple[int, str], port: int = 80, *options: int) -> socket.socket:
    family, host = where
    made = socket.socket(family)
    for option in options:
        made.setsockopt(socket.SOL_SOCKET, option, 1)
    if host.startswith("only "):
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind((host.removeprefix("only "), port))
    return made


def code_of(act: Callable[[], Any]) -> int:
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0


class TestBind:
    @pytest.mark.parametrize(
        ("first", "second", "free"),
        [
            (ANY4, ANY4, False),
            (ANY4, LOCAL4, False),
            (ANY4, POD, False),
            (LOCAL4, POD, True),
            (LOCAL4, OTHER_LOCAL4, True),
            (ANY6, ANY4, False),
            (ANY6, LOCAL6, False),
            (ONLY6, ANY4, True),
            (LOCAL6, LOCAL4, True),
            (ONLY6, LOCAL6, False),
        ],
    )
    def test_two_on_one_port(self, world: World, first: Any, second: Any, free: bool) -> None:
        def program() -> Any:
            one = bound(first)
            one.listen()
            return code_of(lambda: bound(second).listen())

        assert world.one.run(program) == (0 if free else errno.EADDRINUSE)

    def test_reuse_address_shares_a_port_until_somebody_listens(self, world: World) -> None:
        def program() -> Any:
            one, two = (bound(ANY4, 80, socket.SO_REUSEADDR) for _ in range(2))
            one.listen()
            third = code_of(lambda: bound(ANY4, 80, socket.SO_REUSEADDR))
            return [code_of(two.listen), third]

        assert world.one.run(program) == [errno.EADDRINUSE, errno.EADDRINUSE]

    @pytest.mark.parametrize("host", ["192.0.2.1", "10.244.0.2", "127.0.1.1x"])
    def test_an_address_that_is_not_the_pods(self, world: World, host: str) -> None:
        expected = 0 if host.endswith("x") else errno.EADDRNOTAVAIL
        assert world.one.run(lambda: code_of(lambda: bound((socket.AF_INET, host.rstrip("x"))))) == expected

    def test_bad_calls(self, world: World) -> None:
        def program() -> Any:
            made = bound(ANY4)
            return [code_of(lambda: made.bind(("", 81))), code_of(lambda: socket.socket().accept())]

        assert world.one.run(program) == [errno.EINVAL, errno.EINVAL]

    def test_port_0_gives_a_port_of_its_own(self, world: World) -> None:
        def program() -> Any:
            made = [bound(ANY4, 0) for _ in range(20)]
            ports = {each.getsockname()[1] for each in made}
            assert 0 not in ports
            return [len(ports), code_of(lambda: bound(ANY4, made[0].getsockname()[1]))]

        assert world.one.run(program) == [20, errno.EADDRINUSE]

    @pytest.mark.parametrize("listens", [True, False])
    def test_a_port_is_free_again_once_closed(self, world: World, listens: bool) -> None:
        def program() -> Any:
            made = bound(ANY4)
            if listens:
                made.listen()
            made.close()
            return code_of(lambda: bound(ANY4).listen())

        assert world.one.run(program) == 0


class TestListen:
    def test_without_bind_it_takes_a_port(self, world: World) -> None:
        def program() -> Any:
            with socket.socket() as made:
                made.listen()
                port = made.getsockname()[1]
                with socket.create_connection(("127.0.0.1", port)):
                    return [port, made.accept()[1][0]]

        port, peer = world.one.run(program)
        assert (port > 0, peer) == (True, "127.0.0.1")

    def test_only_what_others_may_reach_is_published(self, world: World) -> None:
        def program() -> Any:
            made = [bound(ANY4, 80), bound(POD, 81), bound(LOCAL4, 82), bound(LOCAL6, 83), bound(ANY6, 84)]
            for each in made:
                each.listen()

        world.one.run(program)
        # They are gone by now, and that may have been noticed.
        most = max(world.one.published, key=len)
        assert sorted(most) == [80, 81, 84]
        assert min(most.values()) > 1023

    def test_a_listener_of_127_0_0_1_is_not_reached_by_the_pods_address(self, world: World) -> None:
        def program() -> Any:
            made = bound(LOCAL4)
            made.listen()
            return [
                code_of(lambda host=host: socket.create_connection((host, 80)).close())
                for host in ("127.0.0.1", "127.0.0.2", ONE)
            ]

        assert world.one.run(program) == [0, errno.ECONNREFUSED, errno.ECONNREFUSED]

    def test_one_that_closed_is_noticed_and_keeps_its_port_of_the_host(self, world: World) -> None:
        go = os.pipe()

        def program() -> Any:
            made = bound(ANY4)
            made.listen()
            made.close()
            os.read(go[0], 1)
            made = bound(ANY4)
            made.listen()
            os.read(go[0], 1)

        running = world.one.start(program)
        world.until(lambda: len(world.one.published) == 2)
        first = world.one.published[0]
        assert world.one.published[1] == {}
        # Nobody else can have it meanwhile.
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.1.1", first[80]))
        os.write(go[1], b"1")
        world.until(lambda: len(world.one.published) == 3)
        assert world.one.published[2] == first
        os.write(go[1], b"1")
        world.finish(running)
        for fd in go:
            os.close(fd)

    def test_reuse_port_spreads_over_one_port_of_the_host(self, world: World) -> None:
        def program() -> Any:
            made = [bound(ANY4, 80, socket.SO_REUSEPORT) for _ in range(2)]
            for each in made:
                each.listen()
                each.setblocking(False)
            clients = [socket.create_connection(("127.0.0.1", 80)) for _ in range(40)]
            counts = [0, 0]
            while sum(counts) < len(clients):
                select.select(made, [], [])
                for number, each in enumerate(made):
                    counts[number] += code_of(lambda each=each: each.accept()[0].close()) == 0
            return [len(clients), sum(counts), min(counts) > 0]

        assert world.one.run(program) == [40, 40, True]
        assert max(len(each) for each in world.one.published) == 1

    def test_the_backlog_is_the_programs(self, world: World) -> None:
        def program() -> Any:
            made = bound(ANY4)
            made.listen(0)
            made.listen(3)
            clients = []
            for _ in range(8):
                client = socket.socket()
                client.setblocking(False)
                client.connect_ex(("127.0.0.1", 80))
                clients.append(client)
            return len(select.select([], clients, [], 0.2)[1])

        assert world.one.run(program) == 4


class TestMirror:
    """What untrapped programs and `ss` see in the pod's own namespace; here that is the namespace of the test."""

    class Here:
        @staticmethod
        def tcp(family: int) -> socket.socket:
            return socket.socket(family, socket.SOCK_STREAM)

    def test_shows_the_listener_and_carries_those_who_come_to_it(self, world: World) -> None:
        world.one.die()
        world.one.pod_sockets = self.Here()
        world.one.begin()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]

        def program() -> Any:
            made = bound(LOCAL4, port)
            made.listen()
            connection, peer = made.accept()
            connection.sendall(b"hello")
            connection.close()
            return peer[0]

        running = world.one.start(program)
        world.until(lambda: world.one.supervisor.counts["accept"] == 1)
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert world.finish(running) == ["127.0.0.1"]
            client.setblocking(False)
            world.until(lambda: bool(select.select([client], [], [], 0)[0]))
            assert client.recv(5) == b"hello"
        # Both ends of the relay hear of it.
        world.loop.run_until(lambda: False, 0.2)
        world.one.supervisor._ports.check()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
