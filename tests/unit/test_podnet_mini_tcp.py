"""TCP of pods without the fast path: real kernels in the pods, netd's own TCP in between."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from slurmlet.podnet import addresses
from slurmlet.podnet.slow import packets, tcp_segments
from slurmlet.podnet.slow.mini_tcp import MiniTcp
from slurmlet.podnet.slow.tcp_endpoint import BUFFER_BYTES
from tests.unit.network_making import HOST, Cluster, Pod, making_cluster, wait

A, B, C = "10.244.0.7", "10.244.0.8", "10.244.0.9"
SERVICE = "10.96.0.10"
SYN = bytes.fromhex(
    "4500003c5ba740004006c9b90af400070a600001d48e01bb782b644d00000000a002ffa2187e0000"
    "0204ffa20402080adc4f917f000000000103030a"
)
MEGABYTE = 1 << 20
Socket = socket.socket


class Slow:
    """A pod, its netd's TCP, and programs that block as programs do, each in a thread."""

    def __init__(self, cluster: Cluster, ip: str, lose_every: int = 0) -> None:
        self.cluster, self.ip = cluster, ip
        self.pod: Pod = cluster.add(ip, real=True)
        if lose_every:
            self._lose(lose_every)
        pod = self.pod
        self.listeners: dict[int, int] = {}
        self.tcp = MiniTcp(
            cluster.loop, pod.setup, pod.tables, pod.overlay, pod.forwarder, self._listen, pod.sockets
        )
        pod.closing.append(self.close)

    def close(self) -> None:
        for end in list(self.tcp._ends.values()):
            end._events.over(False)
        for port in list(self.tcp._listeners._listeners):
            self.tcp._listeners.close(port)
        for held in self.tcp._listeners._held.values():
            held.made.close()

    def _listen(self, listeners: dict[int, int]) -> None:
        self.listeners = listeners

    def _lose(self, every: int) -> None:
        write, seen = self.pod.forwarder.write, [0]

        def losing(packet: packets.Bytes) -> None:
            seen[0] += 1
            if seen[0] % every:
                write(packet)

        self.pod.forwarder.write = losing  # type: ignore[method-assign]
        outgoing = self.pod.forwarder._outgoing

        def losing_out(packet: bytes) -> None:
            seen[0] += 1
            if seen[0] % every:
                outgoing(packet)

        self.pod.forwarder._outgoing = losing_out  # type: ignore[method-assign]

    def socket(self) -> Socket:
        made = self.pod.sockets.tcp(socket.AF_INET)
        made.settimeout(20)
        self.pod._open.append(made)
        return made

    def listen(self, port: int, ip: str = "") -> Socket:
        made = self.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((ip, port))
        made.listen(64)
        return made

    def connect(self, to: tuple[str, int]) -> Socket:
        made = self.socket()
        made.connect(to)
        return made


def doing(cluster: Cluster, *programs: Callable[[], Any]) -> list[Any]:
    """Run programs at the same time, each in a thread, while the loop turns; their results, or the first's error."""
    results: list[Any] = [None] * len(programs)

    def run(number: int, program: Callable[[], Any]) -> None:
        try:
            results[number] = program()
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(programs)]
    for thread in threads:
        thread.start()

    def ended() -> bool:
        cluster.loop.later(0.002, lambda: None)
        return not any(thread.is_alive() for thread in threads)

    assert cluster.loop.run_until(ended, 30), "a program hangs"
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def read_all(connection: socket.socket) -> bytes:
    received = bytearray()
    while chunk := connection.recv(256 << 10):
        received += chunk
    return bytes(received)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with making_cluster() as made:
        yield made


@pytest.fixture
def pods(cluster: Cluster) -> tuple[Slow, Slow]:
    return Slow(cluster, A), Slow(cluster, B)


def exchange(cluster: Cluster, client: Slow, to: tuple[str, int], listener: socket.socket, size: int) -> Any:
    """Send, half-close, get the digest back: (peer as the server saw it, own name, name of the server)."""
    payload = os.urandom(size)

    def serve() -> Any:
        connection, peer = listener.accept()
        with connection:
            connection.settimeout(20)
            connection.sendall(hashlib.sha256(read_all(connection)).digest() + payload)
        return peer

    def ask() -> Any:
        with client.connect(to) as connection:
            names = connection.getsockname(), connection.getpeername()
            connection.sendall(payload)
            connection.shutdown(socket.SHUT_WR)
            assert read_all(connection) == hashlib.sha256(payload).digest() + payload
        return names

    peer, (own, other) = doing(cluster, serve, ask)
    return peer, own, other


