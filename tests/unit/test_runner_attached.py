"""The runner's end of port-forward and attach: real sockets, pipes and terminals, a hub made of frames."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.protocol.log_files import LogWriter
from slurmlet.runner.containers.container_output import Outputs
from slurmlet.runner.network.network_view import HostNetwork
from slurmlet.runner.streams import attach_session
from slurmlet.runner.streams.attach_session import AttachSession
from slurmlet.runner.streams.forwarded_port import ForwardSession, forward
from slurmlet.runner.streams.link_streams import Refused, Stream

WITHIN_S = 5.0


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    yield Loop()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


class Hub:
    """The other end of a stream: what came, by channel."""

    def __init__(self) -> None:
        self.heard: dict[int, bytes] = {wire.STDOUT: b"", wire.STDERR: b""}
        self.ended: list[int] = []
        self.status: dict[str, Any] | None = None
        self.granted_bytes = 0
        self.closed = False
        self._decoder = wire.Decoder()
        self.stream = Stream(1, self._take, lambda _: None)

    def _take(self, sent: bytes) -> None:
        for frame in self._decoder.feed(sent):
            assert not self.closed, "nothing may come after CLOSE"
            if frame.kind == wire.WINDOW:
                self.granted_bytes += int.from_bytes(frame.payload, "big")
            elif frame.kind == wire.CLOSE:
                self.closed = True
            elif frame.payload[0] == wire.END:
                self.ended.append(frame.payload[1])
            elif frame.payload[0] == wire.STATUS:
                self.status = json.loads(frame.payload[1:])
            else:
                self.heard[frame.payload[0]] += frame.payload[1:]

    def grant(self, session: Any, credit_bytes: int) -> None:
        self.stream.credit += credit_bytes
        session.more_credit()


END_OF_INPUT = bytes((wire.STDIN,))


# Forwarded ports.


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WITHIN_S)
        yield listening


def dial(loop: Loop, port: int) -> tuple[Hub, ForwardSession]:
    hub = Hub()
    return hub, ForwardSession(loop, HostNetwork({"hostname": "pod"}, "127.0.0.1"), port, hub.stream)


def accept(loop: Loop, server: socket.socket) -> socket.socket:
    loop.run_until(lambda: False, 0.05)
    connection, _ = server.accept()
    connection.settimeout(WITHIN_S)
    return connection


def test_both_halves_of_a_connection_end_on_their_own(loop: Loop, server: socket.socket) -> None:
    hub, session = dial(loop, server.getsockname()[1])
    # Bytes may come before the connection is there.
    session.received(wire.STDIN, b"early ")
    with accept(loop, server) as connection:
        session.received(wire.STDIN, b"question")
        session.received(wire.END, END_OF_INPUT)
        loop.run_until(lambda: False, 0.05)
        question = b""
        while piece := connection.recv(100):
            question += piece
        assert (question, hub.granted_bytes) == (b"early question", 14)
        connection.sendall(b"answer")
    assert loop.run_until(lambda: hub.closed, WITHIN_S)
    assert (hub.heard[wire.STDOUT], hub.ended, hub.status) == (b"answer", [wire.STDOUT], None)


def test_a_server_that_closes_first_may_still_be_written_to(loop: Loop, server: socket.socket) -> None:
    hub, session = dial(loop, server.getsockname()[1])
    with accept(loop, server) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert loop.run_until(lambda: hub.ended == [wire.STDOUT], WITHIN_S)
        session.received(wire.STDIN, b"more")
        assert connection.recv(100) == b"more"
        assert not hub.closed
        session.received(wire.END, END_OF_INPUT)
        assert hub.closed


def test_a_server_that_resets_counts_as_one_that_closed(loop: Loop, server: socket.socket) -> None:
    hub, session = dial(loop, server.getsockname()[1])
    connection = accept(loop, server)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    assert loop.run_until(lambda: hub.closed, WITHIN_S)
    assert (hub.ended, hub.status) == ([wire.STDOUT], None)
    session.abandoned()


def test_no_more_is_read_than_there_is_credit_for(loop: Loop, server: socket.socket) -> None:
    hub, session = dial(loop, server.getsockname()[1])
    with accept(loop, server) as connection:
        total = wire.INITIAL_WINDOW * 3
        sender = threading.Thread(target=connection.sendall, args=(b"x" * total,))
        sender.start()
        loop.run_until(lambda: False, 0.2)
        assert len(hub.heard[wire.STDOUT]) == wire.INITIAL_WINDOW
        hub.grant(session, total)
        assert loop.run_until(lambda: len(hub.heard[wire.STDOUT]) == total, WITHIN_S)
        sender.join()
    session.abandoned()


def test_credit_comes_back_only_as_the_server_takes(loop: Loop, server: socket.socket) -> None:
    hub, session = dial(loop, server.getsockname()[1])
    with accept(loop, server) as connection:
        sent = 0
        while hub.granted_bytes == sent and sent < 64 << 20:
            session.received(wire.STDIN, b"y" * (1 << 20))
            sent += 1 << 20
        assert hub.granted_bytes < sent
        got = 0
        while got < sent:
            loop.run_until(lambda: False, 0.001)
            got += len(connection.recv(1 << 20))
        assert loop.run_until(lambda: hub.granted_bytes == sent, WITHIN_S)
    session.abandoned()


def test_a_client_that_left_closes_the_connection(loop: Loop, server: socket.socket) -> None:
    hub, session = dial(loop, server.getsockname()[1])
    with accept(loop, server) as connection:
        session.abandoned()
        assert connection.recv(1) == b""
    session.received(wire.STDIN, b"under way")
    loop.run_until(lambda: False, 0.05)
    assert (hub.closed, hub.status, hub.ended) == (False, None, [])


def test_a_port_where_nobody_listens_is_named(loop: Loop) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    hub, _ = dial(loop, port)
    assert loop.run_until(lambda: hub.closed, WITHIN_S)
    assert hub.status is not None
    assert f"failed to connect to localhost:{port}" in hub.status["error"]
    assert f"127.0.0.1:{port}: connect: connection refused" in hub.status["error"]


@pytest.mark.skipif(not socket.has_ipv6, reason="this Python has no IPv6")
def test_a_server_of_the_other_family_is_found(loop: Loop) -> None:
    try:
        listening = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listening:
        listening.settimeout(WITHIN_S)
        hub, session = dial(loop, listening.getsockname()[1])
        with accept(loop, listening) as connection:
            connection.sendall(b"six")
            assert loop.run_until(lambda: hub.heard[wire.STDOUT] == b"six", WITHIN_S)
        session.abandoned()


@pytest.mark.parametrize("port", [0, 65536, -1])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(Refused):
        forward(SimpleNamespace(loop=None, network=None), {"port": port}, Hub().stream)  # type: ignore[arg-type]


# Attached clients.


class Process:
    """The streams of a container's process, seen from both sides."""

    def __init__(self, loop: Loop, logs: Path, *, tty: bool = False, **plan: Any) -> None:
        self.loop = loop
        self.plan = {"tty": tty, "stdin": True, **plan}
        self.name = "main"
        self.outputs: Outputs | None = Outputs(
            loop, LogWriter(str(logs), 0, lambda: None), tty=tty, stdin=self.plan["stdin"]
        )
        self.stdin, self.stdout, self.stderr = (os.dup(fd) for fd in self.outputs.stdio)
        self.terminal = -1
        master = -1
        if tty:
            master, self.terminal = pty.openpty()
            os.set_blocking(master, False)
        self.outputs.started(master)
        os.set_blocking(self.stdin, False)

    def attach(self, **asked: bool) -> tuple[Hub, AttachSession]:
        hub = Hub()
        message = {"stdin": True, "stdout": True, "stderr": True, **asked}
        return hub, AttachSession(self.loop, self, message, hub.stream)  # type: ignore[arg-type]

    def read(self) -> bytes | None:
        """What lies in its input: None for nothing yet, b"" for the end."""
        try:
            return os.read(self.stdin, 1 << 20)
        except BlockingIOError:
            return None

    def exit(self) -> None:
        assert self.outputs is not None
        for fd in (self.stdin, self.stdout, self.stderr):
            os.close(fd)
        self.outputs.finish()
        self.outputs = None


