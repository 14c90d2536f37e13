"""Two ends of the overlay on loopback, with real sockets: who is believed, who is not, and what a lost datagram does."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses, overlay_datagrams
from slurmlet.podnet.netd_setup import Setup, from_plan
from slurmlet.podnet.overlay_socket import Announcement, Overlay
from slurmlet.podnet.tables import Peer, Tables

LOOPBACK = addresses.LOOPBACK
WHAT = Announcement(addresses.number("10.244.0.9"), 50777, addresses.number("10.244.0.7"), 80)


def setup(key: str = "11") -> Setup:
    plan: dict[str, Any] = {
        "ip": "10.244.0.7",
        "pod_range": "10.244.0.0/16",
        "service_range": "10.96.0.0/16",
        "key": key * 32,
        "node": "batch",
    }
    return from_plan(plan, "127.0.0.1")


class End:
    def __init__(self, loop: Loop, sock: socket.socket, key: str) -> None:
        made = setup(key)
        self.tables = Tables(made)
        self.overlay = Overlay(loop, made, self.tables, sock)
        self.peer = Peer(LOOPBACK, self.overlay.port, {})


class Net:
    """Ends of the overlay in one loop; all their sockets are closed with it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack, self.loop = stack, Loop()

    def end(self, key: str = "11") -> End:
        return End(self.loop, self._stack.enter_context(overlay_datagrams.open_socket(LOOPBACK)), key)

    def stranger(self) -> socket.socket:
        made = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        made.bind(("127.0.0.1", 0))
        return made

    def comes_true(self, done: Callable[[], bool]) -> bool:
        return self.loop.run_until(done, 3)


@pytest.fixture
def net() -> Iterator[Net]:
    with ExitStack() as stack:
        yield Net(stack)


def test_an_announced_connection_is_known_once(net: Net) -> None:
    client, server = net.end(), net.end()
    client.overlay.announce(server.peer, 50777, WHAT)
    told: list[Announcement] = []
    server.overlay.on_announced = lambda _key, what: told.append(what)
    assert net.comes_true(lambda: told == [WHAT])
    assert server.overlay.claim(LOOPBACK, 50776, WHAT.port) is None
    assert server.overlay.claim(LOOPBACK, 50777, WHAT.port) == WHAT
    assert server.overlay.claim(LOOPBACK, 50777, WHAT.port) is None


def test_connections_from_one_source_port_to_two_ports_are_told_apart(net: Net) -> None:
    """A kernel gives a source port twice, as long as the destinations differ."""
    client, server = net.end(), net.end()
    other = WHAT._replace(source_ip=WHAT.source_ip + 1, port=WHAT.port + 1)
    told: list[Announcement] = []
    server.overlay.on_announced = lambda _key, what: told.append(what)
    client.overlay.announce(server.peer, 50777, WHAT)
    client.overlay.announce(server.peer, 50777, other)
    assert net.comes_true(lambda: len(told) == 2)
    assert server.overlay.claim(LOOPBACK, 50777, WHAT.port) == WHAT
    assert server.overlay.claim(LOOPBACK, 50777, other.port) == other


def test_an_announcement_that_nobody_claims_is_forgotten(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    server = net.end()
    server.overlay.expect(LOOPBACK, 50777, WHAT)
    server.overlay.expect(LOOPBACK, 50778, WHAT)
    assert server.overlay.claim(LOOPBACK, 50778, WHAT.port) == WHAT
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 61)
    assert server.overlay.claim(LOOPBACK, 50777, WHAT.port) is None


def test_who_has_another_key_is_not_believed(net: Net) -> None:
    stranger, server = net.end("22"), net.end()
    stranger.overlay.announce(server.peer, 50777, WHAT)
    assert net.comes_true(lambda: server.overlay.dropped == 1)
    assert server.overlay.claim(LOOPBACK, 50777, WHAT.port) is None


