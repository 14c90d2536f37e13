"""Pods under events in any order: hubs die, Slurm goes away, answers are lost, runners vanish. What must hold holds.

One job per pod, ever; the same facts lead to the same act, whichever hub looks at them; and when all is well again and
the pods are deleted, nothing is left of them anywhere.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slurmlet.base.errors import SlurmError
from slurmlet.model import pod_job
from slurmlet.slurm.fake import away
from tests.unit.hub_making import CLUSTER_ID
from tests.unit.hub_site import NODE, POOL_NODE, Crash, Runner, Site

METHODS = ("jobs", "submit", "ended", "cancel")
WHICH = st.integers(0, 3)
SECONDS = st.sampled_from((0.0, 0.1, 1.0, 3.0, 20.0))


class PodsInAnyOrder(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self._directory = tempfile.TemporaryDirectory()
        self.site = Site(Path(self._directory.name))
        self.uids: list[str] = []

    @initialize()
    def begin(self) -> None:
        self.site.start_hub()
        self.site.settle(1)

    def teardown(self) -> None:
        try:
            self.heal()
            self.check_that_another_hub_agrees()
            self.check_that_nothing_stays()
        finally:
            self.site.close()
            self._directory.cleanup()

    # What people do

    @precondition(lambda self: len(self.uids) < 4)
    @rule(
        node=st.sampled_from((NODE, NODE, POOL_NODE)),
        trouble=st.sampled_from(("", "lost answer", "dead before", "dead after")),
        seconds=SECONDS,
    )
    def create(self, node: str, trouble: str, seconds: float) -> None:
        if trouble == "lost answer":
            self.site.slurm.after_submit = self.lose
        elif trouble == "dead after":
            self.site.slurm.after_submit = self.die
        elif trouble == "dead before":
            self.site.slurm.hooks["submit"] = self.die
        self.uids.append(self.site.create(node=node))
        self.settle(seconds)

    def lose(self) -> None:
        """The answer of sbatch."""
        self.site.slurm.after_submit = lambda: None
        raise SlurmError("timed out", reason="SlurmUnavailable", transient=True)

    def die(self) -> None:
        """The hub, at sbatch."""
        self.site.slurm.after_submit = lambda: None
        self.site.slurm.hooks.pop("submit", None)
        raise Crash

    @rule(which=WHICH, grace_s=st.sampled_from((0, 2, 30)))
    def delete(self, which: int, grace_s: int) -> None:
        if which < len(self.uids):
            self.site.delete(self.uids[which], grace_s)

    # What Slurm does

    @rule(which=WHICH)
    def start_job(self, which: int) -> None:
        if which < len(self.uids):
            self.site.start_job(self.uids[which])

    @rule(
        which=WHICH,
        state=st.sampled_from(("NODE_FAIL", "TIMEOUT", "PREEMPTED", "OUT_OF_MEMORY", "CANCELLED")),
    )
    def kill_job(self, which: int, state: str) -> None:
        if which < len(self.uids):
            for job in self.site.live(self.uids[which]):
                self.site.slurm.finish(job.job_id, state, signal=9)
            self.site.reap()

    @rule(method=st.sampled_from(METHODS))
    def slurm_goes_away(self, method: str) -> None:
        self.site.slurm.hooks[method] = away

    @rule()
    def slurm_comes_back(self) -> None:
        self.site.slurm.hooks.clear()

    # What runners do

    def runner(self, which: int) -> Runner | None:
        return self.site.runners.get(self.uids[which]) if which < len(self.uids) else None

    @rule(which=WHICH)
    def dial(self, which: int) -> None:
        if (runner := self.runner(which)) is not None:
            runner.dial()

    @rule(which=WHICH)
    def hang_up(self, which: int) -> None:
        if (runner := self.runner(which)) is not None:
            runner.hang_up()

    @rule(which=WHICH)
    def run(self, which: int) -> None:
        if (runner := self.runner(which)) is not None and runner.has_pod and not runner.stopping:
            runner.say("Running", "running")

    @rule(which=WHICH, code=st.sampled_from((0, 1, 143)))
    def end(self, which: int, code: int) -> None:
        if (runner := self.runner(which)) is not None and runner.has_pod:
            runner.end(code)

    @rule()
    def agent_dials(self) -> None:
        self.site.agent_hangs_up()
        self.site.start_agent()

    @rule()
    def agent_hangs_up(self) -> None:
        self.site.agent_hangs_up()

    # What happens to the hub

    @rule()
    def restart_hub(self) -> None:
        self.site.kill_hub()
        self.site.start_hub()

    @rule(away=st.booleans())
    def api_server(self, away: bool) -> None:
        self.site.api.away = away

    @rule(seconds=SECONDS)
    def settle(self, seconds: float) -> None:
        self.site.settle(seconds)
        self.site.reap()
        if self.site.hub is None:
            self.site.start_hub()

    # What must hold

    @invariant()
    def no_pod_has_had_two_jobs(self) -> None:
        for uid in self.uids:
            made = {job_id for job_id, spec in self.site.slurm._specs.items() if _uid_of(spec) == uid}
            assert len(made) <= 1, f"{uid} had {made}"

    def heal(self) -> None:
        site = self.site
        site.slurm.hooks.clear()
        site.slurm.after_submit = lambda: None
        site.api.away = False
        site.settle(0)
        if site.hub is None:
            site.start_hub()
        site.agent_hangs_up()
        site.start_agent()
        self.calm_down()

    def calm_down(self) -> None:
        """Runners do as they are told, and time passes until nothing is due."""
        for _ in range(8):
            for runner in list(self.site.runners.values()):
                runner.dial()
            self.site.settle(20)
            self.site.reap()
            for runner in list(self.site.runners.values()):
                if runner.stopping:
                    runner.end(143)
        self.site.settle(40)
        assert self.site.hub is not None, "a hub does not end of itself"

    def check_that_another_hub_agrees(self) -> None:
        before = {uid: self.facts(uid) for uid in self.uids}
        jobs = len(self.site.slurm._specs)
        self.site.kill_hub()
        self.site.start_hub()
        self.site.agent_hangs_up()
        self.site.start_agent()
        self.calm_down()
        assert {uid: self.facts(uid) for uid in self.uids} == before
        assert len(self.site.slurm._specs) == jobs

    def facts(self, uid: str) -> tuple[Any, ...]:
        pod = self.site.pod(uid)
        if pod is None:
            return ("gone",)
        status = pod["status"]
        states = [json.dumps(one["state"]) for one in status.get("containerStatuses") or ()]
        return status.get("phase"), status.get("reason"), states

    def check_that_nothing_stays(self) -> None:
        for uid in self.uids:
            self.site.delete(uid, grace_s=2)
        self.calm_down()
        # What belongs to no pod is swept once a minute, jobs before files.
        self.site.settle(130)
        assert [self.site.phase(uid) for uid in self.uids] == ["gone"] * len(self.uids)
        assert [uid for uid in self.uids if self.site.live(uid)] == []
        assert list(self.site.settings.files.pods.iterdir()) == []
        assert self.site.runners == {}


def _uid_of(spec: Any) -> str:
    return str(spec.comment.split()[0].removeprefix(f"{pod_job.MARK}:{CLUSTER_ID}:"))


TestPodsInAnyOrder = PodsInAnyOrder.TestCase
# A whole life of a site is dear: a third of the examples.
TestPodsInAnyOrder.settings = settings(
    max_examples=settings.default.max_examples // 3, stateful_step_count=25
)
