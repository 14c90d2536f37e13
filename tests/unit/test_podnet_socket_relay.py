from __future__ import annotations

import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import socket_relay
from slurmlet.podnet.socket_relay import Relay
from tests.unit.overlaying import making_loop, turn


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


class Line:
    """client ↔ relay ↔ server, as real TCP."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self.client, left = tcp_pair()
        self.server, right = tcp_pair()
        self.ended: list[bool] = []
        self.relay = Relay(self.loop, left, right, lambda: self.ended.append(True))


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def line(loop: Loop) -> Line:
    return Line(loop)


def transfer(line: Line, size_bytes: int) -> tuple[str, str]:
    """Digests of what was sent from client to server and of what came, half-closed at the end."""
    sent, came = hashlib.sha256(), hashlib.sha256()
    block = os.urandom(1 << 20)

    def send() -> None:
        for _ in range(size_bytes >> 20):
            line.client.sendall(block)
            sent.update(block)
        line.client.shutdown(socket.SHUT_WR)

    def receive() -> None:
        while data := line.server.recv(1 << 18):
            came.update(data)

    threads = [threading.Thread(target=work) for work in (send, receive)]
    for thread in threads:
        thread.start()
    turn(line.loop, lambda: not any(thread.is_alive() for thread in threads), 30)
    return sent.hexdigest(), came.hexdigest()


@pytest.mark.parametrize("splice", [True, False])
def test_many_bytes_arrive_whole_and_the_other_half_stays_open(
    line: Line, splice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not splice:
        monkeypatch.setattr(socket_relay, "_splice", None)
    sent, came = transfer(line, 64 << 20)
    assert sent == came
    assert line.ended == []
    line.server.sendall(b"goodbye")
    line.loop.run_until(lambda: False, 0.1)
    assert line.client.recv(16, socket.MSG_DONTWAIT) == b"goodbye"
    line.server.close()
    turn(line.loop, lambda: line.ended)


def test_a_reader_that_stops_stops_the_writer(line: Line) -> None:
    line.client.setblocking(False)
    sent = 0
    block = bytes(1 << 16)
    for _ in range(3000):
        try:
            sent += line.client.send(block)
        except BlockingIOError:
            line.loop.run_until(lambda: False, 0.001)
    assert sent < 100 << 20
    assert not line.ended


def test_a_reset_is_passed_on(line: Line) -> None:
    socket_relay.reset(line.client)
    turn(line.loop, lambda: line.ended)
    with pytest.raises(ConnectionResetError):
        line.server.recv(1)


def test_nothing_stays_open_after_the_end(loop: Loop) -> None:
    before = open_files()
    for _ in range(10):
        line = Line(loop)
        transfer(line, 4 << 20)
        line.server.close()
        turn(loop, lambda: line.ended)  # noqa: B023 - called at once
        line.client.close()
    assert open_files() <= before
