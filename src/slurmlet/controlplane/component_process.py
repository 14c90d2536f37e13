"""One supervised process: started so that it cannot outlive the supervisor, stopped by SIGTERM, then by SIGKILL."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.controlplane.cluster_config import now
from slurmlet.controlplane.components import HEALTHY_AFTER_S, Component
from slurmlet.controlplane.run_files import start_ticks

FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 30.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None, use_errno=True)


def next_backoff(current_s: float, ran_s: float, healthy_after_s: float = HEALTHY_AFTER_S) -> float:
    """How long to wait before the start after this death; `current_s` is the wait before this run, 0 at first."""
    if current_s == 0 or ran_s >= healthy_after_s:
        return FIRST_BACKOFF_S
    return min(current_s * 2, LONGEST_BACKOFF_S)


def adopt_orphans() -> None:
    """What a component leaves behind becomes our child, so that nothing outlives `down`."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own_pids: set[int]) -> None:
    """Collect dead adopted processes; the components' own deaths are left to their Popen."""
    while True:
        try:
            seen = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if seen is None or seen.si_pid in own_pids:
            return
        os.waitpid(seen.si_pid, os.WNOHANG)


def kill_adopted(own_pids: set[int]) -> None:
    """End what a component left behind, with the group it leads: a site's sbatch may be a script around the real one."""
    with contextlib.suppress(OSError):
        for word in Path("/proc/thread-self/children").read_text().split():
            if int(word) not in own_pids:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(int(word), signal.SIGKILL)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(int(word), signal.SIGKILL)


@dataclass
class Child:
    """The one mutable thing here: a component and the state of its process."""

    component: Component
    log: Path
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    since: str = ""
    held: bool = False  # stopped on purpose: not to be started again
    last_exit: int | None = None
    backoff_s: float = 0.0
    due_s: float = 0.0
    began_s: float = 0.0
    log_offset: int = 0
    ticks: int | None = None

    def start(self) -> None:
        parent = os.getpid()

        def tie_to_parent() -> None:
            # SIGKILL, because a component that is slow to end would still hold the data when the next `up` comes.
            _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)
            # The supervisor blocks the signals it waits for; its children must not.
            signal.pthread_sigmask(signal.SIG_SETMASK, set())

        handle = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            self.log_offset = os.fstat(handle).st_size
            # base/processes.run waits for an end; these are meant to stay, hence Popen itself.
            self.process = subprocess.Popen(
                list(self.component.argv),
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                env=dict(self.component.environment),
                cwd="/",
                start_new_session=True,
                preexec_fn=tie_to_parent,
            )
        finally:
            os.close(handle)
        self.began_s = time.monotonic()
        self.since = now()
        self.ticks = start_ticks(self.process.pid)

    def died(self) -> bool:
        """True once per death; schedules the next start."""
        if self.process is None or self.process.poll() is None:
            return False
        self.last_exit = self.process.returncode
        self.sweep()
        self.process = None
        self.restarts += 1
        ran_s = time.monotonic() - self.began_s
        self.backoff_s = next_backoff(self.backoff_s, ran_s, self.component.healthy_after_s)
        self.due_s = time.monotonic() + self.backoff_s
        return True

    def stop(self, grace_s: float | None = None) -> None:
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(self.component.stop_grace_s if grace_s is None else grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.last_exit = self.process.returncode
        self.sweep()
        self.process = None

    def sweep(self) -> None:
        """End what is left of the component's process group."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def said_since_start(self, most_bytes: int = 16384) -> str:
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self.log_offset, size - most_bytes))
            return file.read().decode(errors="replace")
        return ""

    def describe(self) -> dict[str, Any]:
        return {
            "pid": self.process.pid if self.process else None,
            "start_ticks": self.ticks if self.process else None,
            "restarts": self.restarts,
            "since": self.since,
            "last_exit": self.last_exit,
            "held": self.held,
        }
