"""The relay of questions, with the real CoreDNS behind it."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slurmlet.base.host_addresses import free_port
from slurmlet.controlplane import pki
from slurmlet.gateway import dns_client, dns_messages, dns_tls
from slurmlet.gateway.dns_client import Resolver
from slurmlet.gateway.dns_server import DnsServer
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint
from slurmlet.upstream.binaries import find
from tests.unit.overlaying import Place, making_loop, place, turn

ZONE = """$ORIGIN cluster.local.
@ 5 IN SOA ns nobody 1 1 1 1 1
web.default.svc 5 IN A 10.96.1.2
"""
MANY = "".join(f"many.default.svc 5 IN A 10.244.7.{n}\n" for n in range(1, 100))


@dataclass
class CoreDns:
    directory: Path
    binary: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        keys, zone = self.directory / "pki", self.directory / "zone"
        zone.write_text(ZONE + MANY)
        tls = f"tls {keys}/coredns.crt {keys}/coredns.key {keys}/hub-ca.crt"
        corefile = self.directory / "Corefile"
        corefile.write_text(
            f"tls://.:{self.port} {{\nbind 127.0.0.1\n{tls} {{\nclient_auth require_and_verify\n}}\n"
            f"file {zone} cluster.local\n}}\n"
        )
        self.process = subprocess.Popen(
            [str(self.binary), "-quiet", "-conf", str(corefile)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="module")
def core_dns(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CoreDns]:
    binary = find("coredns")
    if binary is None:
        pytest.skip("CoreDNS is not in the cache of upstream binaries (`slurmlet upstream` fetches it)")
    directory = tmp_path_factory.mktemp("coredns")
    pki.ensure(directory / "pki", pki.leaves("login", ("127.0.0.1",), "10.96.0.0/16"))
    made = CoreDns(directory, binary, free_port("127.0.0.1"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def resolver(loop: Loop, core_dns: CoreDns) -> Iterator[Resolver]:
    keys = core_dns.directory / "pki"
    context = dns_tls.context(*(str(keys / name) for name in ("hub-ca.crt", "gateway.crt", "gateway.key")))
    made = Resolver(loop, lambda: core_dns.port, context)
    yield made
    made.close()


def resolve(loop: Loop, resolver: Resolver, name: str) -> list[int]:
    found: list[list[int]] = []
    resolver.addresses(name, lambda ips, _told: found.append(ips))
    turn(loop, lambda: found, 6)
    return found[0]


def test_names_resolve_over_tls(loop: Loop, resolver: Resolver) -> None:
    assert resolve(loop, resolver, "web.default.svc.cluster.local") == [addresses.number("10.96.1.2")]
    assert resolve(loop, resolver, "nosuch.default.svc.cluster.local") == []


def test_many_questions_at_once_each_get_their_own_answer(loop: Loop, resolver: Resolver) -> None:
    answers: dict[int, bytes | None] = {}
    for number in range(500):
        name = "web.default.svc.cluster.local" if number % 2 else f"no{number}.default.svc.cluster.local"
        question = dns_messages.query(number, name)
        resolver.ask(question, lambda answer, number=number: answers.update({number: answer}))  # type: ignore[misc]
    turn(loop, lambda: len(answers) == 500, 6)
    for number, answer in answers.items():
        assert answer is not None
        assert dns_messages.number_of(answer) == number
        assert dns_messages.rcode(answer) == (0 if number % 2 else dns_messages.NXDOMAIN)


def test_a_stranger_without_a_certificate_gets_nothing(
    core_dns: CoreDns, resolver: Resolver, loop: Loop
) -> None:
    import ssl

    resolve(loop, resolver, "web.default.svc.cluster.local")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    question = dns_messages.query(1, "web.default.svc.cluster.local")
    with socket.create_connection(("127.0.0.1", core_dns.port), 2) as plain, pytest.raises(OSError):
        with context.wrap_socket(plain) as tls:
            tls.send(len(question).to_bytes(2, "big") + question)
            assert tls.recv(100) == b"never"


def test_a_question_that_died_with_coredns_is_asked_again(
    loop: Loop, resolver: Resolver, core_dns: CoreDns
) -> None:
    assert resolve(loop, resolver, "web.default.svc.cluster.local")
    core_dns.stop()
    found: list[list[int]] = []
    resolver.addresses("web.default.svc.cluster.local", lambda ips, _told: found.append(ips))
    loop.run_until(lambda: False, 0.3)
    assert found == []
    core_dns.start()
    turn(loop, lambda: found, 5)
    assert found == [[addresses.number("10.96.1.2")]]


def test_without_coredns_the_asker_is_told_in_the_end(
    loop: Loop, monkeypatch: pytest.MonkeyPatch, resolver: Resolver
) -> None:
    monkeypatch.setattr(dns_client, "PATIENCE_S", 0.1)
    monkeypatch.setattr(resolver, "_port", lambda: 1)
    answers: list[bytes | None] = []
    resolver.ask(dns_messages.query(1, "outside.example"), answers.append)
    turn(loop, lambda: answers, 3)
    assert answers == [None]


# Through the overlay, as pods ask.


@dataclass
class Cluster:
    gateway: Place
    pod: Place
    endpoint: UdpEndpoint
    server: DnsServer


@pytest.fixture
def cluster(loop: Loop, resolver: Resolver) -> Cluster:
    gateway, pod = place(loop, "10.244.0.1", "127.0.0.1"), place(loop, "10.244.0.7", "127.0.0.2")
    gateway.knows(pod)
    pod.knows(gateway)
    endpoint = UdpEndpoint(gateway.overlay, gateway.tables, gateway.setup, gateway.setup.ip)
    server = DnsServer(loop, resolver, endpoint)
    endpoint.on_datagram = lambda ip, port, _at, payload: server.datagram(ip, port, payload)
    return Cluster(gateway, pod, endpoint, server)


def test_a_pod_asks_by_udp(loop: Loop, cluster: Cluster) -> None:
    pod = cluster.pod
    own = UdpEndpoint(pod.overlay, pod.tables, pod.setup, pod.setup.ip)
    answers: list[bytes] = []
    own.on_datagram = lambda _ip, _port, at, payload: answers.append(payload) if at == 4000 else None
    own.send(4000, cluster.gateway.setup.ip, 53, dns_messages.query(77, "web.default.svc.cluster.local"))
    turn(loop, lambda: answers, 6)
    assert dns_messages.number_of(answers[0]) == 77
    assert dns_messages.addresses_of(answers[0]) == [addresses.number("10.96.1.2")]
    own.send(4000, cluster.gateway.setup.ip, 53, dns_messages.query(78, "many.default.svc.cluster.local"))
    own.send(4000, cluster.gateway.setup.ip, 53, b"noise")
    turn(loop, lambda: len(answers) == 2, 6)
    assert answers[1][2] & 0x02, "an answer over 512 bytes is truncated"


def test_a_pod_asks_by_tcp_and_gets_large_answers(loop: Loop, cluster: Cluster) -> None:
    accepting, _ = cluster.gateway.accept(53)
    accepting._came = cluster.server.connection
    made: list[socket.socket] = []
    cluster.pod.dialler.dial(
        cluster.gateway.setup.ip,
        53,
        cluster.pod.setup.ip,
        lambda got, _code: made.append(got) if got else None,
    )
    turn(loop, lambda: made)
    client = made[0]
    questions = [dns_messages.query(n, "many.default.svc.cluster.local") for n in (5, 6)]
    # In one write, cut in the middle of the second, and half-closed at the end.
    said = b"".join(len(q).to_bytes(2, "big") + q for q in questions)
    client.send(said[:-3])
    loop.run_until(lambda: False, 0.02)
    client.send(said[-3:])
    client.shutdown(socket.SHUT_WR)
    came, deadline_s = bytearray(), time.monotonic() + 5
    while time.monotonic() < deadline_s:
        loop.run_until(lambda: False, 0.01)
        try:
            received = client.recv(65536)
        except BlockingIOError:
            continue
        if not received:
            break
        came += received
    first = bytes(came[2 : 2 + int.from_bytes(came[:2], "big")])
    second = bytes(came[2 + len(first) + 2 :])
    assert sorted(map(dns_messages.number_of, (first, second))) == [5, 6]
    assert len(dns_messages.addresses_of(first)) == len(dns_messages.addresses_of(second)) == 99
