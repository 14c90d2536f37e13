"""What a person at a login host holds on to: srun's parent, which turns Ctrl-C into an orderly end.

Left alone with the terminal, srun answers a second Ctrl-C (and a SIGTERM) by SIGKILL for every process of the job at once,
and nobody is left to remove what the run had on its hosts. Here the first reaches COMMAND, the second ends the run: both
as a SIGINT that srun hands on. Never sends srun two within a second, for that is what makes it kill.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence

_PR_SET_PDEATHSIG = 1
# srun counts whole seconds.
_APART_S = 2.1
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_WATCHED = (*_ENDING, *_HANDED_ON, signal.SIGCHLD)
_ENOUGH = 2
_PIECE_BYTES = 65536


def front(argv: Sequence[str], env: Mapping[str, str], *, in_job: bool) -> int:
    """Run srun to its end and return its exit code. `in_job`: Slurm's own signals reach the step without us."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in _WATCHED:
        signal.signal(number, lambda _number, _frame: None)
    # The terminal's signals are for us alone, and then only we may read from it.
    pumped = sys.stdin.isatty()
    child = subprocess.Popen(
        argv, env=dict(env), stdin=subprocess.PIPE if pumped else None, preexec_fn=_stand_aside
    )
    if pumped:
        threading.Thread(target=_pump, args=(child,), daemon=True).start()
    return _attend(child, reader, in_job)


def _stand_aside() -> None:
    """In the child: a process group of its own, which may write to the terminal; ended when we are."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGINT), 0, 0, 0)


def _pump(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    try:
        while piece := os.read(0, _PIECE_BYTES):
            child.stdin.write(piece)
            child.stdin.flush()
        child.stdin.close()
    except OSError:
        pass  # it ended, or the terminal did


def _attend(child: subprocess.Popen[bytes], reader: int, in_job: bool) -> int:
    wanted = sent = 0
    next_s = 0.0
    while (code := child.poll()) is None:
        left_s = max(0.0, next_s - time.monotonic()) if wanted > sent else None
        if select.select([reader], [], [], left_s)[0]:
            for number in os.read(reader, _PIECE_BYTES):
                wanted = _wanted(number, wanted, in_job)
                if number in _HANDED_ON:
                    child.send_signal(number)
        if wanted > sent and time.monotonic() >= next_s:
            child.send_signal(signal.SIGINT)
            sent, next_s = sent + 1, time.monotonic() + _APART_S
    return code if code >= 0 else 128 - code


def _wanted(number: int, wanted: int, in_job: bool) -> int:
    """How often COMMAND should be interrupted in all: Ctrl-C asks, then insists; the other signals insist at once."""
    if number == signal.SIGINT:
        return min(wanted + 1, _ENOUGH)
    if number in _ENDING and not in_job:
        return _ENOUGH
    return wanted