def test_a_changed_or_old_datagram_is_dropped(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = net.end(), net.end()
    spy = net.stranger()
    client.overlay.announce(Peer(LOOPBACK, spy.getsockname()[1], {}), 50777, WHAT)
    datagram = spy.recv(4096)
    for position in range(len(datagram)):
        changed = bytearray(datagram)
        changed[position] ^= 1
        spy.sendto(changed, ("127.0.0.1", server.overlay.port))
        assert net.comes_true(lambda: server.overlay.dropped == position + 1)  # noqa: B023 - called at once
    assert server.overlay.claim(LOOPBACK, 50777, WHAT.port) is None
    now_ns = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 301 * 10**9)
    spy.sendto(datagram, ("127.0.0.1", server.overlay.port))
    assert net.comes_true(lambda: server.overlay.dropped == len(datagram) + 1)


@pytest.mark.parametrize("datagram", [b"", b"\x02", bytes(24), struct.pack(">BQ", 2, 0) + bytes(16)])
def test_rubbish_is_dropped(net: Net, datagram: bytes) -> None:
    server = net.end()
    net.stranger().sendto(datagram, ("127.0.0.1", server.overlay.port))
    assert net.comes_true(lambda: server.overlay.dropped == 1)


@pytest.mark.parametrize(("known", "answer"), [({(WHAT.ip, 80): 40123}, 40123), ({}, 0)])
def test_a_port_is_asked_for(net: Net, known: dict[tuple[int, int], int], answer: int) -> None:
    client, server = net.end(), net.end()
    server.overlay.on_ask = lambda ip, port: known.get((ip, port))
    heard: list[int | None] = []
    client.overlay.ask(server.peer, WHAT.ip, 80, heard.append)
    assert net.comes_true(lambda: heard == [answer])


def test_whom_policy_keeps_out_is_not_told_the_port(net: Net) -> None:
    client, server = net.end(), net.end()
    server.overlay.on_ask = lambda _ip, _port: 40123
    rule = {"peers": [["10.244.0.9/32", []]], "ports": [[6, 80, 80]]}
    server.tables.apply({"policy": {"ingress": [rule], "egress": None}})
    heard: list[int | None] = []
    for source, port in (("10.244.0.9", 80), ("10.244.0.9", 81), ("10.244.0.8", 80)):
        client.overlay.ask(server.peer, WHAT.ip, port, heard.append, addresses.number(source))
    assert net.comes_true(lambda: sorted(map(str, heard)) == ["1", "1", "40123"])


def test_a_question_nobody_hears_ends(net: Net) -> None:
    client = net.end()
    silent = net.stranger()
    heard: list[int | None] = []
    client.overlay.ask(Peer(LOOPBACK, silent.getsockname()[1], {}), WHAT.ip, 80, heard.append)
    assert net.comes_true(lambda: heard == [None])


def test_who_made_a_connection_says_so_when_asked(net: Net) -> None:
    client, server = net.end(), net.end()
    client.overlay.on_whois = lambda *asked: [WHAT] if asked == (50777, LOOPBACK, 40123) else []
    server.tables.apply({"pods": {"10.244.0.9": ["127.0.0.1", client.overlay.port, {}]}})
    told: list[Announcement] = []
    server.overlay.on_announced = lambda _key, what: told.append(what)
    server.overlay.whois(LOOPBACK, 50778, 40123)
    server.overlay.whois(LOOPBACK, 50777, 40124)
    server.overlay.whois(LOOPBACK, 50777, 40123)
    assert net.comes_true(lambda: told == [WHAT])


def test_a_packet_arrives_as_it_was_sent(net: Net) -> None:
    client, server = net.end(), net.end()
    arrived: list[bytes] = []
    server.overlay.receivers[WHAT.ip] = lambda packet, _host, _port: arrived.append(bytes(packet))
    packet = bytes(16) + WHAT.ip.to_bytes(4, "big") + bytes(range(256)) * 200
    client.overlay.send_packet(server.peer, packet)
    assert net.comes_true(lambda: arrived == [packet])
