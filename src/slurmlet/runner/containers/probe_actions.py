"""What probes and hooks do: run a command in the container, look at a server, wait. Each ends in one callback.

Nothing blocks the loop: a command is a process of the container, a look is a fork, a wait is a timer.
"""

from __future__ import annotations

import os
import signal

from slurmlet.linux.event_loop import Timer, pipe
from slurmlet.runner.containers.container_runtime import Start
from slurmlet.runner.containers.pod_context import PodContext

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Optional

    from slurmlet.protocol.pod_plan import Action as ActionPlan
    from slurmlet.protocol.pod_plan import NetworkAction

    OnOutcome = Callable[[bool, str], None]


_MAX_OUTPUT = 10 << 10
# (succeeded, what to tell)


class Action:
    """One run of an action; `cancel` makes its outcome nobody's business any more."""

    def __init__(
        self,
        context: PodContext,
        container: Any,
        action: ActionPlan,
        timeout_s: Optional[float],
        on_outcome: OnOutcome,
    ) -> None:
        self._context, self._container = context, container
        self._on_outcome: Optional[OnOutcome] = on_outcome
        self._timer: Optional[Timer] = None
        self._pid = 0
        if timeout_s is not None:
            # A little more than the look itself gets, so that its own words about a timeout arrive first.
            slack_s = 0.0 if action["kind"] == "exec" else 0.5
            self._timer = context.loop.later(timeout_s + slack_s, lambda: self._timed_out(timeout_s))
        if action["kind"] == "exec":
            self._execute([str(word) for word in action["argv"]])
        elif action["kind"] == "sleep":
            self._sleep = context.loop.later(float(action["seconds"]), lambda: self._done(True, ""))
        else:
            self._look(action, timeout_s)

    def cancel(self) -> None:
        self._on_outcome = None
        self._end()

    def _look(self, action: NetworkAction, timeout_s: Optional[float]) -> None:
        network = self._context.network

        def work() -> Any:
            from slurmlet.runner.containers.probe_checks import check

            return check(action, network.address(), timeout_s or 30.0, network.connect)

        def came(value: Any, error: str) -> None:
            self._pid = 0
            self._done(*(value if value else (False, error)))

        self._pid = self._context.children.call(work, came)

    def _execute(self, argv: Any) -> None:
        container = self._container
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        reader, writer = pipe()

        def started(pid: int, _master: int, error: str) -> None:
            os.close(null)
            os.close(writer)
            if error:
                os.close(reader)
                self._done(False, error)
                return
            self._pid = pid
            if self._on_outcome is None:
                self._kill()

        def exited(code: int, _signal: int) -> None:
            self._pid = 0
            output = _drain(reader)
            os.close(reader)
            self._done(code == 0, output if output or code == 0 else f"exit code {code}")

        start = Start((null, writer, writer), False, started, exited)
        self._context.runtime.exec(container.container_id, argv, start)

    def _timed_out(self, timeout_s: float) -> None:
        self._timer = None
        on_outcome, self._on_outcome = self._on_outcome, None
        self._end()
        if on_outcome is not None:
            on_outcome(False, f"command timed out after {timeout_s:g}s")

    def _done(self, succeeded: bool, told: str) -> None:
        on_outcome, self._on_outcome = self._on_outcome, None
        self._end()
        if on_outcome is not None:
            on_outcome(succeeded, told)

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._kill()

    def _kill(self) -> None:
        if self._pid:
            try:
                os.kill(self._pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _drain(fd: int) -> str:
    """What the command said; a pipe holds no more than 64 KiB, and a command that says more is stopped by it."""
    received = b""
    while True:
        try:
            piece = os.read(fd, 65536)
        except BlockingIOError:
            break
        if not piece:
            break
        received += piece
    return received[:_MAX_OUTPUT].decode("utf-8", "replace")
