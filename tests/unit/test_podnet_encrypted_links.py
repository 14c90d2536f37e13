"""Packets and connections between the netds of an encrypted cluster."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmlet.gateway.tcp_accept import Accepting
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.encryption.sealer import Sealer
from slurmlet.podnet.overlay_datagrams import MAX_PACKET_BYTES
from slurmlet.podnet.overlay_socket import Announcement
from slurmlet.podnet.pod_dial import Dialler
from slurmlet.podnet.slow import encrypted_links
from slurmlet.podnet.slow.encrypted_links import Links
from slurmlet.podnet.slow.tcp_listeners import TcpListeners
from slurmlet.podnet.tables import Peer
from tests.unit.network_making import datagram
from tests.unit.overlaying import Place, making_loop, place, turn
from tests.unit.sealed import TrackedSealer, make_tls

A, B = "10.244.0.9", "10.244.0.7"
HOST_A, HOST_B = "127.0.0.1", "127.0.0.2"
Came = list[tuple[bytes, int, int]]


class Netd:
    def __init__(self, where: Place, sealer: Sealer) -> None:
        self.place, self.sealer = where, sealer
        self.links = Links(where.loop, where.setup, where.overlay, sealer)
        self.came: Came = []
        where.overlay.receivers[where.setup.ip] = lambda *what: self.came.append(what)
        self.place.dialler = Dialler(where.loop, where.setup, where.tables, where.overlay, sealer)
        self.place.overlay.on_whois = self.place.dialler.recall

    @property
    def peer(self) -> Peer:
        return Peer(self.place.setup.host_ip, self.place.overlay.port, {})

    def send(self, other: Netd, packet: bytes) -> None:
        self.place.overlay.send_packet(other.peer, packet)


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def netds(loop: Loop, sealer: Sealer) -> tuple[Netd, Netd]:
    here, there = Netd(place(loop, A, HOST_A), sealer), Netd(place(loop, B, HOST_B), sealer)
    here.place.knows(there.place)
    there.place.knows(here.place)
    return here, there


def packet(number: int, size: int = 100) -> bytes:
    return datagram(A, 1000, B, 53, number.to_bytes(4, "big") + bytes(size))


def test_packets_arrive_in_order_from_the_host_and_port_of_their_sender(
    loop: Loop, netds: tuple[Netd, Netd]
) -> None:
    here, there = netds
    sent = [packet(number) for number in range(20)]
    for each in sent[:10]:
        here.send(there, each)
    turn(loop, lambda: len(there.came) == 10)
    for each in sent[10:]:
        here.send(there, each)
    turn(loop, lambda: len(there.came) == 20)
    whence = addresses.number(HOST_A), here.place.overlay.port
    assert there.came == [(each, *whence) for each in sent]
    assert here.links.counts == {"made": 1}


def test_the_largest_packet_goes_through(loop: Loop, netds: tuple[Netd, Netd]) -> None:
    here, there = netds
    large = packet(1, MAX_PACKET_BYTES - 32)
    assert len(large) == MAX_PACKET_BYTES
    here.send(there, large)
    turn(loop, lambda: there.came)
    assert there.came[0][0] == large


def test_to_oneself(loop: Loop, netds: tuple[Netd, Netd]) -> None:
    here, _ = netds
    own = datagram(A, 1000, A, 53)
    here.send(here, own)
    turn(loop, lambda: here.came)
    assert here.came == [(own, addresses.number(HOST_A), here.place.overlay.port)]
    assert here.links.counts == {}


def test_packets_in_the_clear_are_dropped_and_counted(loop: Loop, netds: tuple[Netd, Netd]) -> None:
    here, there = netds
    here.place.overlay.links = None
    here.send(there, packet(1))
    turn(loop, lambda: there.place.overlay.in_clear)
    assert there.came == []


def test_policy_does_not_keep_a_link_out_but_asks_about_what_comes_through(
    loop: Loop, netds: tuple[Netd, Netd]
) -> None:
    here, there = netds
    there.place.tables.apply({"policy": {"ingress": [], "egress": None}})
    here.send(there, packet(1))
    # It is the receiver that asks: forwarder.py.
    turn(loop, lambda: there.came)


def test_what_does_not_fit_is_dropped(loop: Loop, netds: tuple[Netd, Netd]) -> None:
    here, there = netds
    for number in range(40):
        here.send(there, packet(number, 60_000))
    turn(loop, lambda: len(there.came) + here.links.counts["dropped"] == 40)
    assert len(there.came) == (1 << 20) // len(packet(0, 60_000))


def test_nobody_there(loop: Loop, netds: tuple[Netd, Netd]) -> None:
    here, _ = netds
    gone = Peer(addresses.number(HOST_B), 1, {})
    here.place.overlay.send_packet(gone, packet(1))
    turn(loop, lambda: here.links.counts["dropped"] == 1)
    assert not here.links._out


def test_a_link_that_broke_is_made_again(loop: Loop, netds: tuple[Netd, Netd], sealer: TrackedSealer) -> None:
    here, there = netds
    here.send(there, packet(1))
    turn(loop, lambda: there.came)
    sealer.close()
    here.links._out.clear()
    here.send(there, packet(2))
    turn(loop, lambda: len(there.came) == 2)


def test_the_sender_notices_that_a_link_broke(
    loop: Loop, netds: tuple[Netd, Netd], sealer: TrackedSealer
) -> None:
    here, there = netds
    here.send(there, packet(1))
    turn(loop, lambda: there.came)
    (link,) = here.links._out.values()
    (theirs,) = (each for each in sealer.made if each is not link._sealed)
    theirs.close()
    turn(loop, lambda: not here.links._out)


def test_an_idle_link_goes(
    loop: Loop, sealer: Sealer, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(encrypted_links, "_IDLE_S", 0.05)
    monkeypatch.setattr(encrypted_links, "_SWEEP_S", 0.02)
    here, there = request.getfixturevalue("netds")
    here.send(there, packet(1))
    turn(loop, lambda: there.came)
    turn(loop, lambda: not here.links._out)


def test_another_cluster_does_not_get_a_link(loop: Loop, netds: tuple[Netd, Netd], tmp_path: Path) -> None:
    """It may have found the listener; here it even has the key of the overlay."""
    _, there = netds
    sealer = TrackedSealer(loop, make_tls(tmp_path))
    stranger = Netd(place(loop, A, HOST_A), sealer)
    stranger.send(there, packet(1))
    turn(loop, lambda: there.links.counts["strangers"])
    assert there.came == []
    sealer.close()


# TCP, at the seams of dialling and accepting.


def dial(loop: Loop, here: Netd, port: int = 80) -> tuple[socket.socket | None, int]:
    told: list[tuple[socket.socket | None, int]] = []
    setup = here.place.setup
    here.place.dialler.dial(addresses.number(B), port, setup.ip, lambda *what: told.append(what))
    turn(loop, lambda: told)
    return told[0]


def accept_at_the_gateway(there: Netd) -> list[tuple[socket.socket, Announcement]]:
    came: list[tuple[socket.socket, Announcement]] = []
    where = there.place
    made = Accepting(
        where.loop, where.setup, where.overlay, 80, 0, lambda *what: came.append(what), there.sealer
    )
    where.overlay.on_ask = lambda _ip, port: made.host_port if port == 80 else None
    where.overlay.on_announced = made.announced
    return came


def accept_at_a_door(there: Netd) -> list[tuple[socket.socket, Announcement]]:
    came: list[tuple[socket.socket, Announcement]] = []
    where = there.place

    def welcome(plain: socket.socket, what: Announcement) -> None:
        there.sealer.opened(plain)
        came.append((plain, what))

    listeners = TcpListeners(
        *(where.loop, where.setup, where.tables, where.overlay),
        welcome,
        lambda _listeners: None,
        there.links.counts,
        there.sealer,
    )
    where.overlay.on_ask = lambda _ip, port: listeners.open(port) if port == 80 else None
    return came


@pytest.mark.parametrize("accept", [accept_at_the_gateway, accept_at_a_door])
@pytest.mark.parametrize("late", [False, True])
def test_a_connection_is_sealed_and_arrives_under_its_names(
    loop: Loop,
    netds: tuple[Netd, Netd],
    accept: object,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = netds
    assert callable(accept)
    came = accept(there)
    if late:
        # The announcement is lost: who accepts asks while the handshake waits.
        send = here.place.overlay.announce
        lost: list[int] = []

        def lose_first(*what: object) -> None:
            if lost:
                send(*what)  # type: ignore[arg-type]
            lost.append(1)

        monkeypatch.setattr(here.place.overlay, "announce", lose_first)
    made, code = dial(loop, here)
    assert code == 0
    assert made is not None
    turn(loop, lambda: came)
    connection, who = came[0]
    assert (addresses.text(who.source_ip), addresses.text(who.ip), who.port) == (A, B, 80)
    made.send(b"hello")
    connection.settimeout(0)
    turn(loop, lambda: _peek(connection) == b"hello")


def _peek(connection: socket.socket) -> bytes:
    try:
        return connection.recv(100, socket.MSG_PEEK)
    except BlockingIOError:
        return b""


def test_a_client_of_an_encrypted_cluster_does_not_speak_to_a_plain_server(
    loop: Loop, netds: tuple[Netd, Netd]
) -> None:
    here, there = netds
    _, came = there.place.accept(80)
    # Whoever is there reads the beginning of a handshake and hangs up.
    told: list[tuple[socket.socket | None, int]] = []
    here.place.dialler.dial(addresses.number(B), 80, 1, lambda *what: told.append(what))
    turn(loop, lambda: came)
    came[0][0].close()
    turn(loop, lambda: told)
    assert told == [(None, errno.ECONNRESET)]
