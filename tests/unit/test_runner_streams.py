"""exec and logs over the link: bytes, credit, exit codes, and what happens when either side goes. Without containers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.protocol import wire
from slurmlet.protocol.log_files import LogOptions
from slurmlet.runner.containers.container_runtime import Start
from slurmlet.runner.streams.exec_session import ExecSession
from slurmlet.runner.streams.link_streams import Streams
from slurmlet.runner.streams.log_follow import LogSession
from tests.unit.runner_pod import RunnerPod, container_plan, making_pod, pod_plan


class Client:
    """The hub's end of the streams of one pod."""

    def __init__(self, pod: RunnerPod) -> None:
        self.pod = pod
        self.frames: list[wire.Frame] = []
        self.streams = Streams(self._take, self._open)

    def _take(self, sent: bytes) -> None:
        self.frames += wire.Decoder().feed(sent)

    def _open(self, message: Any, stream: Any) -> Any:
        container = self.pod.container("a")
        if message["what"] == "exec":
            return ExecSession(self.pod.context, container, message, stream)
        return LogSession(
            self.pod.loop,
            container,
            LogOptions.from_message(message),
            stream,
            "p",  # type: ignore[arg-type]
        )

    def open(self, what: str, **more: Any) -> None:
        message: Any = {"type": "open", "stream": 1, "what": what, "container": "a", **more}
        self.streams.open(message)
        self.pod.advance()

    def send(self, frame: bytes) -> None:
        for one in wire.Decoder().feed(frame):
            self.streams.frame(one)
        self.pod.advance()

    def heard(self, channel: int = wire.STDOUT) -> bytes:
        return b"".join(
            one.payload[1:] for one in self.frames if one.kind == wire.DATA and one.payload[0] == channel
        )

    @property
    def status(self) -> Any:
        said = self.heard(wire.STATUS)
        return json.loads(said) if said else None

    @property
    def closed(self) -> bool:
        return any(one.kind == wire.CLOSE for one in self.frames)

    @property
    def granted(self) -> int:
        return sum(int.from_bytes(one.payload, "big") for one in self.frames if one.kind == wire.WINDOW)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with making_pod(tmp_path, pod_plan(container_plan("a"), restart_policy="Always")) as pod:
        made = Client(pod)
        yield made
        made.streams.abandon_all()


class Program:
    """What a client runs in the container; it has descriptors of its own, as a child has."""

    def __init__(self, client: Client) -> None:
        self.argv, self._start = client.pod.runtime.executed.pop(0)
        self.stdin, self.stdout, self.stderr = (os.dup(fd) for fd in self._start.stdio)
        self.started: Callable[[], None] = lambda: self._start.on_started(1_000_000_007, -1, "")

    @property
    def start(self) -> Start:
        return self._start

    def exit(self, code: int) -> None:
        for fd in (self.stdin, self.stdout, self.stderr):
            os.close(fd)
        self._start.on_exit(code, 0)


def executed(client: Client, **more: Any) -> Program:
    client.open(
        "exec", **{"command": ["sh"], "stdin": True, "stdout": True, "stderr": True, "tty": False, **more}
    )
    program = Program(client)
    program.started()
    client.pod.advance()
    return program


def test_a_program_in_the_container_and_its_exit_code(client: Client) -> None:
    program = executed(client)
    assert program.argv == ["sh"]
    client.send(wire.data(1, wire.STDIN, b"question"))
    assert os.read(program.stdin, 100) == b"question"
    assert client.granted == 8
    os.write(program.stdout, b"answer")
    os.write(program.stderr, b"complaint")
    client.pod.advance()
    program.exit(3)
    client.pod.advance()
    assert (client.heard(), client.heard(wire.STDERR)) == (b"answer", b"complaint")
    assert client.status == {"exit_code": 3}
    assert client.closed
    assert not client.streams.busy


def test_what_was_written_last_is_heard_though_others_hold_the_pipe(client: Client) -> None:
    program = executed(client)
    held = os.dup(program.stdout)
    os.write(program.stdout, b"last")
    program.exit(0)
    client.pod.advance()
    assert client.heard() == b"last"
    assert client.status == {"exit_code": 0}
    os.close(held)


def test_the_end_of_input_reaches_the_program(client: Client) -> None:
    program = executed(client)
    client.send(wire.data(1, wire.STDIN, b"all"))
    client.send(wire.data(1, wire.END, bytes((wire.STDIN,))))
    assert os.read(program.stdin, 100) == b"all"
    assert os.read(program.stdin, 100) == b""
    client.send(wire.data(1, wire.STDIN, b"too late"))
    assert client.granted == 3 + 8, "nobody starves for credit"
    program.exit(0)
    client.pod.advance()


