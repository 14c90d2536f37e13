"""netfast in netd's place: what it answers itself, what it leaves, and that nobody can tell which of both it was."""

from __future__ import annotations

import errno
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.podnet import addresses
from slurmlet.podnet.fast.native import native_library
from slurmlet.upstream import netfast_build

from .substituted import World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
ONE, TWO, SERVICE = "10.244.0.1", "10.244.0.2", "10.96.0.10"
REPEATED = 40


def publish(world: World, **message: Any) -> None:
    """Tell both pods where listeners are, as the hub does: only then is a connect() the library's."""
    pods = {
        pod.ip: [
            addresses.text(pod.setup.host_ip),
            pod.overlay.port,
            pod.published[-1] if pod.published else {},
        ]
        for pod in (world.one, world.two)
    }
    for pod in (world.one, world.two):
        pod.tables.apply({"pods": {**pods, **message.get("pods", {})}, **{**message, "pods": pods}})


def echo_names(
    count: int, port: int = 80, family: int = socket.AF_INET, backlog: int = 128
) -> Callable[[], Any]:
    """Accept so many; tell each by which name it came."""

    def program() -> Any:
        names = []
        with socket.socket(family) as server:
            server.bind(("", port))
            server.listen(backlog)
            for _ in range(count):
                connection, peer = server.accept()
                with connection:
                    assert connection.getpeername() == peer
                    names.append(list(peer[:2]))
                    connection.sendall(f"{peer[1]:5}".encode())
        return names

    return program


def dial(count: int, host: str = ONE, port: int = 80, family: int = socket.AF_INET) -> Callable[[], Any]:
    def program() -> Any:
        names = []
        for _ in range(count):
            with socket.socket(family) as client:
                client.connect((host, port))
                names.append([client.getpeername()[0], client.getsockname()[1] - int(client.recv(5))])
        return names

    return program


def service(*backends: tuple[str, int], affinity_s: int = 0) -> dict[str, Any]:
    to = [[ip, port, "node"] for ip, port in backends]
    return {f"{SERVICE} tcp 8080": {"to": to, "affinity_s": affinity_s, "local": False}}


@needs_notifications
class TestConnections:
    def test_both_ends_see_pod_addresses(self, world: World) -> None:
        server = world.one.serve(echo_names(REPEATED))
        publish(world)
        seen, told = world.finish(server, world.two.start(dial(REPEATED)))
        assert {ip for ip, _ in seen} == {TWO}
        assert told == [[ONE, 0]] * REPEATED
        assert world.two.supervisor.counts["asked"] == 0
        assert world.two.supervisor.counts["connects pod"] == REPEATED
        assert world.one.supervisor.counts["accepted"] == REPEATED

    def test_mapped_addresses(self, world: World) -> None:
        server = world.one.serve(echo_names(3, family=socket.AF_INET6))
        publish(world)
        seen, told = world.finish(server, world.two.start(dial(3, f"::ffff:{ONE}", family=socket.AF_INET6)))
        assert {ip for ip, _ in seen} == {f"::ffff:{TWO}"}
        assert told == [[f"::ffff:{ONE}", 0]] * 3

    @pytest.mark.parametrize("affinity_s", [0, 60])
    def test_a_service_keeps_its_name(self, world: World, affinity_s: int) -> None:
        server = world.one.serve(echo_names(3))
        publish(world, services=service((ONE, 80), affinity_s=affinity_s))
        assert world.finish(server, world.two.start(dial(3, SERVICE, 8080)))[1] == [[SERVICE, 0]] * 3

    def test_backends_are_used_in_turn_whoever_serves_them(self, world: World) -> None:
        """The second one is in no table and has to be asked for; the third is the pod itself."""
        servers = [world.one.serve(echo_names(10)), world.one.serve(echo_names(10, 81))]
        servers.append(world.two.serve(echo_names(10, 82)))
        publish(world, services=service((ONE, 80), (ONE, 81), (TWO, 82)))
        host_port = world.one.published[-1][80]
        for pod in (world.one, world.two):
            pod.tables.apply({"pods": {ONE: ["127.0.1.1", world.one.overlay.port, {"80": host_port}]}})
        seen = world.finish(world.two.start(dial(30, SERVICE, 8080)), *servers)
        assert [len(names) for names in seen[1:]] == [10, 10, 10]

    def test_a_table_that_is_old(self, world: World) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.1.1", 0))
            server = world.one.serve(echo_names(1))
            where = {ONE: ["127.0.1.1", world.one.overlay.port, {"80": taken.getsockname()[1], "81": 1}]}
            world.two.tables.apply({"pods": where})
            assert world.finish(server, world.two.start(dial(1)))[1] == [[ONE, 0]]
        code = world.two.run(lambda: socket.socket().connect_ex((ONE, 81)))
        assert code == errno.ECONNREFUSED
        assert world.two.supervisor.counts["asked"] == 2

    def test_a_pod_that_went(self, world: World) -> None:
        server = world.one.serve(echo_names(1))
        publish(world)
        world.two.tables.apply({"pods": {ONE: None}})
        assert world.two.run(lambda: socket.socket().connect_ex((ONE, 80))) == errno.EHOSTUNREACH
        server.kill()

    def test_a_policy(self, world: World) -> None:
        server = world.one.serve(echo_names(1))
        publish(world, policy={"ingress": None, "egress": []})

        def client() -> Any:
            with socket.socket() as made:
                made.settimeout(0.3)
                return made.connect_ex((ONE, 80))

        assert world.two.run(client) == errno.EAGAIN
        publish(world, policy={"ingress": None, "egress": None})
        assert world.finish(server, world.two.start(dial(1)))[1] == [[ONE, 0]]

    def test_a_handshake_that_takes_its_time(self, world: World) -> None:
        """A queue that is full answers no SYN: the kernel sends it again after a second."""
        go = os.pipe()

        def server() -> Any:
            with socket.socket() as made:
                made.bind(("", 80))
                made.listen(0)
                os.read(go[0], 1)
                return [made.accept()[1][0] for _ in range(3)]

        def client() -> Any:
            made = [socket.socket() for _ in range(3)]
            threads = [threading.Thread(target=each.connect, args=((ONE, 80),)) for each in made]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return [each.getpeername()[0] for each in made]

        running = world.one.serve(server)
        publish(world)
        dialling = world.two.start(client)
        world.until(lambda: world.two.supervisor.counts["connect"] == 3)
        os.write(go[1], b"1")
        assert world.finish(running, dialling) == [[TWO] * 3, [ONE] * 3]
        for fd in go:
            os.close(fd)

    def test_a_second_connect_while_the_first_is_under_way(self, world: World) -> None:
        def server() -> Any:
            with socket.socket() as made:
                made.bind(("", 80))
                made.listen(0)
                time.sleep(2)

        def client() -> Any:
            fillers = [socket.socket() for _ in range(2)]
            for each in fillers:
                each.setblocking(False)
                each.connect_ex((ONE, 80))
            with socket.socket() as made:
                codes: list[int] = []
                begun = threading.Event()

                def first() -> None:
                    begun.set()
                    codes.append(made.connect_ex((ONE, 80)))

                other = threading.Thread(target=first, daemon=True)
                other.start()
                begun.wait()
                time.sleep(0.3)
                made.setblocking(False)
                codes.append(made.connect_ex((ONE, 80)))
                other.join()
                return codes

        running = world.one.serve(server)
        publish(world)
        codes, _ = world.finish(world.two.start(client), running)
        assert errno.EALREADY in codes


