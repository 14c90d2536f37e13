"""The pod as a whole: which container runs when, when one starts again, how the pod ends. The kubelet's rules.

Init containers one after another; those marked `sidecar` are started in that order and kept; then all containers
together. Sidecars are stopped last, in reverse order.
"""

from __future__ import annotations

import time

from slurmlet.runner.containers.container import (
    EPHEMERAL,
    INIT,
    MAIN,
    MAX_CREATE_FAILURES,
    SIDECAR,
    Container,
)
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.link import reporter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, List, Optional, Set

    from slurmlet.protocol.pod_plan import ContainerPlan, RestartRule


# What a sidecar gets when the containers before it used up the grace; the kubelet's minimum.
_LEAST_GRACE_S = 2.0
_LOOK_AGAIN_S = 0.2


class Lifecycle:
    def __init__(self, context: PodContext, on_done: Callable[[int], None]) -> None:
        self._context, self._on_done = context, on_done
        plan = context.plan
        self._policy = str(plan.get("restart_policy") or "Always")
        self._init = [
            self._make(each, SIDECAR if each.get("sidecar") else INIT) for each in plan["init_containers"]
        ]
        self._main = [self._make(each, MAIN) for each in plan["containers"]]
        report = context.reporter.report
        report["init_containers"] = {each.name: each.report for each in self._init}
        report["containers"] = {each.name: each.report for each in self._main}
        # Come while the pod runs, are never started again and count for nothing but themselves.
        self._ephemeral: List[Container] = []
        report["ephemeral_containers"] = {}
        self._next_init = 0
        # Init containers that were started since the pod's first start, or since all were started anew.
        self._begun: Set[str] = set()
        self._restarting_all = False
        self._main_started = False
        self._failed = False
        self._stop_by_s: Optional[float] = None
        self._done = False

    def _make(self, plan: ContainerPlan, kind: str) -> Container:
        self._context.scratch.use_image(plan["image_dir"])
        return Container(self._context, plan, kind, self._changed)

    def find(self, name: str) -> Optional[Container]:
        return next((each for each in self.all_containers() if each.name == name), None)

    def add_ephemeral(self, plan: ContainerPlan) -> None:
        """A container for looking into the running pod. One that is known already is left as it is."""
        if self._done or self._stop_by_s is not None or self.find(str(plan["name"])) is not None:
            return
        # `target` names the container whose processes it is to see.
        target = self.find(str(plan.get("target") or ""))
        if target is not None and target.running:
            plan = {**plan, "target_pid": target.root_pid}
        container = self._make(plan, EPHEMERAL)
        self._ephemeral.append(container)
        self._context.reporter.report["ephemeral_containers"][container.name] = container.report
        container.start()

    def redefine(self, plan: ContainerPlan) -> None:
        """Another image for a container. One that is just being made is left to become what it was to be first."""
        container = self.find(str(plan["name"]))
        if container is None or self._done or self._stop_by_s is not None:
            return
        if container.busy:
            self._context.loop.later(_LOOK_AGAIN_S, lambda: self.redefine(plan))
            return
        self._context.scratch.use_image(plan["image_dir"])
        container.redefine(plan)
        self._context.reporter.changed()

    def start(self) -> None:
        self._context.reporter.changed()
        self._go_on()

    def stop(self, grace_s: float) -> None:
        """End the pod as the kubelet would; a later call may only shorten the grace."""
        if self._done:
            return  # the last report is said, and must stay the last
        by_s = time.monotonic() + grace_s
        self._stop_by_s = by_s if self._stop_by_s is None else min(by_s, self._stop_by_s)
        self._context.reporter.set_phase(reporter.STOPPING)
        self._go_on()

    @property
    def exit_code(self) -> int:
        """The first failure in the order of the pod; sidecars do not count, as in Kubernetes."""
        for each in (*self._init, *self._main):
            if each.kind != SIDECAR and each.failed:
                return each.report["exit_code"] or 1
        return 1 if self._failed or self._context.reporter.report["problem"] else 0

    # What happens next. Called after every change; looks at the whole and does what is due.

    def _changed(self, container: Container) -> None:
        self._context.reporter.changed()
        if self._stop_by_s is None:
            if self._restarting_all or self._asks_for_all(container):
                self._restart_all()
                return
            if container.ended and not self._over(container):
                self._start_again(container)
        self._go_on()

    def _asks_for_all(self, container: Container) -> bool:
        rule = self._rule(container) if container.ended and container.terminated else None
        return rule is not None and rule.get("action") == "RestartAllContainers"

    def _restart_all(self) -> None:
        """End all containers without grace; once all have ended begin again with the first init container."""
        self._restarting_all = self._context.reporter.report["restarting_all"] = True
        every = [*self._init, *self._main]
        for each in every:
            each.interrupt()
        if not all(each.ended for each in every):
            return
        self._restarting_all = self._context.reporter.report["restarting_all"] = False
        self._begun.clear()
        self._next_init, self._main_started = 0, False
        self._go_on()

    def _rule(self, container: Container) -> Optional[RestartRule]:
        """The first of its restart rules that its exit code meets."""
        code = container.report["exit_code"]
        rules = container.plan["restart_rules"]
        return next((rule for rule in rules if (code in rule["values"]) == (rule["operator"] == "In")), None)

    def _start_again(self, container: Container) -> None:
        if container.create_failures < MAX_CREATE_FAILURES:
            container.start_again()
            return
        # Without an end, a container that can never be made would hold the allocation for nothing.
        message = f"container {container.name} could not be created: {container.report['message']}"
        self._context.reporter.problem("CreateContainerError", message)
        self._failed = True

    def _over(self, container: Container) -> bool:
        """The container has ended for good."""
        if self._failed or container.kind == EPHEMERAL:
            return True
        if not container.terminated or container.redefined:
            return False
        if container.kind == SIDECAR:
            return self._main_over()
        if container.kind == INIT and not container.failed:
            return True
        return not self._restarts(container)

    def _restarts(self, container: Container) -> bool:
        """Whether an ended container starts again: its own rules, its own policy, the pod's policy, in that order."""
        if self._rule(container) is not None:
            return True
        policy = container.plan.get("restart_policy") or self._policy
        if container.kind == INIT and policy == "Always":
            policy = "OnFailure"
        return bool(policy == "Always" or (policy == "OnFailure" and container.failed))

    def _main_over(self) -> bool:
        return self._failed or (
            self._main_started and all(each.ended and self._over(each) for each in self._main)
        )

    def _go_on(self) -> None:
        if self._done:
            return
        if self._stop_by_s is not None:
            self._stop_all(self._stop_by_s)
        elif self._main_over():
            self._stop_all(time.monotonic() + float(self._context.plan.get("grace_s") or 0))
        elif not self._main_started:
            self._go_on_with_init()

    def _go_on_with_init(self) -> None:
        while self._next_init < len(self._init):
            current = self._init[self._next_init]
            if current.name not in self._begun:
                self._begun.add(current.name)
                _begin(current)
                return
            if current.kind == SIDECAR:
                if not current.report["started"]:
                    return
            elif not current.terminated:
                return
            elif current.failed:
                # Either it starts again, or the policy says Never and the pod has failed.
                if self._over(current):
                    self._failed = True
                    self._context.loop.soon(self._go_on)
                return
            self._next_init += 1
        self._main_started = True
        self._context.reporter.set_phase(reporter.RUNNING)
        for each in self._main:
            _begin(each)

    def _stop_all(self, by_s: float) -> None:
        left_s = by_s - time.monotonic()
        first = [each for each in self.all_containers() if each.kind != SIDECAR and not each.ended]
        for each in first:
            each.stop(left_s)
        waiting = [each for each in first if not each.ended]
        if waiting:
            return
        for each in reversed(self._init):
            if each.kind == SIDECAR and not each.ended:
                each.stop(max(left_s, _LEAST_GRACE_S) if by_s else 0)
                if not each.ended:
                    return
        self._finish()

    def _finish(self) -> None:
        self._done = True
        report = self._context.reporter.report
        report["exit_code"] = self.exit_code
        self._context.reporter.set_phase(reporter.DONE)
        self._on_done(self.exit_code)

    def all_containers(self) -> List[Container]:
        return [*self._init, *self._main, *self._ephemeral]


def _begin(container: Container) -> None:
    if container.run < 0:
        container.start()
    else:
        container.start_again()
