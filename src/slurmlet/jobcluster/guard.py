"""The task's own process: holds the run's directories, waits for the driver, and leaves nothing behind.

Everything that the driver starts is a descendant of this process and falls to it when its parent dies. So whatever ends
the driver (its work done, an error, kill -9), the rest is ended and removed here. If this process is killed, the driver
hears of it and does the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from pathlib import Path
from typing import Any

from slurmlet.agent.runner_forks import sweep
from slurmlet.jobcluster import run_directories
from slurmlet.jobcluster.allocation import Task
from slurmlet.jobcluster.arguments import Request
from slurmlet.model.allocation_node import node_name

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_CLEAR_S = 3.0


def guarded_run(task: Task, request: Request) -> int:
    """The exit code of the run; a run whose command was ended by a signal ends by the same one."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    where = run_directories.of_run(task.key, os.environ)
    lock = run_directories.make(where)
    signal.pthread_sigmask(signal.SIG_BLOCK, _FORWARDED)
    guard = os.getpid()
    driver = os.fork()
    if driver == 0:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os._exit(_drive(task, request, where, guard))
    status = _wait_for(driver)
    _leave_nothing(task, where)
    os.close(lock)
    return end_as(status)


def _drive(task: Task, request: Request, where: run_directories.RunPlaces, guard: int) -> int:
    from slurmlet.jobcluster.driver import Driver

    status = Driver(task, request, where).run()
    if os.getppid() != guard:
        _leave_nothing(task, where)
    return end_as(status)


def _leave_nothing(task: Task, where: run_directories.RunPlaces) -> None:
    end_descendants()
    # Pods whose runner was killed; the agents of other hosts do the same for theirs.
    sweep(str(where.shared), node_name(task.host))
    run_directories.remove(where)


def _wait_for(pid: int) -> int:
    def forward(number: int, _frame: Any) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in _FORWARDED:
        signal.signal(number, forward)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _FORWARDED)
    while True:
        found, status = os.waitpid(-1, 0)
        if found == pid:
            return status


def end_as(status: int) -> int:
    """Turn a wait status into an exit code, or die by the signal it tells of."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    return os.WEXITSTATUS(status)


def end_descendants() -> None:
    """Kill what is left below this process, generation by generation, until nothing is."""
    deadline_s = time.monotonic() + _CLEAR_S
    while (children := _children()) and time.monotonic() < deadline_s:
        for pid in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.005)


def _children() -> list[int]:
    try:
        return [int(word) for word in Path("/proc/thread-self/children").read_text().split()]
    except OSError:
        return []