@needs_notifications
class TestAnnouncements:
    def test_one_that_was_lost_is_asked_for(self, world: World) -> None:
        server = world.one.serve(echo_names(1))
        publish(world)
        host_port = world.one.published[-1][80]
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
            nobody.bind(("127.0.1.1", 0))
            where = ["127.0.1.1", nobody.getsockname()[1], {"80": host_port}]
            world.two.tables.apply({"pods": {ONE: where}})
            assert world.finish(server, world.two.start(dial(1)))[1] == [[ONE, 0]]
        assert world.one.supervisor.counts["announced late"] == 1

    @pytest.mark.parametrize("host", ["127.0.0.1", ONE])
    def test_one_source_port_to_several_listeners(self, world: World, host: str) -> None:
        """Kernels give it again where the destination differs: each client must come to whom it called, as itself."""

        def program() -> Any:
            shared = 0
            listening = {port: socket.create_server(("", port)) for port in range(8000, 8020)}
            for turn in range(5):
                clients = {}
                for port in listening:
                    client = clients[port] = socket.socket()
                    client.settimeout(10)
                    first = 40000 + 16 * turn
                    # IP_LOCAL_PORT_RANGE: five ports for twenty clients.
                    client.setsockopt(
                        socket.IPPROTO_IP, 51, (first | (first + 4) << 16).to_bytes(4, sys.byteorder)
                    )
                    client.connect((host, port))
                shared += len(clients) - len({client.getsockname() for client in clients.values()})
                for port, client in clients.items():
                    accepted, peer = listening[port].accept()
                    assert peer == client.getsockname(), (port, peer)
                    accepted.close()
                    client.close()
            return shared

        assert world.one.run(program) >= 5 * 15

    def test_without_the_key_nobody_comes_in(self, world: World) -> None:
        server = world.one.serve(echo_names(1))
        with socket.create_connection(("127.0.1.1", world.one.published[-1][80])) as stranger:
            ip, port = stranger.getsockname()
            body = b"\x02" + (time.time_ns() // 1_000_000).to_bytes(8, "big")
            body += socket.inet_aton(TWO) + port.to_bytes(2, "big") + socket.inet_aton(ONE) + b"\0\x50"
            body += port.to_bytes(2, "big") + bytes(16)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forged:
                forged.bind((ip, 0))
                forged.sendto(body, ("127.0.1.1", world.one.overlay.port))
            world.until(lambda: bool(world.one.supervisor.counts["strangers"]))
            with pytest.raises(ConnectionResetError):
                stranger.recv(1)
        server.kill()


@needs_notifications
class TestStress:
    def test_threads_forks_and_signals(self, world: World) -> None:
        """Calls are interrupted and made again all the time; every connection must have both its right names."""
        processes, threads, each = 3, 3, 15
        total = processes * threads * each

        def restless() -> None:
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.siginterrupt(signal.SIGALRM, False)
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)

        def in_threads(count: int, work: Callable[[], None]) -> None:
            running = [threading.Thread(target=work) for _ in range(count)]
            for thread in running:
                thread.start()
            for thread in running:
                thread.join()

        def server() -> Any:
            restless()
            seen: list[str] = []
            with socket.socket() as made:
                made.bind(("", 80))
                made.listen(256)

                def work() -> None:
                    for _ in range(total // 3):
                        connection, peer = made.accept()
                        with connection:
                            connection.sendall(f"{peer[1]:5}".encode())
                        seen.append(peer[0])

                in_threads(3, work)
            return [len(seen), sorted(set(seen))]

        def client() -> Any:
            wrong = os.pipe()

            def work() -> None:
                for _ in range(each):
                    with socket.socket() as made:
                        made.connect((ONE, 80))
                        if int(made.recv(5)) != made.getsockname()[1] or made.getpeername() != (ONE, 80):
                            os.write(wrong[1], b"w")

            children = []
            for _ in range(processes):
                pid = os.fork()
                if pid == 0:
                    try:
                        restless()
                        in_threads(threads, work)
                        os._exit(0)
                    finally:
                        os._exit(1)
                children.append(pid)
            codes = [os.waitpid(pid, 0)[1] for pid in children]
            return [codes, bool(select.select([wrong[0]], [], [], 0)[0])]

        running = world.one.serve(server)
        publish(world)
        seen, (codes, wrong) = world.finish(running, world.two.start(client))
        assert seen == [total, [TWO]]
        assert (codes, wrong) == ([0] * processes, False)

    def test_a_netd_that_is_killed_while_threads_wait_in_accept(self, world: World) -> None:
        def server() -> Any:
            seen: list[str] = []
            with socket.socket() as made:
                made.bind(("", 80))
                made.listen()
                waiting = [
                    threading.Thread(target=lambda: seen.append(made.accept()[1][0])) for _ in range(4)
                ]
                for thread in waiting:
                    thread.start()
                for thread in waiting:
                    thread.join()
            return seen

        running = world.one.serve(server)
        world.until(lambda: world.one.supervisor.counts["accept"] == 4)
        world.one.die()
        world.one.begin()
        world.one.adopt(running)
        publish(world)
        client = world.two.start(lambda: [bool(socket.create_connection((ONE, 80))) for _ in range(4)])
        assert world.finish(running, client) == [[TWO] * 4, [True] * 4]

    def test_nothing_stays_open(self, world: World) -> None:
        def fds() -> int:
            return len(list(Path("/proc/self/fd").iterdir()))

        server = world.one.serve(echo_names(2 * REPEATED))
        publish(world)
        world.finish(world.two.start(dial(REPEATED)))
        before = fds()
        world.finish(world.two.start(dial(REPEATED)), server)
        world.loop.run_until(lambda: False, 0.6)
        assert fds() <= before


class TestLibrary:
    def test_somebody_elses_file_is_not_loaded(self, compiled: Any, tmp_path: Path, monkeypatch: Any) -> None:
        if isinstance(compiled, str):
            pytest.skip(compiled)
        made = tmp_path / native_library.NAME
        made.write_bytes(Path(compiled._name).read_bytes())
        made.chmod(0o700)
        assert native_library.load(str(tmp_path)) is not None
        made.chmod(0o720)
        assert native_library.load(str(tmp_path)) is None
        made.chmod(0o700)
        monkeypatch.setenv(native_library.OFF, "1")
        assert native_library.load(str(tmp_path)) is None
        monkeypatch.delenv(native_library.OFF)
        # Elsewhere: a name that is loaded is not looked at again.
        broken = tmp_path / "broken" / native_library.NAME
        broken.parent.mkdir()
        broken.write_bytes(b"not a library")
        assert native_library.load(str(broken.parent)) is None

    def test_a_host_without_a_compiler_is_told_so_and_keeps_no_old_one(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        monkeypatch.setenv("SLURMLET_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("PATH", str(tmp_path))
        old = tmp_path / native_library.NAME
        old.write_bytes(b"old")
        assert "compiler" in netfast_build.write_library(tmp_path)
        assert not old.exists()

    def test_a_compiler_that_fails_is_no_reason_to_fail(self, tmp_path: Path, monkeypatch: Any) -> None:
        broken = tmp_path / "cc"
        broken.write_text("#!/bin/sh\necho no headers here >&2\nexit 1\n")
        broken.chmod(0o700)
        monkeypatch.setenv("SLURMLET_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
        assert "no headers here" in netfast_build.write_library(tmp_path)
        assert list((tmp_path / "cache" / "native").iterdir()) == []
