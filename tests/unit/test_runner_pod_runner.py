"""The runner from hello to bye: what it does with each word of the hub, each signal, each loss of the link."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmlet.linux import syscalls
from slurmlet.protocol import checks
from slurmlet.runner.host.sandbox import SINGLE, Mapping
from slurmlet.runner.pod import pod_runner, pod_setup
from slurmlet.runner.pod.claim import PodDir
from slurmlet.runner.pod.shared_namespaces import Forbidden
from tests.unit.runner_pod import (
    FakeChildren,
    FakeHubLink,
    FakeRuntime,
    RunnerPod,
    VirtualRunnerLoop,
    container_plan,
    pod_plan,
)


class Job:
    """A runner in its job; nothing of the node is touched."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.directory = directory
        self.loop = VirtualRunnerLoop()
        self.runtime = FakeRuntime(self.loop)
        self.error: Exception | None = None
        self._made: list[RunnerPod] = []
        patch.setattr(pod_runner, "Loop", lambda: self.loop)
        patch.setattr(pod_runner, "Link", FakeHubLink)
        patch.setattr(pod_runner, "Children", lambda _loop: FakeChildren(self.loop))
        patch.setattr(time, "monotonic", lambda: self.loop.now_s)
        patch.setattr(signal, "pthread_sigmask", lambda *_: None)
        patch.setattr(syscalls, "unmount_below", lambda _path: None)
        patch.setattr(pod_setup, "mount_private", lambda _scratch: None)
        patch.setattr(pod_setup, "make_context", self._context)
        patch.setenv("TMPDIR", str(directory))
        patch.delenv("SLURM_TMPDIR", raising=False)
        pod_dir = directory / "pods" / "u-1"
        pod_dir.mkdir(parents=True)
        self.report_file = pod_dir / "report.json"
        self.lifeline, self._other = os.pipe()
        inside: Any = SimpleNamespace(mapping=Mapping(SINGLE, 1, 1), lifeline=self.lifeline)
        self.runner = pod_runner.Runner(PodDir(str(pod_dir)), "101", inside)
        self.link: FakeHubLink = self.runner._link  # type: ignore[assignment]

    def _context(self, around: Any, plan: Any, scratch: Any, network: Any) -> Any:
        if self.error is not None:
            raise self.error
        made = RunnerPod(self.directory, plan, loop=self.loop, reporter=around.reporter, scratch=scratch)
        made.runtime = self.runtime
        return made.context._replace(runtime=self.runtime)

    def run(self, *acts: Any) -> int:
        self.loop.script = list(acts)
        return self.runner.run()

    def close(self) -> None:
        os.close(self.lifeline)
        os.close(self._other)
        if self.runner._scratch is not None:
            os.close(self.runner._scratch._lock)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with pytest.MonkeyPatch.context() as patch:
        made = Job(tmp_path, patch)
        yield made
        made.close()


def plan(job: Job, **more: Any) -> Any:
    return lambda: job.link.hear({"type": "pod", "pod": pod_plan(container_plan("a"), **more)})


def test_hello_plan_reports_bye(job: Job) -> None:
    code = job.run(job.link.comes_up, plan(job), lambda: job.runtime["a"].exit(3))
    assert code == 3
    hello = checks.runner_hello(job.link.said("hello")[0])
    assert (hello["job_id"], hello["has_pod"], hello["report"]) == ("101", False, None)
    assert job.link.said("bye")[0]["report"]["exit_code"] == 3
    assert job.link.closed
    assert json.loads(job.report_file.read_text())["phase"] == "Done"


def test_a_plan_that_comes_twice_is_taken_once(job: Job) -> None:
    job.run(job.link.comes_up, plan(job), plan(job), lambda: job.runtime["a"].exit(0))
    assert job.runtime.began == ["a"]


def test_a_lost_link_changes_nothing_and_the_next_hello_tells_all(job: Job) -> None:
    def end_while_nobody_hears() -> None:
        job.link.goes_down()
        job.runtime["a"].exit(5)

    code = job.run(
        job.link.comes_up, plan(job), job.link.goes_down, job.link.comes_up, end_while_nobody_hears
    )
    assert code == 5
    second = checks.runner_hello(job.link.said("hello")[1])
    assert second["has_pod"]
    assert second["report"] is not None
    assert second["report"]["containers"]["a"]["state"] == "running"
    assert json.loads(job.report_file.read_text())["exit_code"] == 5, "the hub reads it there"


