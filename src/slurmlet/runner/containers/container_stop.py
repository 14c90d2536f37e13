"""How one container is made to end: preStop hook, stop signal, SIGKILL when the grace is over. The kubelet's order."""

from __future__ import annotations

import signal
import time

from slurmlet.linux.event_loop import Timer
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.containers.probe_actions import Action

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Optional


# A hook may use up all of the grace; the kubelet leaves the container this much all the same.
_LEAST_GRACE_S = 2.0


class Termination:
    """For one container, over all its runs."""

    def __init__(self, context: PodContext, container: Any) -> None:
        self._context, self._container = context, container
        self._under_way = False
        # Whether the present run was ended by a SIGKILL of ours.
        self.killed = False
        self._timer: Optional[Timer] = None
        self._hook: Optional[Action] = None

    def begin(self, grace_s: float) -> None:
        """Called again: only the time that is left changes."""
        self._kill_after(grace_s)
        first, self._under_way = not self._under_way, True
        if not first or grace_s <= 0:
            return
        pre_stop = self._container.plan.get("pre_stop")
        if pre_stop:
            self._hook = Action(self._context, self._container, pre_stop, grace_s, self._pre_stopped)
        else:
            self._ask()

    def over(self) -> None:
        """The container has ended."""
        self._under_way = self.killed = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._hook is not None:
            self._hook.cancel()
            self._hook = None

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _pre_stopped(self, succeeded: bool, told: str) -> None:
        self._hook = None
        if not succeeded:
            self._container.event("Warning", "FailedPreStopHook", f"PreStopHook failed: {told}")
        left_s = self._timer.due_s - time.monotonic() if self._timer is not None else 0.0
        if left_s < _LEAST_GRACE_S:
            self._kill_after(_LEAST_GRACE_S)
        self._ask()

    def _ask(self) -> None:
        self._signal(_signal_number(str(self._container.plan.get("stop_signal") or "SIGTERM")))

    def _kill_after(self, grace_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._context.loop.later(max(0.0, grace_s), self.kill)

    def _signal(self, number: int) -> None:
        if not self._container.running:
            return
        self.killed = self.killed or number == signal.SIGKILL
        self._context.runtime.signal(self._container.container_id, number)


def _signal_number(name: str) -> int:
    if name.isdigit():
        return int(name)
    full = name.upper() if name.upper().startswith("SIG") else "SIG" + name.upper()
    return int(getattr(signal, full.split("+")[0], signal.SIGTERM))
