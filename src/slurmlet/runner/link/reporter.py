"""What the runner says about the pod: the whole PodReport on each change, events, the last word.

The report on the shared file system (`report.json`) is for a hub that was away at the end; it is written at the start,
at each change of phase and at the end, not on every change: it may lie on a slow file system.
"""

from __future__ import annotations

import json
import os
import sys
import time

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Final, Optional

    from slurmlet.protocol.pod_report import ContainerReport, Phase, PodReport

STARTING: Final = "Starting"
RUNNING: Final = "Running"
STOPPING: Final = "Stopping"
DONE: Final = "Done"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_container_report(reason: str, image: str) -> ContainerReport:
    return {
        "image": image,
        "state": "waiting",
        "reason": reason,
        "message": "",
        "started_at": None,
        "finished_at": None,
        "exit_code": None,
        "signal": None,
        "container_id": "",
        "restart_count": 0,
        "started": False,
        "ready": False,
        "last": None,
    }


def keep_last_run(report: ContainerReport) -> None:
    """The run that has ended becomes the previous one."""
    report["last"] = {
        "reason": report["reason"],
        "message": report["message"],
        "started_at": report["started_at"],
        "finished_at": report["finished_at"],
        "exit_code": report["exit_code"],
        "signal": report["signal"],
        "container_id": report["container_id"],
    }
    report.update({"exit_code": None, "signal": None, "finished_at": None, "started": False, "ready": False})


def restore_last_run(report: ContainerReport) -> bool:
    """The previous run is the container's state after all; False when there was none."""
    last, report["last"] = report["last"], None
    if last is None:
        return False
    report.update(last)  # type: ignore[typeddict-item] # a part of the report's own fields
    report["state"], report["ready"] = "terminated", False
    return True


def set_waiting(report: ContainerReport, reason: str, message: str) -> None:
    report.update(
        {"state": "waiting", "reason": reason, "message": message, "started": False, "ready": False}
    )


class Reporter:
    def __init__(self, loop: Loop, path: str, send: Callable[[bytes], None]) -> None:
        """`path` is that of report.json."""
        self._loop, self._path, self._send = loop, path, send
        self._seq = 0
        self._acked = 0
        self._due = False
        self._written = ""
        self.report: PodReport = {
            "phase": STARTING,
            "started_at": now(),
            "exit_code": None,
            "problem": None,
            "init_containers": {},
            "containers": {},
        }
        self._write_if_new_phase()

    def changed(self) -> None:
        """Several changes of one turn of the loop make one report."""
        if not self._due:
            self._due = True
            self._loop.soon(self._report)

    def set_phase(self, phase: Phase) -> None:
        if self.report["phase"] != phase:
            self.report["phase"] = phase
            self.changed()

    def problem(self, reason: str, message: str) -> None:
        """The first pod-level failure is the one that explains the others."""
        if self.report["problem"] is None:
            self.report["problem"] = {"reason": reason, "message": message}
            self.changed()

    def event(self, kind: str, reason: str, message: str, container: str = "") -> None:
        self._send(
            wire.control(
                {"type": "event", "kind": kind, "reason": reason, "message": message, "container": container}
            )
        )

    def send_again(self) -> None:
        """After the link came back: the hello carried the report, acks start anew."""
        self.changed()

    def acked(self, seq: int) -> None:
        self._acked = max(self._acked, seq)

    @property
    def all_acked(self) -> bool:
        return self._acked >= self._seq

    def bye(self) -> None:
        self._write_if_new_phase()
        self._seq += 1
        self._send(wire.control({"type": "bye", "seq": self._seq, "report": self.report}))

    def _report(self) -> None:
        self._due = False
        self._write_if_new_phase()
        self._seq += 1
        self._send(wire.control({"type": "report", "seq": self._seq, "report": self.report}))

    def _write_if_new_phase(self) -> None:
        if self._written == self.report["phase"]:
            return
        self._written = self.report["phase"]
        _write(self._path, self.report)


def write_atomically(path: str, content: bytes) -> None:
    """A reader on another host sees the old file or the new one, never a part."""
    temporary = f"{path}.{os.uname().nodename}.{os.getpid()}.new"
    handle = os.open(temporary, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)


def _write(path: str, report: PodReport) -> None:
    try:
        write_atomically(path, (json.dumps(report) + "\n").encode())
    except OSError as error:
        # The pod's directory may be gone (pod deleted) or its file system away; the pod goes on.
        print(f"report.json: {error}", file=sys.stderr, flush=True)


def write_failure(path: str, reason: str, message: str, exit_code: Optional[int] = 1) -> None:
    """A last report of a runner that never got as far as a sandbox."""
    report: PodReport = {
        "phase": DONE,
        "started_at": now(),
        "exit_code": exit_code,
        "problem": {"reason": reason, "message": message},
        "init_containers": {},
        "containers": {},
    }
    _write(path, report)
