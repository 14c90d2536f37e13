"""What stands between the terminal and srun: real processes, with a program in srun's place that tells what it hears."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from slurmlet.jobcluster import login_side

LISTENER = """
import os, signal, sys, time
heard = []
def say(*words):
    # Not print: a signal may come while the last line is being written, and a buffer may not be entered twice.
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def hear(number, frame):
    say(signal.Signals(number).name, time.monotonic())
    heard.append(number)
    if heard.count(signal.SIGINT) == 2:
        sys.exit(7)
for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, hear)
say("ready")
for _ in range(100):
    time.sleep(0.05)
"""
FRONT = """
import os, sys
from slurmlet.jobcluster import login_side as fronting
fronting._APART_S = 0.4
sys.exit(fronting.front([sys.executable, "-c", sys.argv[1]], os.environ, in_job=False))
"""


@pytest.fixture
def front() -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", FRONT, LISTENER]
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def heard(process: subprocess.Popen[str]) -> list[tuple[str, float]]:
    assert process.stdout is not None
    found = [line.split() for line in process.stdout.read().splitlines()]
    return [(name, float(when_s)) for name, when_s in found]


def test_two_in_a_hurry_arrive_apart_and_the_exit_code_comes_back(front: subprocess.Popen[str]) -> None:
    for _ in range(5):
        front.send_signal(signal.SIGINT)
        time.sleep(0.05)
    assert front.wait(5) == 7
    (first, first_s), (second, second_s) = heard(front)
    assert (first, second) == ("SIGINT", "SIGINT")
    assert second_s - first_s > 0.3


def test_a_request_to_end_is_never_handed_on_as_it_is(front: subprocess.Popen[str]) -> None:
    front.send_signal(signal.SIGTERM)
    assert front.wait(5) == 7
    assert [name for name, _ in heard(front)] == ["SIGINT", "SIGINT"]


def test_signals_of_the_persons_own_are_handed_on(front: subprocess.Popen[str]) -> None:
    front.send_signal(signal.SIGUSR1)
    time.sleep(0.1)
    front.send_signal(signal.SIGTERM)
    front.wait(5)
    assert heard(front)[0][0] == "SIGUSR1"


def test_its_death_is_an_interrupt(front: subprocess.Popen[str]) -> None:
    front.kill()
    front.wait(5)
    assert front.stdout is not None
    assert front.stdout.readline().startswith("SIGINT ")


def test_inside_a_job_slurm_tells_the_step_itself() -> None:
    assert login_side._wanted(signal.SIGTERM, 0, in_job=True) == 0
    assert login_side._wanted(signal.SIGINT, 0, in_job=True) == 1