def test_everybody_attached_hears_what_is_written_from_then_on(loop: Loop, tmp_path: Path) -> None:
    process = Process(loop, tmp_path)
    os.write(process.stdout, b"before\n")
    loop.run_until(lambda: False, 0.02)
    first, _ = process.attach()
    second, leaving = process.attach(stderr=False)
    os.write(process.stdout, b"out\n")
    os.write(process.stderr, b"err\n")
    assert loop.run_until(lambda: first.heard[wire.STDERR] != b"", WITHIN_S)
    leaving.abandoned()
    os.write(process.stdout, b"later\n")
    process.exit()
    assert first.heard == {wire.STDOUT: b"out\nlater\n", wire.STDERR: b"err\n"}
    assert (first.closed, first.status) == (True, {"exit_code": 0})
    assert second.heard == {wire.STDOUT: b"out\n", wire.STDERR: b""}
    assert not second.closed
    assert (tmp_path / "0.log").read_bytes().count(b"\n") == 4


def test_input_of_several_clients_one_after_the_other(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_session, "LAST_ANSWER_S", 0.05)
    process = Process(loop, tmp_path)
    hub, session = process.attach()
    session.received(wire.STDIN, b"one\n")
    assert (process.read(), hub.granted_bytes) == (b"one\n", 4)
    session.received(wire.END, END_OF_INPUT)
    # What the process says to the last line still reaches the client, then the client's part is over.
    os.write(process.stdout, b"heard one\n")
    assert loop.run_until(lambda: hub.closed, WITHIN_S)
    assert (hub.heard[wire.STDOUT], hub.status) == (b"heard one\n", {"exit_code": 0})
    assert process.read() is None
    _, session = process.attach()
    session.received(wire.STDIN, b"two\n")
    assert process.read() == b"two\n"
    process.exit()


