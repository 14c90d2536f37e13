"""Startup, liveness and readiness of one run of a container, by the kubelet's rules (its prober's worker).

Says what follows (`on_started`, `on_ready`, `on_unhealthy`); what to do about it is the container's business.
"""

from __future__ import annotations

import time

from slurmlet.linux.event_loop import Timer
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.containers.probe_actions import Action

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, List, Mapping, Optional, Protocol

    from slurmlet.protocol.pod_plan import Probe

    class Subject(Protocol):
        """What is probed."""

        name: str

        def probe_started(self) -> None: ...
        def probe_ready(self, ready: bool) -> None: ...
        def probe_unhealthy(self, kind: str, grace_s: Optional[int]) -> None: ...


STARTUP, LIVENESS, READINESS = "startup", "liveness", "readiness"
_TITLES = {STARTUP: "Startup", LIVENESS: "Liveness", READINESS: "Readiness"}


class Probes:
    """All probes of one run. Made when the container runs, closed when it ends."""

    def __init__(self, context: PodContext, container: Any, plans: Mapping[str, Any]) -> None:
        self._context, self._container = context, container
        self._plans = plans
        self._workers: List[_Worker] = []
        self._began_s = time.monotonic()
        self._closed = False

    @property
    def initially_started(self) -> bool:
        return STARTUP not in self._plans

    @property
    def initially_ready(self) -> bool:
        return STARTUP not in self._plans and READINESS not in self._plans

    def begin(self) -> None:
        if STARTUP in self._plans:
            self._add(STARTUP)
        else:
            self._begin_others()

    def stopping(self) -> None:
        """The pod is going: it may still become unready, but is no longer killed for its health."""
        for worker in self._workers:
            if worker.kind != READINESS:
                worker.close()

    def close(self) -> None:
        self._closed = True
        for worker in self._workers:
            worker.close()

    def _begin_others(self) -> None:
        for kind in (LIVENESS, READINESS):
            if kind in self._plans:
                self._add(kind)

    def _add(self, kind: str) -> None:
        plan: Probe = self._plans[kind]
        wait_s = max(0.0, plan["initial_delay_s"] - (time.monotonic() - self._began_s))
        self._workers.append(_Worker(self._context, self._container, kind, plan, wait_s, self._result))

    def _result(self, worker: _Worker, healthy: bool) -> None:
        if self._closed:
            return
        if worker.kind == READINESS:
            self._container.probe_ready(healthy)
        elif not healthy:
            worker.close()
            self._container.probe_unhealthy(worker.kind, worker.plan["grace_s"])
        elif worker.kind == STARTUP:
            worker.close()
            self._container.probe_started()
            if READINESS not in self._plans:
                self._container.probe_ready(True)
            self._begin_others()


class _Worker:
    """One probe: asks every period, counts, tells when a threshold is reached."""

    def __init__(
        self,
        context: PodContext,
        container: Any,
        kind: str,
        plan: Probe,
        wait_s: float,
        on_result: Callable[[_Worker, bool], None],
    ) -> None:
        self.kind, self.plan = kind, plan
        self._context, self._container, self._on_result = context, container, on_result
        self._last: Optional[bool] = None
        self._run = 0
        self._action: Optional[Action] = None
        self._due_s = time.monotonic() + wait_s
        self._timer: Optional[Timer] = context.loop.later(wait_s, self._ask)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._action is not None:
            self._action.cancel()
            self._action = None

    def _ask(self) -> None:
        self._action = Action(
            self._context, self._container, self.plan["action"], float(self.plan["timeout_s"]), self._came
        )

    def _came(self, healthy: bool, told: str) -> None:
        self._action = None
        self._plan_next()
        if not healthy:
            message = f"{_TITLES[self.kind]} probe failed: {told}"
            self._context.reporter.event("Warning", "Unhealthy", message, self._container.name)
        self._run = self._run + 1 if self._last is healthy else 1
        self._last = healthy
        if self._run >= self.plan["success" if healthy else "failure"]:
            self._on_result(self, healthy)

    def _plan_next(self) -> None:
        # Ticks of a fixed period, as a ticker gives them: a slow probe does not shift the next one.
        now_s = time.monotonic()
        period_s = float(self.plan["period_s"])
        self._due_s += period_s * max(1, int((now_s - self._due_s) // period_s) + 1)
        self._timer = self._context.loop.later(self._due_s - now_s, self._ask)