def test_output_waits_for_credit(client: Client) -> None:
    program = executed(client)
    sent = 0
    os.set_blocking(program.stdout, False)
    for _ in range(40):
        try:
            sent += os.write(program.stdout, b"x" * 32768)
        except BlockingIOError:
            pass
        client.pod.advance()
    assert len(client.heard()) == wire.INITIAL_WINDOW
    assert sent > wire.INITIAL_WINDOW, "the rest lies in the pipe, and the program waits"
    program.exit(0)
    client.pod.advance()
    assert not client.closed, "what was written is still to be heard"
    client.send(wire.window(1, 1 << 20))
    assert len(client.heard()) == sent
    assert client.status == {"exit_code": 0}


@pytest.mark.parametrize(("error", "code"), [("exec: not found", 127), ("permission denied", 126)])
def test_a_program_that_cannot_be_started(client: Client, error: str, code: int) -> None:
    client.open("exec", command=["nope"], stdin=False, stdout=True, stderr=False, tty=False)
    client.pod.runtime.answer(0, error=error)
    client.pod.advance()
    assert client.status == {"exit_code": code, "error": error, "reason": "ExecFailed"}


def test_an_empty_command_is_refused(client: Client) -> None:
    client.open("exec", command=[], stdin=False, stdout=True, stderr=True, tty=False)
    assert client.status["reason"] == "BadRequest"


def test_a_container_that_does_not_run_is_refused(client: Client) -> None:
    client.pod.runtime["a"].exit(1)
    client.pod.advance(1)
    client.pod.runtime["a"].exit(1)
    client.pod.advance(1)
    client.open("exec", command=["sh"], stdin=False, stdout=True, stderr=True, tty=False)
    assert client.status["reason"] == "Conflict"


def test_a_client_that_goes_takes_the_streams_along(client: Client) -> None:
    program = executed(client)
    client.send(wire.pack(wire.CLOSE, 1))
    assert not client.streams.busy
    with pytest.raises(BrokenPipeError):
        os.write(program.stdout, b"x")
    program.exit(0)
    client.pod.advance()
    assert client.status is None


def test_a_terminal_is_started_with_the_clients_size(client: Client) -> None:
    client.open("exec", command=["sh"], stdin=True, stdout=True, stderr=False, tty=True)
    assert client.pod.runtime.executed == [], "its size follows at once"
    client.send(wire.data(1, wire.RESIZE, b'{"Width": 100, "Height": 40}'))
    _, start = client.pod.runtime.executed.pop(0)
    assert start.size == (40, 100)
    master, terminal = os.openpty()
    os.set_blocking(master, False)
    start.on_started(1_000_000_007, master, "")
    client.send(wire.data(1, wire.RESIZE, b'{"Width": 90, "Height": 30}'))
    assert os.get_terminal_size(terminal) == (90, 30)
    os.write(terminal, b"prompt")
    client.pod.advance()
    assert client.heard() == b"prompt"
    client.send(wire.data(1, wire.END, bytes((wire.STDIN,))))
    os.close(terminal)
    start.on_exit(0, 0)
    client.pod.advance()
    assert client.status == {"exit_code": 0}


def test_a_terminal_whose_size_never_comes_is_started_all_the_same(client: Client) -> None:
    client.open("exec", command=["sh"], stdin=False, stdout=True, stderr=False, tty=True)
    client.pod.advance(0.2)
    assert len(client.pod.runtime.executed) == 1
    client.pod.runtime.answer(0, error="gone")


# Logs


def test_logs_so_far(client: Client) -> None:
    client.pod.runtime["a"].write(b"one\ntwo\n")
    client.pod.advance()
    client.open("logs")
    assert client.heard() == b"one\ntwo\n"
    assert client.closed


def test_logs_are_followed_to_the_end_of_the_run(client: Client) -> None:
    client.open("logs", follow=True)
    client.pod.runtime["a"].write(b"one\n")
    client.pod.advance()
    assert client.heard() == b"one\n"
    assert not client.closed
    client.pod.runtime["a"].write(b"two\n")
    client.pod.runtime["a"].exit(0)
    client.pod.advance()
    assert client.heard() == b"one\ntwo\n"
    assert client.closed, "not with the container, which starts again"


def test_the_log_of_the_previous_run(client: Client) -> None:
    client.open("logs", previous=True)
    assert client.status["error"] == 'previous terminated container "a" in pod "p" not found'
    client.frames.clear()
    client.pod.runtime["a"].write(b"first\n")
    client.pod.advance()
    client.pod.runtime["a"].exit(1)
    client.pod.advance(1)
    client.open("logs", previous=True)
    assert client.heard() == b"first\n"


def test_a_follower_that_goes_is_forgotten(client: Client) -> None:
    client.open("logs", follow=True)
    client.send(wire.pack(wire.CLOSE, 1))
    assert client.pod.container("a").log_listeners == []


def test_a_session_that_breaks_is_told_and_the_runner_goes_on(client: Client) -> None:
    client.open("logs", since_time="yesterday")
    assert client.status["reason"] == "InternalError"
    client.frames.clear()
    client.open("logs")
    assert client.closed
