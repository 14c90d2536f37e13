"""The fast path with real programs under the real filter: what they see must be what the kernel of a pod would show."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.podnet import addresses

from .substituted import World, compiled, needs_notifications, world

__all__ = ["compiled", "world"]
pytestmark = needs_notifications
ONE, TWO = "10.244.0.1", "10.244.0.2"


def listener(port: int = 80, family: int = socket.AF_INET, host: str = "") -> socket.socket:
    made = socket.socket(family)
    made.bind((host, port))
    made.listen()
    return made


def serve(count: int = 1, port: int = 80) -> Callable[[], Any]:
    """Accept so many connections, answer each with the name it came from."""

    def program() -> Any:
        seen = []
        with listener(port) as server:
            for _ in range(count):
                connection, peer = server.accept()
                with connection:
                    seen.append([list(peer), list(connection.getsockname()), list(connection.getpeername())])
                    connection.sendall(b"hello")
        return seen

    return program


def errno_of(act: Callable[[], Any]) -> int:
    try:
        act()
    except OSError as error:
        return error.errno or -1
    return 0


def dial(host: str, port: int = 80) -> Callable[[], Any]:
    def program() -> Any:
        with socket.socket() as client:
            code = errno_of(lambda: client.connect((host, port)))
            if code:
                return code
            return [list(client.getsockname()), list(client.getpeername()), client.recv(5).decode()]

    return program


class TestConnections:
    def test_both_ends_see_pod_addresses(self, world: World) -> None:
        server, client = world.one.serve(serve()), world.two.start(dial(ONE))
        [[peer, local, again]], (mine, theirs, said) = world.finish(server, client)
        assert peer == again == mine
        assert mine[0] == TWO
        assert local == theirs == [ONE, 80]
        assert said == "hello"

    def test_a_service_is_its_backend_but_keeps_its_name(self, world: World) -> None:
        world.push(
            services={"10.96.0.10 tcp 8080": {"to": [[ONE, 80, "node"]], "affinity_s": 0, "local": False}}
        )
        _, (_, theirs, said) = world.finish(
            world.one.serve(serve()), world.two.start(dial("10.96.0.10", 8080))
        )
        assert (theirs, said) == (["10.96.0.10", 8080], "hello")

    @pytest.mark.parametrize(
        ("host", "port", "code"),
        [
            (ONE, 81, errno.ECONNREFUSED),
            (TWO, 81, errno.ECONNREFUSED),
            ("127.0.0.1", 81, errno.ECONNREFUSED),
            ("10.96.0.11", 80, errno.ECONNREFUSED),
            ("10.96.7.7", 80, errno.ECONNREFUSED),
            ("10.244.7.7", 80, errno.EHOSTUNREACH),
        ],
    )
    def test_nobody_there(self, world: World, host: str, port: int, code: int) -> None:
        world.push(services={"10.96.0.11 tcp 80": {"to": [], "affinity_s": 0, "local": False}})
        assert world.two.run(dial(host, port)) == code

    def test_without_blocking(self, world: World) -> None:
        def client() -> Any:
            with socket.socket() as made, select.epoll() as epoll:
                made.setblocking(False)
                epoll.register(made, select.EPOLLOUT)
                first = made.connect_ex((ONE, 80))
                assert epoll.poll(5)
                codes = [first, made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)]
                codes += [made.connect_ex((ONE, 80)), made.connect_ex((ONE, 80))]
                made.setblocking(True)
                return [codes, made.getpeername()[0], made.recv(5).decode()]

        _, (codes, peer, said) = world.finish(world.one.serve(serve()), world.two.start(client))
        assert codes == [errno.EINPROGRESS, 0, 0, errno.EISCONN]
        assert (peer, said) == (ONE, "hello")

    def test_the_port_that_a_client_bound_is_the_one_the_server_sees(self, world: World) -> None:
        def client() -> Any:
            with socket.socket() as made:
                made.bind((TWO, 1023))
                made.connect((ONE, 80))
                return made.getsockname()[1]

        [[peer, _, _]], port = world.finish(world.one.serve(serve()), world.two.start(client))
        assert (peer, port) == ([TWO, 1023], 1023)

    def test_the_data_path_is_the_kernels(self, world: World) -> None:
        ready, go = os.pipe(), os.pipe()

        def server() -> Any:
            with listener() as made:
                connection, _ = made.accept()
                with connection:
                    while data := connection.recv(4096):
                        connection.sendall(data)

        def client() -> Any:
            with socket.socket() as made:
                made.connect((ONE, 80))
                # An answer shows that the server has its connection, with all calls for it behind it.
                made.sendall(b"x")
                made.recv(1)
                os.write(ready[1], b"1")
                os.read(go[0], 1)
                for _ in range(500):
                    made.sendall(b"x" * 100)
                    got = 0
                    while got < 100:
                        got += len(made.recv(100))

        programs = [world.one.serve(server), world.two.start(client)]
        world.until(lambda: bool(select.select([ready[0]], [], [], 0)[0]))
        counted = ("socket", "connect", "accept", "getsockname", "getpeername", "not ours", "bind", "listen")

        def calls() -> int:
            return sum(pod.supervisor.counts[name] for pod in (world.one, world.two) for name in counted)

        before = calls()
        os.write(go[1], b"1")
        world.finish(*programs)
        assert calls() == before
        for fd in (*ready, *go):
            os.close(fd)

    def test_names_follow_every_descriptor_of_a_socket(self, world: World) -> None:
        def client() -> Any:
            made = socket.create_connection((ONE, 80))
            names = [made.getpeername()[0], made.dup().getpeername()[0]]
            ours, theirs = socket.socketpair()
            ours.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [made.fileno()]))])
            _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
            names.append(socket.socket(fileno=fds[0]).getpeername()[0])
            reader, writer = os.pipe()
            if os.fork() == 0:
                os.write(writer, made.getpeername()[0].encode())
                os._exit(0)
            names.append(os.read(reader, 100).decode())
            os.wait()
            return names

        _, names = world.finish(world.one.serve(serve()), world.two.start(client))
        assert names == [ONE] * 4

    def test_a_blocking_connect_is_patient_only_as_long_as_it_was_told(self, world: World) -> None:
        world.push(policy={"ingress": None, "egress": []})

        def client() -> Any:
            with socket.socket() as made:
                made.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDTIMEO, b"\0" * 8 + (200_000).to_bytes(8, "little")
                )
                return errno_of(lambda: made.connect((ONE, 80)))

        assert world.two.run(client) == errno.EINPROGRESS

    def test_what_a_policy_denies_hangs(self, world: World) -> None:
        world.push(policy={"ingress": None, "egress": []})

        def client() -> Any:
            with socket.socket() as made:
                made.setblocking(False)
                first = made.connect_ex((ONE, 80))
                return [first, bool(select.select([], [made], [], 0.3)[1]), made.connect_ex((ONE, 80))]

        assert world.two.run(client) == [errno.EINPROGRESS, False, errno.EALREADY]

    def test_the_world_outside_is_dialled_as_it_is_but_not_the_hosts_loopback(self, world: World) -> None:
        with socket.create_server(("127.0.0.1", 0)) as outside:
            port = outside.getsockname()[1]
            assert world.two.run(dial("127.0.0.1", port)) == errno.ECONNREFUSED
            assert world.two.run(dial("0.0.0.0", port)) == errno.ECONNREFUSED


class TestIPv6Sockets:
    def test_a_dual_stack_listener_serves_both(self, world: World) -> None:
        def server() -> Any:
            names = []
            with listener(family=socket.AF_INET6, host="::") as made:
                for target in ("::1", "::ffff:127.0.0.1", f"::ffff:{ONE}"):
                    with socket.socket(socket.AF_INET6) as client:
                        client.connect((target, 80))
                        connection, peer = made.accept()
                        names.append([client.getpeername()[0], peer[0], connection.getsockname()[0]])
                        connection.close()
                with socket.create_connection(("127.0.0.1", 80)) as client:
                    names.append([client.getpeername()[0], made.accept()[1][0]])
            return names

        assert world.one.run(server) == [
            ["::1", "::1", "::1"],
            ["::ffff:127.0.0.1"] * 3,
            [f"::ffff:{ONE}"] * 3,
            ["127.0.0.1", "::ffff:127.0.0.1"],
        ]

    def test_other_pods_reach_a_dual_stack_listener(self, world: World) -> None:
        def server() -> Any:
            with listener(family=socket.AF_INET6, host="::") as made:
                connection, peer = made.accept()
                connection.sendall(b"hello")
                return peer[0]

        peer, (_, _, said) = world.finish(world.one.serve(server), world.two.start(dial(ONE)))
        assert (peer, said) == (f"::ffff:{TWO}", "hello")

    def test_one_for_each_family_on_one_port(self, world: World) -> None:
        def server() -> Any:
            six = socket.socket(socket.AF_INET6)
            six.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            six.bind(("::", 80))
            six.listen()
            four = listener()
            socket.create_connection(("::1", 80))
            socket.create_connection(("127.0.0.1", 80))
            return [six.accept()[1][0], four.accept()[1][0]]

        assert world.one.run(server) == ["::1", "127.0.0.1"]
        assert world.one.published[0].keys() == {80}


class TestAccepting:
    def test_a_stranger_is_reset_and_the_server_never_sees_it(self, world: World) -> None:
        server = world.one.serve(serve())
        stranger = socket.create_connection(("127.0.1.1", world.one.published[-1][80]))
        world.until(lambda: bool(world.one.supervisor.counts["strangers"]))
        with pytest.raises(ConnectionResetError):
            stranger.recv(1)
        stranger.close()
        [[peer, _, _]], _ = world.finish(server, world.two.start(dial(ONE)))
        assert peer[0] == TWO

    def test_a_policy_keeps_others_out(self, world: World) -> None:
        world.one.tables.apply({"policy": {"ingress": [], "egress": None}})
        server = world.one.serve(serve())
        assert world.two.run(lambda: errno_of(lambda: socket.create_connection((ONE, 80), 0.3))) == -1
        server.kill()

    def test_a_policy_keeps_out_those_who_know_the_way(self, world: World) -> None:
        world.one.tables.apply({"policy": {"ingress": [], "egress": None}})
        server = world.one.serve(serve())
        where = {ONE: ["127.0.1.1", world.one.overlay.port, {"80": world.one.published[-1][80]}]}
        world.two.tables.apply({"pods": where})
        assert (
            world.two.run(lambda: errno_of(lambda: socket.create_connection((ONE, 80)).recv(1)))
            == errno.ECONNRESET
        )
        assert world.one.supervisor.counts["refused in"] == 1
        server.kill()

    def test_an_announcement_that_was_lost_is_asked_for_and_wakes_the_server(self, world: World) -> None:
        def server() -> Any:
            with listener() as made, select.epoll() as epoll:
                made.setblocking(False)
                epoll.register(made, select.EPOLLIN | select.EPOLLET)
                empty = 0
                while True:
                    assert epoll.poll(5)
                    try:
                        _, peer = made.accept()
                    except BlockingIOError:
                        empty += 1
                        continue
                    assert errno_of(made.accept) == errno.EAGAIN
                    return [empty, peer[0]]

        announce, world.two.overlay.announce = world.two.overlay.announce, lambda *_: None  # type: ignore[method-assign]
        running = world.one.serve(server)
        client = world.two.start(lambda: bool(socket.create_connection((ONE, 80))))
        world.until(lambda: world.two.supervisor.counts["connects pod"] == 1)
        world.two.overlay.announce = announce  # type: ignore[method-assign]
        assert world.finish(running, client) == [[1, TWO], True]

    def test_threads_that_wait_each_get_one(self, world: World) -> None:
        def server() -> Any:
            made, seen = listener(), []
            threads = [threading.Thread(target=lambda: seen.append(made.accept()[1][0])) for _ in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return seen

        def client() -> Any:
            return [socket.create_connection((ONE, 80)).fileno() > 0 for _ in range(5)]

        running = world.one.serve(server)
        world.until(lambda: world.one.supervisor.counts["accept"] == 5)
        assert world.finish(running, world.two.start(client))[0] == [TWO] * 5

    def test_a_signal_interrupts_and_the_next_call_works(self, world: World) -> None:
        class Interrupted(Exception):
            pass

        def handler(_number: int, _frame: Any) -> None:
            raise Interrupted

        def server() -> Any:
            signal.signal(signal.SIGALRM, handler)
            made = listener()
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            try:
                made.accept()
            except Interrupted:
                return made.accept()[1][0]
            return "not interrupted"

        running = world.one.serve(server)
        world.until(lambda: world.one.supervisor.counts["accept"] == 2)
        client = world.two.start(lambda: bool(socket.create_connection((ONE, 80))))
        assert world.finish(running, client) == [TWO, True]

    def test_a_server_without_room_for_a_descriptor_gets_the_connection_later(self, world: World) -> None:
        def server() -> Any:
            made = listener()
            _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            selecting = select.poll()
            selecting.register(made, select.POLLIN)
            selecting.poll()
            resource.setrlimit(resource.RLIMIT_NOFILE, (made.fileno() + 1, hard))
            full = errno_of(made.accept)
            resource.setrlimit(resource.RLIMIT_NOFILE, (made.fileno() + 50, hard))
            return [full, made.accept()[1][0]]

        running = world.one.serve(server)
        assert world.finish(running, world.two.start(lambda: bool(socket.create_connection((ONE, 80)))))[
            0
        ] == [
            errno.EMFILE,
            TWO,
        ]

    def test_flags_are_the_programs_own(self, world: World) -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def server() -> Any:
            def flags(fd: int) -> list[bool]:
                return [
                    bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK),
                    bool(fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC),
                ]

            plain = libc.socket(socket.AF_INET, socket.SOCK_STREAM, 0)
            both = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
            other = libc.socket(socket.AF_INET, socket.SOCK_STREAM | both, 0)
            made = listener()
            clients = [socket.create_connection(("127.0.0.1", 80)) for _ in range(2)]
            accepted = [
                libc.accept4(made.fileno(), None, None, 0),
                libc.accept4(made.fileno(), None, None, both),
            ]
            assert clients
            return [flags(fd) for fd in (plain, other, *accepted)]

        off, on = [False, False], [True, True]
        assert world.one.run(server) == [off, on, off, on]


class TestNames:
    def test_no_more_is_written_than_there_is_room_for(self, world: World) -> None:
        libc = ctypes.CDLL(None, use_errno=True)

        def program() -> Any:
            made = listener()
            room, size = ctypes.create_string_buffer(b"\xff" * 32, 32), ctypes.c_uint(4)
            assert libc.getsockname(made.fileno(), room, ctypes.byref(size)) == 0
            bad = libc.getsockname(made.fileno(), ctypes.c_void_p(8), ctypes.byref(size)), ctypes.get_errno()
            return [room.raw[:6].hex(), size.value, list(bad)]

        assert world.one.run(program) == ["02000050ffff", 16, [-1, errno.EFAULT]]

    def test_what_is_no_tcp_socket_is_the_kernels_business(self, world: World) -> None:
        def program() -> Any:
            with Path("/dev/null").open() as null, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
                udp.bind(("0.0.0.0", 5353))
                ours, _ = socket.socketpair()
                return [
                    errno_of(lambda: socket.socket(fileno=os.dup(null.fileno())).getsockname()),
                    udp.getsockname()[1],
                    ours.getpeername(),
                    errno_of(lambda: ctypes_getsockname(99999)),
                ]

        def ctypes_getsockname(fd: int) -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.getsockname(fd, None, None):
                raise OSError(ctypes.get_errno(), "getsockname")

        assert world.one.run(program) == [errno.ENOTSOCK, 5353, "", errno.EBADF]

    def test_a_socket_that_is_not_connected_has_no_peer(self, world: World) -> None:
        assert world.one.run(lambda: errno_of(socket.socket().getpeername)) == errno.ENOTCONN


class TestNetd:
    def test_dials_as_whoever_it_is_told(self, world: World) -> None:
        server = world.one.serve(serve(2))
        made: list[Any] = []
        target = addresses.number(ONE)
        for supervisor in (world.one.supervisor, world.two.supervisor):
            supervisor.dial(
                target, 80, addresses.number("192.0.2.7"), lambda sock, code: made.append((sock, code))
            )
        seen = world.finish(server)[0]
        assert [peer[0] for peer, _, _ in seen] == ["192.0.2.7"] * 2
        for sock, code in made:
            assert code == 0
            sock.close()

    def test_dialling_a_closed_port_is_refused(self, world: World) -> None:
        codes: list[int] = []
        for pod in (ONE, TWO):
            world.one.supervisor.dial(addresses.number(pod), 81, 1, lambda _, code: codes.append(code))
        world.until(lambda: len(codes) == 2)
        assert codes == [errno.ECONNREFUSED] * 2

    def test_the_next_one_goes_on_where_one_was_killed(self, world: World) -> None:
        go = os.pipe()

        def server() -> Any:
            made = listener()
            connection, _ = made.accept()
            os.read(go[0], 1)
            return [connection.getpeername()[0], made.accept()[1][0], made.getsockname()[1]]

        def client() -> Any:
            with socket.create_connection((ONE, 80)) as made:
                made.settimeout(10)
                return errno_of(lambda: made.recv(1))

        running, first = world.one.serve(server), world.two.start(client)
        world.until(lambda: world.one.supervisor.counts["accepted"] == 1)
        world.loop.run_until(lambda: False, 0.1)
        os.write(go[1], b"1")
        world.until(lambda: world.one.supervisor.counts["accept"] == 2)
        host_port = world.one.published[-1][80]
        world.one.die()
        world.one.begin()
        world.push()
        world.one.adopt(running)
        assert world.one.published[-1] == {80: host_port}
        assert world.finish(running, first, world.two.start(client))[0] == [TWO, TWO, 80]
        for fd in go:
            os.close(fd)

    def test_survives_a_call_it_cannot_serve(self, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        def broken(*_: Any) -> None:
            raise OSError(errno.EMFILE, "too many")

        world.one.supervisor._ports.claim = broken  # type: ignore[method-assign,assignment]
        assert world.one.run(lambda: errno_of(lambda: socket.socket().bind(("", 80)))) == errno.EMFILE
        assert (
            world.one.run(lambda: errno_of(lambda: socket.create_connection((ONE, 80)))) == errno.ECONNREFUSED
        )
        assert "too many" in capsys.readouterr().err

    def test_closed_sockets_are_forgotten(self, world: World) -> None:
        def client() -> Any:
            for _ in range(200):
                socket.create_connection((ONE, 80)).close()

        for pod in (world.one, world.two):
            pod.supervisor._table._sweep_at = 50
        import slurmlet.podnet.fast.socket_names as module

        least, module._MIN_SWEEP = module._MIN_SWEEP, 50
        try:
            world.finish(world.one.serve(serve(200)), world.two.start(client))
        finally:
            module._MIN_SWEEP = least
        assert max(len(pod.supervisor._table) for pod in (world.one, world.two)) <= 110