def test_a_hub_that_does_not_confirm_is_not_waited_for_long(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.link.acks = False
    before_s = job.loop.now_s
    assert job.run(job.link.comes_up, plan(job), lambda: job.runtime["a"].exit(0)) == 0
    assert job.loop.now_s - before_s < 10
    assert "did not confirm" in capsys.readouterr().err


def test_a_stop_before_the_plan_ends_the_job_well(job: Job) -> None:
    assert (
        job.run(job.link.comes_up, lambda: job.link.hear({"type": "stop", "grace_s": 0, "reason": "gone"}))
        == 0
    )
    assert job.link.said("bye")[0]["report"]["phase"] == "Done"


def test_a_stop_with_a_problem_makes_the_pod_a_failed_one(job: Job) -> None:
    problem = {"reason": "DeadlineExceeded", "message": "too long"}
    stop = {"type": "stop", "grace_s": 1, "reason": "too long", "problem": problem}
    job.run(job.link.comes_up, plan(job), lambda: job.link.hear(stop))
    assert job.link.said("bye")[0]["report"]["problem"] == problem


def test_a_signal_of_slurms_ends_the_pod_with_its_grace(job: Job) -> None:
    seen: list[Any] = []

    def term() -> None:
        seen.append(job.runtime["a"])
        seen[0].on_term = None
        job.loop.signals[signal.SIGTERM]()

    code = job.run(job.link.comes_up, plan(job, grace_s=600), term, lambda: job.loop.advance(26))
    assert code == 137
    assert seen[0].signals == [signal.SIGTERM, signal.SIGKILL], "not later than Slurm would kill"
    assert job.link.said("bye")[0]["report"]["problem"]["reason"] == "Terminated"


def test_a_signal_before_the_plan_ends_the_job(job: Job) -> None:
    assert job.run(job.link.comes_up, lambda: job.loop.signals[signal.SIGTERM]()) == 0
    assert job.link.said("bye")[0]["report"]["problem"]["reason"] == "Terminated"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(28, "No space left on device"), "NodeNotUsable"),
        (pod_setup.NoRuntime("no crun"), "NodeNotUsable"),
        (Forbidden("kernel.x"), "SysctlForbidden"),
    ],
)
def test_a_node_that_cannot_run_the_pod_says_why(job: Job, error: Exception, reason: str) -> None:
    job.error = error
    assert job.run(job.link.comes_up, plan(job)) == 1
    assert job.link.said("bye")[0]["report"]["problem"]["reason"] == reason


def test_newer_volumes_and_containers_reach_the_pod(job: Job) -> None:
    debug = {"type": "ephemeral", "container": container_plan("debug")}
    other = {"type": "container", "container": container_plan("a", image="busybox:2")}

    def check() -> None:
        assert "debug" in job.runtime.names
        assert job.runtime.began.count("a") == 2
        job.runtime["a"].exit(0)

    job.run(
        job.link.comes_up,
        lambda: job.link.hear({"type": "volumes", "volumes": {}}),
        plan(job),
        lambda: job.link.hear({"type": "volumes", "volumes": {"v": {}}}),
        lambda: job.link.hear(debug),
        lambda: job.link.hear(other),
        lambda: job.loop.advance(2),
        check,
    )
    assert job.runner._context is not None
    assert job.runner._context.volumes.refreshed == [{"v": {}}]  # type: ignore[attr-defined]


def test_a_question_before_the_pod_has_begun_is_answered_with_nothing(job: Job) -> None:
    job.run(
        job.link.comes_up,
        lambda: job.link.hear({"type": "ask", "id": 4, "what": "usage", "disk": False}),
        lambda: job.link.hear({"type": "refused", "reason": "too old"}),
        lambda: job.link.hear({"type": "stop", "grace_s": 0, "reason": ""}),
    )
    assert job.link.said("answer") == [{"type": "answer", "id": 4, "usage": None}]