@pytest.mark.parametrize("leaves", [True, False], ids=["vanishes", "ends its input"])
def test_stdin_once_ends_with_its_first_client(loop: Loop, tmp_path: Path, leaves: bool) -> None:
    process = Process(loop, tmp_path, stdin_once=True)
    hub, session = process.attach()
    session.received(wire.STDIN, b"all there is")
    if leaves:
        session.abandoned()
    else:
        session.received(wire.END, END_OF_INPUT)
    assert process.read() == b"all there is"
    assert process.read() == b""
    os.write(process.stdout, b"still here")
    process.exit()
    assert (hub.closed, hub.heard[wire.STDOUT]) == ((False, b"") if leaves else (True, b"still here"))


def test_input_the_process_does_not_take_is_not_credited(loop: Loop, tmp_path: Path) -> None:
    process = Process(loop, tmp_path)
    hub, session = process.attach()
    data = os.urandom(300_000)
    session.received(wire.STDIN, data)
    assert hub.granted_bytes < len(data)
    got = b""
    while len(got) < len(data):
        got += process.read() or b""
        loop.run_until(lambda: False, 0.001)
    assert (got, hub.granted_bytes) == (data, len(data))
    os.close(process.stdin)
    process.stdin = os.open(os.devnull, os.O_RDONLY)
    # It closed its input: nobody will read this, and the client must not wait for it.
    session.received(wire.STDIN, b"x" * 100)
    assert hub.granted_bytes == len(data) + 100
    process.exit()


def test_a_container_without_stdin_takes_none(loop: Loop, tmp_path: Path) -> None:
    process = Process(loop, tmp_path, stdin=False)
    hub, session = process.attach()
    session.received(wire.STDIN, b"into the void")
    session.received(wire.END, END_OF_INPUT)
    assert hub.granted_bytes == 13
    os.write(process.stdout, b"out")
    process.exit()
    assert hub.heard[wire.STDOUT] == b"out"


def test_a_slow_client_slows_the_process_and_loses_nothing(loop: Loop, tmp_path: Path) -> None:
    process = Process(loop, tmp_path, stdin=False)
    hub, session = process.attach()
    hub.stream.credit = 10
    os.write(process.stdout, b"0123456789abcdef")
    assert loop.run_until(lambda: hub.heard[wire.STDOUT] == b"0123456789", WITHIN_S)
    os.write(process.stdout, b"ghi")
    loop.run_until(lambda: False, 0.05)
    # Held up: what was written last is not even in the log.
    assert b"ghi" not in (tmp_path / "0.log").read_bytes()
    hub.grant(session, 100)
    assert loop.run_until(lambda: hub.heard[wire.STDOUT] == b"0123456789abcdefghi", WITHIN_S)
    hub.stream.credit = 1
    os.write(process.stdout, b"the end")
    process.exit()
    assert not hub.closed
    hub.grant(session, 100)
    assert (hub.closed, hub.heard[wire.STDOUT][-7:]) == (True, b"the end")


def test_a_client_that_takes_nothing_is_cut_off(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach_session, "STALLED_S", 0.1)
    process = Process(loop, tmp_path, stdin=False)
    stuck, _ = process.attach()
    lively, _ = process.attach()
    stuck.stream.credit = 1
    os.write(process.stdout, b"some output")
    assert loop.run_until(lambda: stuck.closed, WITHIN_S)
    assert stuck.status is not None
    assert "error" in stuck.status
    os.write(process.stdout, b" and more")
    assert loop.run_until(lambda: lively.heard[wire.STDOUT] == b"some output and more", WITHIN_S)
    process.exit()


def test_a_terminal_is_read_written_and_resized(loop: Loop, tmp_path: Path) -> None:
    process = Process(loop, tmp_path, tty=True, stdin_once=True)
    hub, session = process.attach(tty=True)
    session.received(wire.RESIZE, b'{"Width": 132, "Height": 40}')
    size = fcntl.ioctl(process.terminal, termios.TIOCGWINSZ, b"\0" * 8)
    assert struct.unpack("HHHH", size)[:2] == (40, 132)
    session.received(wire.STDIN, b"typed\n")
    assert os.read(process.terminal, 100) == b"typed\n"
    os.write(process.terminal, b"shown\n")
    assert loop.run_until(lambda: b"shown\r\n" in hub.heard[wire.STDOUT], WITHIN_S)
    # Whoever closes a terminal's window does not end what runs in it.
    session.abandoned()
    _, again = process.attach(tty=True)
    again.received(wire.STDIN, b"back\n")
    assert os.read(process.terminal, 100) == b"back\n"
    os.close(process.terminal)
    process.exit()


def test_a_container_that_does_not_run_cannot_be_attached_to(loop: Loop, tmp_path: Path) -> None:
    process = Process(loop, tmp_path)
    process.exit()
    with pytest.raises(Refused):
        process.attach()
