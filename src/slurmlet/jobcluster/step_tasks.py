"""Where a task of the step begins: the first one drives the run, the others serve their hosts."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.jobcluster import allocation, run_directories
from slurmlet.jobcluster.arguments import Request
from slurmlet.model.allocation_node import node_name

_POLL_S = 0.05


def run(request: Request) -> int:
    """`slurmlet run`, wherever it is typed. Returns the exit code, or does not return: at a terminal it becomes srun."""
    task = allocation.task_here(os.environ)
    if task is None:
        return _ask_srun(request)
    if task.drives:
        from slurmlet.jobcluster.guard import guarded_run

        return guarded_run(task, request)
    if task.is_first_here:
        _become_agent(task, request.timeout_s)
    return 0


def _ask_srun(request: Request) -> int:
    terminal = not request.command and not request.wait and sys.stdin.isatty()
    if sys.stderr.isatty() and not request.verbose:
        from dataclasses import replace

        request = replace(request, verbose=True)
    program = [sys.executable, "-P", "-m", "slurmlet.jobcluster", *request.inner_words()]
    argv = allocation.srun_argv(os.environ, request.srun, program, terminal=terminal)
    around = allocation.srun_environment(os.environ)
    try:
        if terminal:
            # What is typed goes to the shell over there, Ctrl-C included.
            os.execvpe(argv[0], argv, around)  # noqa: S606
        from slurmlet.jobcluster.login_side import front

        return front(argv, around, in_job="SLURM_JOB_ID" in os.environ)
    except FileNotFoundError as error:
        raise SlurmletError(
            "srun is not in PATH on this host", hint="Run it on a login node, or inside a job."
        ) from error


def _become_agent(task: allocation.Task, timeout_s: float) -> None:
    shared = run_directories.shared_of(task.key)
    if not _appears(shared / "nodes" / node_name(task.host), "runner.pem", timeout_s):
        print(f"slurmlet: {task.host} heard nothing of the first host of its job", file=sys.stderr)
        return
    argv = allocation.agent_argv(shared, task.host)
    log = os.open(
        shared / "nodes" / node_name(task.host) / "agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    os.dup2(log, 2)
    os.execv(argv[0], argv)  # noqa: S606


def _appears(directory: Path, name: str, timeout_s: float) -> bool:
    """Listed, not looked up by name: NFS remembers for long that a name was not there."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        for parent in (directory.parent.parent, directory.parent, directory):
            names = _names(parent)
        if name in names:
            return True
        time.sleep(_POLL_S)
    return False


def _names(directory: Path) -> Sequence[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208
    except OSError:
        return ()
