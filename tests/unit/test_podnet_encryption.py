"""Sealed connections: TLS between two netds that looks to both of them like a plain socket."""

from __future__ import annotations

import errno
import gc
import hashlib
import os
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.encryption import tls_connection, tls_pipe
from slurmlet.podnet.encryption.sealer import Sealer
from slurmlet.podnet.netd_setup import Tls
from slurmlet.podnet.socket_relay import Relay, reset
from tests.unit.overlaying import making_loop, turn
from tests.unit.sealed import TrackedSealer, accepted, make_contexts, make_tls, seal, sealed_pair, tcp_pair

Pair = tuple[socket.socket, socket.socket]
MEGABYTE = 1 << 20


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def ends(loop: Loop, sealer: Sealer) -> Pair:
    return sealed_pair(loop, sealer)


def doing(loop: Loop, *programs: Callable[[], Any]) -> list[Any]:
    """Programs that block, each in a thread, while the loop turns."""
    results: list[Any] = [None] * len(programs)

    def run(number: int, program: Callable[[], Any]) -> None:
        try:
            results[number] = program()
        except OSError as error:
            results[number] = error.errno

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(programs)]
    for thread in threads:
        thread.start()
    turn(loop, lambda: not any(thread.is_alive() for thread in threads), 20)
    return results


def patient(end: socket.socket) -> socket.socket:
    end.settimeout(15)
    return end


def read_all(end: socket.socket) -> bytes:
    received = bytearray()
    while piece := patient(end).recv(MEGABYTE):
        received += piece
    return bytes(received)


def send_all(end: socket.socket, data: bytes) -> None:
    patient(end).sendall(data)
    end.shutdown(socket.SHUT_WR)


def send_back(end: socket.socket) -> bytes:
    received = read_all(end)
    send_all(end, received)
    return received


@pytest.mark.parametrize("size", [0, 1, 16 * 1024 + 1, 9 * MEGABYTE])
def test_bytes_arrive_both_ways_at_once_and_each_way_ends_by_itself(
    loop: Loop, ends: Pair, size: int
) -> None:
    there, back = os.urandom(size), os.urandom(size)
    _, heard, _, answer = doing(
        loop,
        lambda: send_all(ends[0], there),
        lambda: hashlib.sha256(read_all(ends[1])).digest(),
        lambda: send_all(ends[1], back),
        lambda: hashlib.sha256(read_all(ends[0])).digest(),
    )
    assert (heard, answer) == (hashlib.sha256(there).digest(), hashlib.sha256(back).digest())


def test_who_has_finished_still_hears(loop: Loop, ends: Pair) -> None:
    send_all(ends[0], b"question")
    [asked] = doing(loop, lambda: read_all(ends[1]))
    assert asked == b"question"
    _, answer = doing(loop, lambda: send_all(ends[1], b"answer"), lambda: read_all(ends[0]))
    assert answer == b"answer"


def test_all_descriptors_go_with_the_last_end(loop: Loop, sealer: Sealer) -> None:
    # What earlier tests have left must not go meanwhile.
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        left, right = sealed_pair(loop, sealer)
        left.close()
        [rest] = doing(loop, partial(read_all, right))
        assert rest == b""
        right.close()
    turn(loop, lambda: len(list(Path("/proc/self/fd").iterdir())) == before)


def test_a_reset_is_a_reset(loop: Loop, ends: Pair) -> None:
    patient(ends[0]).sendall(b"last words")
    [heard] = doing(loop, lambda: patient(ends[1]).recv(100))
    assert heard == b"last words"
    reset(ends[0])
    assert doing(loop, lambda: ends[1].recv(1)) == [errno.ECONNRESET]


def test_who_closes_with_unread_bytes_resets_as_tcp_does(loop: Loop, ends: Pair) -> None:
    patient(ends[1]).sendall(b"never read")
    doing(loop, lambda: patient(ends[0]).recv(1, socket.MSG_PEEK))
    ends[0].close()
    assert doing(loop, lambda: ends[1].recv(1)) == [errno.ECONNRESET]


def test_a_transport_that_is_cut_is_no_orderly_end(loop: Loop, sealer: Sealer) -> None:
    raw = tcp_pair()
    told: list[tuple[socket.socket | None, int]] = []
    sealer.client(raw[0], lambda *what: told.append(what))
    sealer.server(raw[1], lambda *what: accepted(sealer, told, *what))
    turn(loop, lambda: len(told) == 2)
    # As when the other host's process is killed: TCP ends in order, but nobody said that he had finished.
    raw[0].shutdown(socket.SHUT_RDWR)
    for made, _ in told:
        assert made is not None
        assert doing(loop, partial(patient(made).recv, 1)) == [errno.ECONNRESET]


def test_who_does_not_read_is_not_filled(loop: Loop, ends: Pair) -> None:
    sent = 0
    while True:
        try:
            sent += ends[0].send(bytes(MEGABYTE))
        except BlockingIOError:
            if not loop.run_until(lambda: _takes_more(ends[0]), 0.3):
                break
    # What kernels hold in six buffers on loopback, and ours.
    assert sent < 64 * MEGABYTE
    ends[0].shutdown(socket.SHUT_WR)
    [received] = doing(loop, lambda: len(read_all(ends[1])))
    assert received == sent


def _takes_more(end: socket.socket) -> bool:
    return bool(select.select([], [end], [], 0)[1])


def test_a_relay_of_much_goes_through(loop: Loop, ends: Pair) -> None:
    """As a NodePort does: beyond a megabyte the kernel moves the bytes."""
    client, relayed = tcp_pair()
    Relay(loop, relayed, ends[0])
    payload = os.urandom(5 * MEGABYTE)
    _, heard, answer = doing(
        loop,
        lambda: send_all(client, payload),
        lambda: send_back(ends[1]),
        lambda: read_all(client),
    )
    assert heard == answer == payload


