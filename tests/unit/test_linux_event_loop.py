"""The loop and the one owner of children, with real pipes, signals and processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.linux.event_loop import Loop, pipe
from slurmlet.protocol import wire
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.streams.link_streams import Refused, Streams


@pytest.fixture
def loop() -> Iterator[Loop]:
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGUSR1)}
    yield Loop()
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)


def test_timers_fire_in_order_and_cancel(loop: Loop) -> None:
    seen: list[str] = []
    loop.later(0.02, lambda: seen.append("second"))
    loop.later(0.01, lambda: seen.append("first"))
    loop.later(0.015, lambda: seen.append("never")).cancel()
    loop.later(0.03, loop.stop)
    loop.run()
    assert seen == ["first", "second"]


def test_a_callback_may_drop_another_of_the_same_turn(loop: Loop) -> None:
    one, two = os.pipe(), os.pipe()
    seen: list[int] = []

    def first(mine: int, other: int) -> None:
        seen.append(mine)
        loop.forget(mine)
        loop.forget(other)
        loop.stop()

    loop.reading(one[0], lambda: first(one[0], two[0]))
    loop.reading(two[0], lambda: first(two[0], one[0]))
    os.write(one[1], b"x")
    os.write(two[1], b"x")
    loop.run()
    assert len(seen) == 1
    for fd in (*one, *two):
        os.close(fd)


def test_signals_arrive_between_callbacks(loop: Loop) -> None:
    seen: list[str] = []
    loop.on_signal(signal.SIGUSR1, lambda: (seen.append("signal"), loop.stop())[0])
    loop.soon(lambda: (os.kill(os.getpid(), signal.SIGUSR1), seen.append("callback"))[0])
    loop.run()
    assert seen == ["callback", "signal"]


def test_run_until_gives_up_in_time(loop: Loop) -> None:
    began_s = time.monotonic()
    assert loop.run_until(lambda: False, 0.05) is False
    assert time.monotonic() - began_s < 2
    assert loop.run_until(lambda: True, 5) is True


def spawn(children: Children, loop: Loop, code: str) -> tuple[int, int, bytes]:
    reader, writer = pipe()
    null = os.open(os.devnull, os.O_RDWR)
    ended: list[tuple[int, int]] = []
    argv = [sys.executable, "-I", "-S", "-c", code]
    children.spawn(
        argv, lambda exit_code, number: ended.append((exit_code, number)), stdio=(null, writer, writer)
    )
    os.close(writer)
    assert loop.run_until(lambda: bool(ended), 20)
    out = os.read(reader, 65536)
    os.close(reader)
    os.close(null)
    return (*ended[0], out)


def test_exit_status_and_signal_are_exact(loop: Loop) -> None:
    children = Children(loop)
    assert spawn(children, loop, "print('hi'); raise SystemExit(7)") == (7, 0, b"hi\n")
    assert spawn(children, loop, "import os; os.kill(os.getpid(), 9)")[:2] == (137, 9)


def test_programs_start_with_default_signals(loop: Loop) -> None:
    code = "import signal; print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, signal.pthread_sigmask(0, []))"
    assert spawn(Children(loop), loop, code)[2] == b"True set()\n"


def test_work_in_a_fork_answers_or_explains(loop: Loop) -> None:
    children, answers = Children(loop), []

    def note(value: Any, error: str) -> None:
        answers.append((value, error))

    def fail() -> None:
        raise ValueError("no good")

    children.call(lambda: {"tree": "/x"}, note)
    children.call(fail, note)
    children.call(lambda: os._exit(9), note)
    assert loop.run_until(lambda: len(answers) == 3, 20)
    assert ({"tree": "/x"}, "") in answers
    assert (None, "no good") in answers
    assert (None, "the worker process ended with 9") in answers


def test_a_child_that_ended_before_it_was_known_is_not_lost(loop: Loop) -> None:
    children, ended = Children(loop), []
    children.begin_start()
    pid = os.fork()
    if pid == 0:
        os._exit(5)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    children.reap()
    children.adopt(pid, lambda code, number: ended.append((code, number)))
    children.end_start()
    assert loop.run_until(lambda: bool(ended), 5)
    assert ended == [(5, 0)]


class Echo:
    """A session that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def received(self, channel: int, payload: bytes) -> None:
        self.told.append((channel, payload))

    def more_credit(self) -> None:
        self.told.append("credit")

    def abandoned(self) -> None:
        self.told.append("abandoned")


def test_streams_route_and_forget() -> None:
    sent: list[bytes] = []
    echo = Echo()
    kept: list[Any] = []
    streams = Streams(sent.append, lambda _message, stream: (kept.append(stream), echo)[1])
    streams.open({"stream": 3})
    streams.frame(wire.Frame(wire.DATA, 3, b"\x00hello"))
    streams.frame(wire.Frame(wire.WINDOW, 3, (5).to_bytes(4, "big")))
    assert kept[0].credit == wire.INITIAL_WINDOW + 5
    streams.frame(wire.Frame(wire.DATA, 9, b"\x00lost"))
    streams.frame(wire.Frame(wire.CLOSE, 3, b""))
    streams.frame(wire.Frame(wire.DATA, 3, b"\x00late"))
    assert echo.told == [(0, b"hello"), "credit", "abandoned"]


def test_a_refused_stream_says_why_and_closes() -> None:
    sent: list[bytes] = []

    def refuse(_message: Any, _stream: Any) -> Any:
        raise Refused("not now", "Conflict")

    Streams(sent.append, refuse).open({"stream": 1})
    frames = list(wire.Decoder().feed(b"".join(sent)))
    assert [frame.kind for frame in frames] == [wire.DATA, wire.CLOSE]
    assert b"not now" in frames[0].payload
