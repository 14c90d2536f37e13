from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.overlay_socket import Overlay
from tests.unit.overlaying import Place, making_loop, place, turn

SOURCE = addresses.number("10.244.0.9")


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def client(loop: Loop) -> Place:
    return place(loop, "10.244.0.9", "127.0.0.1")


@pytest.fixture
def server(loop: Loop, client: Place) -> Place:
    made = place(loop, "10.244.0.7", "127.0.0.2")
    client.knows(made)
    made.knows(client)
    return made


def dial(loop: Loop, client: Place, ip: str, port: int) -> tuple[socket.socket | None, int]:
    results: list[tuple[socket.socket | None, int]] = []
    client.dialler.dial(addresses.number(ip), port, SOURCE, lambda made, code: results.append((made, code)))
    turn(loop, lambda: results)
    return results[0]


def test_a_connection_is_announced_and_arrives_under_its_pod_names(
    loop: Loop, client: Place, server: Place
) -> None:
    _, came = server.accept(80)
    made, code = dial(loop, client, "10.244.0.7", 80)
    assert code == 0
    assert made is not None
    turn(loop, lambda: came)
    connection, who = came[0]
    assert (who.source_ip, who.source_port) == (SOURCE, made.getsockname()[1])
    assert (addresses.text(who.ip), who.port) == ("10.244.0.7", 80)
    made.send(b"hello")
    turn(loop, lambda: connection.recv(5, socket.MSG_PEEK) == b"hello")


def test_a_listener_that_the_table_names_is_not_asked_for(loop: Loop, client: Place, server: Place) -> None:
    accepting, came = server.accept(80)
    server.overlay.on_ask = lambda _ip, _port: pytest.fail("asked")
    client.knows(server, {"80": accepting.host_port})
    assert dial(loop, client, "10.244.0.7", 80)[1] == 0
    turn(loop, lambda: came)


def test_an_old_table_is_corrected_by_asking(loop: Loop, client: Place, server: Place) -> None:
    _, came = server.accept(80)
    with socket.socket() as gone:
        gone.bind(("127.0.0.2", 0))
        client.knows(server, {"80": gone.getsockname()[1]})
    assert dial(loop, client, "10.244.0.7", 80)[1] == 0
    turn(loop, lambda: came)


def test_nobody_listens_is_refused_and_no_such_pod_is_unreachable(
    loop: Loop, client: Place, server: Place
) -> None:
    server.accept(80)
    assert dial(loop, client, "10.244.0.7", 81) == (None, errno.ECONNREFUSED)
    assert dial(loop, client, "10.244.0.200", 80) == (None, errno.EHOSTUNREACH)


def test_a_lost_announcement_is_asked_for(
    loop: Loop, client: Place, server: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, came = server.accept(80)
    announce = Overlay.announce
    lost: list[int] = []

    def lossy(self: Overlay, *what: object) -> None:
        if lost:
            announce(self, *what)  # type: ignore[arg-type]
        lost.append(1)

    monkeypatch.setattr(Overlay, "announce", lossy)
    made, _ = dial(loop, client, "10.244.0.7", 80)
    turn(loop, lambda: came)
    assert len(lost) == 2
    assert made is not None


def test_whois_of_a_closed_connection_is_not_answered(loop: Loop, client: Place, server: Place) -> None:
    """Its port may be a stranger's by now."""
    accepting, came = server.accept(80)
    made, _ = dial(loop, client, "10.244.0.7", 80)
    assert made is not None
    asked = (made.getsockname()[1], server.setup.host_ip, accepting.host_port)
    assert [what.port for what in client.dialler.recall(*asked)] == [80]
    made.close()
    assert client.dialler.recall(*asked) == []
    turn(loop, lambda: came)


def test_whois_of_another_connection_from_the_same_port_is_not_answered(
    loop: Loop, client: Place, server: Place
) -> None:
    """A kernel gives one source port to several connections at once, to anybody's."""
    accepting, came = server.accept(80)
    made, _ = dial(loop, client, "10.244.0.7", 80)
    assert made is not None
    port = made.getsockname()[1]
    assert client.dialler.recall(port, server.setup.host_ip, accepting.host_port + 1) == []
    assert client.dialler.recall(port, client.setup.host_ip, accepting.host_port) == []
    turn(loop, lambda: came)


def test_a_stranger_is_reset_unheard(loop: Loop, client: Place, server: Place) -> None:
    accepting, came = server.accept(80)
    stranger = socket.create_connection(("127.0.0.2", accepting.host_port), source_address=("127.0.0.1", 0))
    stranger.setblocking(False)
    loop.run_until(lambda: False, 1.2)
    with pytest.raises(ConnectionResetError):
        stranger.recv(1)
    assert came == []
    stranger.close()


def test_other_addresses_are_connected_as_they_are(loop: Loop, client: Place) -> None:
    with socket.create_server(("127.0.0.3", 0)) as plain:
        made, code = dial(loop, client, "127.0.0.3", plain.getsockname()[1])
        assert code == 0
        assert made is not None
        made.close()
