"""How the workload of a run hears what is typed: a real shell, which waits for what it started."""

from __future__ import annotations

import signal
import subprocess

import pytest

from slurmlet.jobcluster import driver


def _hearing() -> None:
    """In a child: whoever runs these tests in the background ignores what is typed, and so would it."""
    for number in (signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT])
def test_what_is_typed_ends_what_a_shell_waits_for_and_then_the_shell(number: signal.Signals) -> None:
    argv = ["sh", "-c", "ulimit -c 0; cat; cat"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0, preexec_fn=_hearing
    ) as made:
        assert made.stdin is not None
        assert made.stdout is not None
        made.stdin.write("the first is there\n")
        made.stdin.flush()
        assert made.stdout.readline() == "the first is there\n"
        driver._send(made.pid, number)
        # A shell that heard nothing, or alone, would still wait for one of them.
        assert made.wait(10) in (-number, 128 + number)


def test_a_command_in_the_group_of_its_driver_is_told_alone() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=_hearing) as made:
        # This very process would hear it too.
        driver._send(made.pid, signal.SIGINT)
        assert made.wait(10) == -signal.SIGINT
