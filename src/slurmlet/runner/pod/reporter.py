"""What the runner says about the pod: the whole PodReport on each change, events, the last word.

The report on the shared file system (`report.json`) is for a hub that was away at the end; it is written at the start,
at each change of phase and at the end, not on every change: it may lie on a slow file system.
"""

from __future__ import annotations

import json
import sys
import time

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.runner.pod.claim import PodDir, write_atomically

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional


STARTING, RUNNING, STOPPING, DONE = "Starting", "Running", "Stopping", "Done"


def now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def new_container_report(reason: str, image: str) -> Dict[str, Any]:
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


class Reporter:
    def __init__(self, loop: Loop, pod: PodDir, send: Callable[[bytes], None]) -> None:
        self._loop, self._pod, self._send = loop, pod, send
        self._seq = 0
        self._acked = 0
        self._due = False
        self._written = ""
        self.report: Dict[str, Any] = {
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

    def set_phase(self, phase: str) -> None:
        if self.report["phase"] != phase:
            self.report["phase"] = phase
            self.changed()

    def problem(self, reason: str, message: str) -> None:
        """The first pod-level failure is the one that explains the others."""
        if self.report["problem"] is None:
            self.report["problem"] = {"reason": reason, "message": message}
            self.changed()

    def event(self, kind: str, reason: str, message: str, container: str = "") -> None:
        self._send(wire.control("event", kind=kind, reason=reason, message=message, container=container))

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
        self._send(wire.control("bye", seq=self._seq, report=self.report))

    def _report(self) -> None:
        self._due = False
        self._write_if_new_phase()
        self._seq += 1
        self._send(wire.control("report", seq=self._seq, report=self.report))

    def _write_if_new_phase(self) -> None:
        if self._written == self.report["phase"]:
            return
        self._written = self.report["phase"]
        _write(self._pod, self.report)


def _write(pod: PodDir, report: Dict[str, Any]) -> None:
    try:
        write_atomically(pod.file("report.json"), (json.dumps(report) + "\n").encode())
    except OSError as error:
        # The pod's directory may be gone (pod deleted) or its file system away; the pod goes on.
        print(f"report.json: {error}", file=sys.stderr, flush=True)


def leave_word(pod: PodDir, reason: str, message: str, exit_code: Optional[int] = 1) -> None:
    """A last report of a runner that never got as far as a sandbox."""
    report = {
        "phase": DONE,
        "started_at": now(),
        "exit_code": exit_code,
        "problem": {"reason": reason, "message": message},
        "init_containers": {},
        "containers": {},
    }
    _write(pod, report)