@pytest.mark.parametrize("foreign", ["client", "server"])
def test_another_authority_is_refused(loop: Loop, sealer: Sealer, tmp_path: Path, foreign: str) -> None:
    stranger = TrackedSealer(loop, make_tls(tmp_path))
    sides = (stranger, sealer) if foreign == "client" else (sealer, stranger)
    (client, client_code), (server, server_code) = (told[0] for told in seal(loop, *sides))
    assert (server, server_code) == (None, errno.ECONNRESET)
    if client is None:
        assert client_code == errno.ECONNRESET
    else:
        # TLS 1.3 lets a client speak before it hears that it is not welcome.
        assert doing(loop, lambda: patient(client).recv(1)) == [errno.ECONNRESET]
    stranger.close()


def test_a_stranger_without_a_certificate_is_refused(loop: Loop, sealer: Sealer) -> None:
    raw = tcp_pair()
    told: list[tuple[socket.socket | None, int]] = []
    sealer.server(raw[1], lambda *what: told.append(what))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

    def knock() -> Any:
        raw[0].settimeout(5)
        with context.wrap_socket(raw[0]) as stranger:
            stranger.recv(1)

    doing(loop, knock)
    assert told == [(None, errno.ECONNRESET)]


def test_a_stranger_who_speaks_no_tls_is_refused(loop: Loop, sealer: Sealer) -> None:
    raw = tcp_pair()
    told: list[tuple[socket.socket | None, int]] = []
    sealer.server(raw[1], lambda *what: told.append(what))
    raw[0].send(b"GET / HTTP/1.0\r\n\r\n")
    turn(loop, lambda: told)
    assert told == [(None, errno.ECONNRESET)]


def test_a_stranger_who_says_nothing_is_not_waited_for(
    loop: Loop, sealer: Sealer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_connection, "HANDSHAKE_TIMEOUT_S", 0.05)
    raw = tcp_pair()
    told: list[tuple[socket.socket | None, int]] = []
    sealer.server(raw[1], lambda *what: told.append(what))
    turn(loop, lambda: told)
    assert told == [(None, errno.ECONNRESET)]


def test_a_client_that_is_gone_already(loop: Loop, sealer: Sealer) -> None:
    raw = tcp_pair()
    reset(raw[0])
    told: list[tuple[socket.socket | None, int]] = []
    sealer.server(raw[1], lambda *what: told.append(what))
    turn(loop, lambda: told)
    assert told == [(None, errno.ECONNRESET)]


def test_a_connection_is_open_when_the_server_says_so(loop: Loop, sealer: Sealer) -> None:
    raw = tcp_pair()
    told: list[tuple[socket.socket | None, int]] = []
    came: list[socket.socket | None] = []
    sealer.client(raw[0], lambda *what: told.append(what))
    sealer.server(raw[1], lambda plain, _code: came.append(plain))
    turn(loop, lambda: came)
    assert not loop.run_until(lambda: bool(told), 0.05)
    assert came[0] is not None
    sealer.opened(came[0])
    # What follows at once must not be lost.
    came[0].send(b"welcome")
    turn(loop, lambda: told)
    made, code = told[0]
    assert made is not None
    assert code == 0
    assert doing(loop, lambda: patient(made).recv(100)) == [b"welcome"]


def test_a_server_that_does_not_open_refuses(loop: Loop, sealer: Sealer) -> None:
    raw = tcp_pair()
    told: list[tuple[socket.socket | None, int]] = []
    sealer.client(raw[0], lambda *what: told.append(what))
    sealer.server(raw[1], lambda plain, _code: reset(plain) if plain is not None else None)
    turn(loop, lambda: told)
    assert told == [(None, errno.ECONNREFUSED)]


def test_an_error_that_another_socket_left_behind_is_nobodys_end(
    loop: Loop, ends: Pair, sealer: Sealer
) -> None:
    """Python 3.13: the queue of OpenSSL is one for the whole thread."""
    assert isinstance(sealer, TrackedSealer)
    for each in sealer.made:
        each._tls = Haunted(each._tls)  # type: ignore[assignment]
    send_all(ends[0], b"all the same")
    assert doing(loop, lambda: read_all(ends[1])) == [b"all the same"]


class Haunted:
    def __init__(self, tls: ssl.SSLObject) -> None:
        self._tls = tls
        self._first = True

    def read(self, *arguments: Any) -> Any:
        if self._first:
            self._first = False
            raise ConnectionResetError(errno.ECONNRESET, "somebody else's")
        return self._tls.read(*arguments)

    def write(self, data: Any) -> int:
        return self._tls.write(data)


def test_nobody_slips_into_a_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger who connects first is not the one that is accepted."""
    strangers: list[socket.socket] = []
    listen = tls_pipe.socket.socket.listen

    def listen_and_be_met(self: socket.socket, *backlog: int) -> None:
        listen(self, *backlog)
        strangers.append(socket.create_connection(self.getsockname()))

    monkeypatch.setattr(tls_pipe.socket.socket, "listen", listen_and_be_met)
    inner, outer = tls_pipe.pair()
    assert (inner.getpeername(), inner.getsockname()) == (outer.getsockname(), outer.getpeername())
    assert patient(strangers[0]).recv(1) == b""
    for each in (inner, outer, *strangers):
        each.close()


def test_only_tls_1_3(tls: Tls) -> None:
    for context in make_contexts(tls):
        assert context.minimum_version == ssl.TLSVersion.TLSv1_3
        assert context.verify_mode == ssl.CERT_REQUIRED
