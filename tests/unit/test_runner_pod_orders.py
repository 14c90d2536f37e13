"""A pod in its runner under events in any order. What must hold holds after each of them."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.runner_pod import RunnerPod, container_plan, pod_plan

KINDS = st.lists(st.sampled_from(("init", "sidecar")), max_size=3)
CODES = st.sampled_from((0, 1, 42))


class PodInAnyOrder(RuleBasedStateMachine):
    pod: RunnerPod

    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self._patch = pytest.MonkeyPatch()
        self.stopped_by_s: float | None = None

    @initialize(
        kinds=KINDS, mains=st.integers(1, 2), policy=st.sampled_from(("Never", "OnFailure", "Always")), rules=st.booleans()
    )  # fmt: skip
    def begin(self, kinds: list[str], mains: int, policy: str, rules: bool) -> None:
        self.policy, self.rules = policy, rules
        self.init = [f"i{number}" for number in range(len(kinds))]
        self.sidecars = {name for name, kind in zip(self.init, kinds, strict=True) if kind == "sidecar"}
        self.mains = [f"m{number}" for number in range(mains)]
        rule_ = [{"action": "Restart", "operator": "In", "values": [42]}] if rules else []
        plan = pod_plan(
            *(container_plan(name, restart_rules=rule_) for name in self.mains),
            init=tuple(container_plan(name, sidecar=name in self.sidecars) for name in self.init),
            restart_policy=policy,
        )
        self.pod = RunnerPod(Path(self._directory.name), plan)
        self.pod.runtime.at_once = False
        self._patch.setattr(time, "monotonic", lambda: self.pod.loop.now_s)
        self.pod.start()

    def teardown(self) -> None:
        try:
            if hasattr(self, "pod"):
                self.check_that_a_stop_ends_it()
                self.pod.close()
        finally:
            self._patch.undo()
            self._directory.cleanup()

    @rule()
    def a_container_starts(self) -> None:
        self.pod.runtime.begin()
        self.pod.advance()

    @rule()
    def a_container_does_not_start(self) -> None:
        self.pod.runtime.begin(error="no such program")
        self.pod.advance()

    @rule(which=st.integers(0, 4), code=CODES)
    def a_container_ends(self, which: int, code: int) -> None:
        if which < len(self.pod.runtime.processes):
            self.pod.runtime.processes[which].exit(code)
            self.pod.advance()

    @rule(which=st.integers(0, 4))
    def a_container_ignores_signals(self, which: int) -> None:
        if which < len(self.pod.runtime.processes):
            self.pod.runtime.processes[which].on_term = None

    @rule(seconds=st.sampled_from((0.5, 11.0, 400.0)))
    def time_passes(self, seconds: float) -> None:
        self.pod.advance(seconds)

    @rule(grace_s=st.sampled_from((0, 5, 30)))
    def stop(self, grace_s: float) -> None:
        by_s = self.pod.loop.now_s + grace_s
        self.stopped_by_s = by_s if self.stopped_by_s is None else min(by_s, self.stopped_by_s)
        self.pod.lifecycle.stop(grace_s)
        self.pod.advance()

    @rule(name=st.sampled_from(("m0", "i0")))
    def another_image(self, name: str) -> None:
        plan: Any = container_plan(name, image="busybox:2", sidecar=name in self.sidecars)
        self.pod.lifecycle.redefine(plan)
        self.pod.advance()

    # What must hold

    @invariant()
    def the_end_is_told_once_and_then_nothing_runs(self) -> None:
        if not hasattr(self, "pod"):
            return
        assert len(self.pod.done) <= 1
        assert bool(self.pod.done) == (self.pod.report["phase"] == "Done")
        if self.pod.done:
            assert self.pod.runtime.processes == []
            assert self.pod.runtime.asked == []
            assert self.pod.report["exit_code"] == self.pod.done[0]

    @invariant()
    def containers_begin_in_their_order(self) -> None:
        if not hasattr(self, "pod"):
            return
        began = self.pod.runtime.began
        for before, after in zip(self.init, [*self.init[1:], *self.mains[:1]], strict=False):
            if after in began:
                assert before in began
                assert began.index(before) < began.index(after)
        if any(name in began for name in self.mains):
            for name in self.init:
                if name not in self.sidecars:
                    report = self.pod.of(name)
                    assert (report["state"], report["exit_code"]) == ("terminated", 0)

    @invariant()
    def each_container_runs_at_most_once_at_a_time(self) -> None:
        if hasattr(self, "pod"):
            names = [*self.pod.runtime.names, *self.pod.runtime.asked_names]
            assert len(names) == len(set(names))

    @invariant()
    def what_ran_is_what_the_report_says(self) -> None:
        if not hasattr(self, "pod"):
            return
        for name in (*self.init, *self.mains):
            assert (self.pod.of(name)["state"] == "running") == (name in self.pod.runtime.names)

    @invariant()
    def nothing_outlives_a_stop_by_much(self) -> None:
        if hasattr(self, "pod") and self.stopped_by_s is not None and not self.pod.runtime.asked:
            # Each sidecar has two seconds of its own.
            late_s = self.pod.loop.now_s - self.stopped_by_s
            assert late_s < 1 + 2.5 * (1 + len(self.sidecars)) or self.pod.done

    def check_that_a_stop_ends_it(self) -> None:
        self.pod.lifecycle.stop(5)
        for _ in range(4):
            while self.pod.runtime.asked:
                self.pod.runtime.begin()
            self.pod.advance(6)
        assert len(self.pod.done) == 1
        ran = [name for name in self.mains if self.pod.of(name)["state"] == "terminated"]
        codes = [self.pod.of(name)["exit_code"] for name in ran]
        if self.pod.done == [0]:
            assert not any(codes)


TestPodInAnyOrder = PodInAnyOrder.TestCase
# A whole life of a site is dear: a third of the examples.
TestPodInAnyOrder.settings = settings(max_examples=settings.default.max_examples // 3, stateful_step_count=25)