@pytest.mark.parametrize("size", [0, 1, 100_000, 8 * MEGABYTE])
def test_bytes_arrive_both_ways_and_ends_one_by_one(
    cluster: Cluster, pods: tuple[Slow, Slow], size: int
) -> None:
    peer, own, other = exchange(cluster, pods[0], (B, 80), pods[1].listen(80), size)
    assert peer == own == (A, own[1])
    assert other == (B, 80)
    cluster.settle(0.1)
    assert [pods[0].tcp._ends, pods[1].tcp._ends] == [{}, {}]


def test_a_service_is_its_own_address(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    cluster.tell(services={f"{SERVICE} tcp 80": {"to": [[B, 8080, "node"]]}})
    peer, own, other = exchange(cluster, pods[0], (SERVICE, 80), pods[1].listen(8080), 1000)
    assert peer == own
    assert other == (SERVICE, 80)


def test_a_service_whose_backend_is_its_client(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    cluster.tell(services={f"{SERVICE} tcp 80": {"to": [[A, 8080, "node"]]}})
    _, _, other = exchange(cluster, pods[0], (SERVICE, 80), pods[0].listen(8080), 100_000)
    assert other == (SERVICE, 80)


def test_lost_packets_are_sent_again(cluster: Cluster) -> None:
    pods = Slow(cluster, A, lose_every=23), Slow(cluster, B, lose_every=19)
    exchange(cluster, pods[0], (B, 80), pods[1].listen(80), MEGABYTE)
    cluster.settle(1.0)
    assert pods[0].tcp.counts["sent again"] + pods[1].tcp.counts["sent again"] > 0


def test_nobody_listens(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    cluster.tell(services={f"{SERVICE} tcp 80": {"to": []}})
    for to in ((B, 81), (SERVICE, 80), (SERVICE, 81)):
        with pytest.raises(ConnectionRefusedError):
            doing(cluster, partial(pods[0].connect, to))


def test_no_such_pod(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    with pytest.raises(OSError, match="No route to host"):
        doing(cluster, lambda: pods[0].connect((C, 80)))


def test_a_listener_that_is_gone_refuses_again(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    listener = pods[1].listen(80)
    exchange(cluster, pods[0], (B, 80), listener, 1)
    assert list(pods[1].listeners) == [80]
    know_listeners(pods[0], pods[1])
    listener.close()

    def ask() -> None:
        # The first finds the host's listener still open, and what is behind it gone.
        with pytest.raises(ConnectionError):
            pods[0].connect((B, 80)).recv(1)
        with pytest.raises(ConnectionRefusedError):
            pods[0].connect((B, 80))

    doing(cluster, ask)
    assert pods[1].listeners == {}


@pytest.mark.parametrize("who", ["server", "client"])
def test_a_reset_is_a_reset(cluster: Cluster, pods: tuple[Slow, Slow], who: str) -> None:
    listener = pods[1].listen(80)

    def end(connection: socket.socket, name: str) -> None:
        connection.settimeout(20)
        if name == who:
            connection.recv(1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        else:
            connection.send(b"x")
            with pytest.raises(ConnectionResetError):
                connection.recv(1)
            connection.close()

    doing(
        cluster,
        lambda: end(listener.accept()[0], "server"),
        lambda: end(pods[0].connect((B, 80)), "client"),
    )
    cluster.settle()
    assert [pods[0].tcp._ends, pods[1].tcp._ends] == [{}, {}]


def test_a_server_that_does_not_read_stops_its_client(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    listener = pods[1].listen(80)
    payload = os.urandom(12 * MEGABYTE)
    go = threading.Event()

    def serve() -> bytes:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(20)
            go.wait(20)
            return hashlib.sha256(read_all(connection)).digest()

    def ask() -> None:
        with pods[0].connect((B, 80)) as connection:
            connection.settimeout(0.5)
            at = 0
            with pytest.raises(TimeoutError):
                while at < len(payload):
                    at += connection.send(payload[at : at + MEGABYTE])
            held = [len(end._buffer) for pod in pods for end in pod.tcp._ends.values()]
            assert max(held) <= BUFFER_BYTES
            go.set()
            connection.settimeout(20)
            connection.sendall(payload[at:])

    digest, _ = doing(cluster, serve, ask)
    assert digest == hashlib.sha256(payload).digest()


def test_a_denied_connection_hangs_as_if_dropped(cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
    pods[1].listen(80)
    pods[0].pod.tables.apply({"policy": {"ingress": None, "egress": []}})

    def ask() -> None:
        client = pods[0].socket()
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.connect((B, 80))

    doing(cluster, ask)
    assert pods[0].tcp.counts["denied out"] >= 1


def know_listeners(client: Slow, server: Slow) -> None:
    """As the hub pushes them."""
    ports = {str(port): at for port, at in server.listeners.items()}
    client.pod.tables.apply({"pods": {server.ip: [HOST, server.pod.overlay.port, ports]}})


class TestStrangers:
    def open_door(self, cluster: Cluster, pods: tuple[Slow, Slow]) -> int:
        exchange(cluster, pods[0], (B, 80), pods[1].listen(80), 1)
        return pods[1].listeners[80]

    def test_who_is_not_announced_is_reset(self, cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
        port = self.open_door(cluster, pods)

        def knock() -> None:
            with socket.create_connection((HOST, port), 5) as stranger:
                stranger.settimeout(10)
                with pytest.raises(ConnectionResetError):
                    stranger.recv(1)

        doing(cluster, knock)
        assert pods[1].tcp.counts["strangers"] == 1

    def test_who_asks_in_vain_waits_as_if_dropped(self, cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
        self.open_door(cluster, pods)
        pods[1].pod.tables.apply({"policy": {"ingress": [], "egress": None}})

        def ask() -> None:
            client = pods[0].socket()
            client.settimeout(0.3)
            with pytest.raises(TimeoutError):
                client.connect((B, 80))

        doing(cluster, ask)

    def test_policy_is_asked_for_who_is_announced(self, cluster: Cluster, pods: tuple[Slow, Slow]) -> None:
        self.open_door(cluster, pods)
        know_listeners(pods[0], pods[1])
        pods[1].pod.tables.apply({"policy": {"ingress": [], "egress": None}})

        def ask() -> None:
            with pytest.raises(ConnectionError):
                pods[0].connect((B, 80)).recv(1)

        doing(cluster, ask)
        assert pods[1].tcp.counts["refused in"] == 1


class TestDial:
    """For probes, port-forward and NodePorts."""

    def dial(self, cluster: Cluster, pod: Slow, ip: str, port: int) -> tuple[socket.socket | None, int]:
        answers: list[Any] = []
        pod.tcp.dial(
            addresses.number(ip), port, pod.tcp._setup.host_ip, lambda *answer: answers.append(answer)
        )
        wait(cluster.loop, lambda: answers)
        return answers[0]  # type: ignore[no-any-return]

    @pytest.mark.parametrize("ip", [B, "127.0.0.1"])
    def test_own_pod(self, cluster: Cluster, pods: tuple[Slow, Slow], ip: str) -> None:
        listener = pods[1].listen(80, ip)
        made, code = self.dial(cluster, pods[1], ip, 80)
        assert code == 0
        assert made is not None
        made.settimeout(10)

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                assert read_all(connection) == b"ping"
                connection.sendall(b"pong")

        def ask(connection: Socket) -> None:
            with connection:
                connection.sendall(b"ping")
                connection.shutdown(socket.SHUT_WR)
                assert read_all(connection) == b"pong"

        doing(cluster, serve, partial(ask, made))
        made, code = self.dial(cluster, pods[1], ip, 81)
        assert (made, code) == (None, errno.ECONNREFUSED)


def test_a_host_by_its_address_but_not_by_its_loopback(cluster: Cluster) -> None:
    pod = Slow(cluster, A)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"this machine has no address but loopback's: {error}")
        address = probe.getsockname()[0]
    with socket.create_server((address, 0)) as server:
        server.settimeout(20)
        exchange(cluster, pod, server.getsockname(), server, MEGABYTE)
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        doing(cluster, lambda: pod.connect((address, port)))
    with socket.create_server(("127.0.0.1", 0)) as secret:
        secret.setblocking(False)
        forged = tcp_segments.build(
            (pod.pod.setup.ip, 40000),
            (addresses.LOOPBACK, secret.getsockname()[1]),
            1,
            0,
            tcp_segments.SYN,
            1000,
        )
        pod.pod.forwarder._outgoing(forged)
        cluster.settle()
        with pytest.raises(BlockingIOError):
            secret.accept()


def test_reads_a_kernels_syn() -> None:
    segment = tcp_segments.parse(SYN, 20)
    assert segment == tcp_segments.Segment(0x782B644D, 0, tcp_segments.SYN, 0xFFA2, b"", 65442, 10)


@pytest.mark.parametrize(
    "options",
    [
        b"",
        b"\x02",
        b"\x01\x02\x04\x05",
        b"\x02\x00\x05\xb4",
        b"\x03\x01",
        b"\x01\x01\x01\x01",
        b"\x00\x02\x04\x01",
    ],
)
def test_broken_options_are_no_options(options: bytes) -> None:
    raw = tcp_segments.build(
        (1, 2), (3, 4), 5, 0, tcp_segments.SYN, 6, options.ljust((len(options) + 3) // 4 * 4, b"\0")
    )
    segment = tcp_segments.parse(raw, 20)
    assert segment is not None
    assert (segment.mss, segment.scale) == (536, None)


def test_a_segment_that_lies_about_its_header_is_none() -> None:
    for offset in (0x40, 0xF0):
        broken = bytearray(tcp_segments.build((1, 2), (3, 4), 5, 0, tcp_segments.ACK, 6))
        broken[32] = offset
        assert tcp_segments.parse(bytes(broken), 20) is None
