"""Who is started at once, and what becomes of a start or an end that broke off."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slurmlet.base.clock import Clock
from slurmlet.base.files import read_json, write_json
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs import look_pace
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.jobs.submission_gate import SubmissionGate
from slurmlet.hub.pods import immediate_launch
from slurmlet.hub.pods.immediate_launch import Launcher, LaunchKeeper
from slurmlet.hub.pods.job_submission import Submitted, Submitter
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm import immediate
from slurmlet.slurm.fake import FakeSlurm
from slurmlet.slurm.immediate import LaunchFailed, NotNow, Site
from tests.unit.hub_making import make_job, make_settings
from tests.unit.loopback import make_keys

UID = PodUid("u-1")


def make_pod(**annotations: str) -> dict[str, Any]:
    """A pod that leaves the way to slurmlet, unless told otherwise."""
    marks = {f"slurmlet.io/{name}": value for name, value in {"launch": "auto", **annotations}.items()}
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u-1", "annotations": marks},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(look_pace, "SHORTEST_S", 0.001)
    make_keys(tmp_path / "pki")
    return make_settings(tmp_path)


class Hub:
    """What a scenario needs; `answer` is what an attempt to start at once comes to."""

    def __init__(self, settings: Settings, slurm: FakeSlurm) -> None:
        self.settings, self.slurm = settings, slurm
        self.watch = JobWatch(settings, slurm)
        self.launcher = Launcher(settings, slurm, self.watch)
        self.launcher.site = Site("libslurm.so")
        self.submitter = Submitter(
            settings, slurm, self.watch, RunnerAuthority(settings), SubmissionGate(Clock()), self.launcher
        )
        self.attempts: list[JobSpec] = []
        self.answer: JobId | Exception = JobId("7")
        self.launcher._start = self._start  # type: ignore[assignment, method-assign]

    def _start(self, spec: JobSpec, _task: list[str]) -> JobId:
        self.attempts.append(spec)
        note = read_json(self.settings.files.pod(UID).job)
        assert note["lane"] == "immediate", "what is tried is on disk before it is tried"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def submit(self, looks_free: bool = True, **annotations: str) -> Submitted:
        request = self.submitter.request(make_pod(**annotations), "batch")
        return await self.submitter.submit(UID, request, looks_free)


def within(settings: Settings, slurm: FakeSlurm, scenario: Callable[[Hub], Awaitable[None]]) -> None:
    async def run() -> None:
        hub = Hub(settings, slurm)
        task = asyncio.create_task(hub.watch.run())
        try:
            await hub.watch.refresh()
            await asyncio.wait_for(scenario(hub), 2)
        finally:
            # More than once: in Python 3.11 wait_for swallows a cancellation that meets its result.
            while not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=0.05)

    asyncio.run(run())


def test_a_free_site_starts_a_pod_at_once(settings: Settings) -> None:
    slurm = FakeSlurm()

    async def scenario(hub: Hub) -> None:
        assert await hub.submit() == Submitted(JobId("7"), at_once=True)
        assert hub.attempts[0].comment == f"slurmlet:deadbeef:{UID} cluster=default pod=ns/p"
        note = read_json(settings.files.pod(UID).job)
        assert (note["job_id"], note["lane"]) == ("7", "immediate")

    within(settings, slurm, scenario)
    assert slurm.submitted == []


@pytest.mark.parametrize(
    ("looks_free", "annotations", "tried"),
    [
        (True, {}, True),
        (False, {}, False),
        (False, {"launch": "immediate"}, True),
        (True, {"launch": "batch"}, False),
        (True, {"sbatch": "--hold"}, False),
        (True, {"sbatch": "--hold", "launch": "immediate"}, False),
    ],
)
def test_who_is_tried(settings: Settings, looks_free: bool, annotations: dict[str, str], tried: bool) -> None:
    async def scenario(hub: Hub) -> None:
        done = await hub.submit(looks_free, **annotations)
        assert (len(hub.attempts), done.at_once) == (int(tried), tried)

    within(settings, FakeSlurm(), scenario)


def test_where_jobs_wait_for_resources_nobody_is_tried(settings: Settings) -> None:
    slurm = FakeSlurm()
    slurm.queue = [make_job("5", uid="other", state="PENDING", reason="Resources")]

    async def scenario(hub: Hub) -> None:
        assert not (await hub.submit()).at_once
        assert hub.attempts == []

    within(settings, slurm, scenario)


def test_a_refusal_goes_to_sbatch_at_once_and_the_next_pod_does_not_ask(settings: Settings) -> None:
    slurm = FakeSlurm()

    async def scenario(hub: Hub) -> None:
        hub.answer = NotNow("Requested nodes are busy")
        assert await hub.submit(launch="immediate") == Submitted(JobId("101"), why="Requested nodes are busy")
        note = read_json(settings.files.pod(UID).job)
        assert "lane" not in note, "the keeper must not take a batch job for one of its own"
        settings.files.pod(UID).job.unlink()
        assert await hub.submit() == Submitted(JobId("102"))
        assert len(hub.attempts) == 1

    within(settings, slurm, scenario)


def test_what_a_refusal_leaves_in_the_queue_is_not_the_pods_job(settings: Settings) -> None:
    slurm = FakeSlurm()
    refused = make_job("5", state="FAILED", reason="BadConstraints")
    slurm.queue = [replace(refused, nodes="")]

    async def scenario(hub: Hub) -> None:
        assert await hub.submitter.known_job(UID) is None

    within(settings, slurm, scenario)


def test_a_start_that_fails_is_another_job_s_turn(settings: Settings) -> None:
    slurm = FakeSlurm()

    async def scenario(hub: Hub) -> None:
        hub.answer = LaunchFailed(JobId("7"), "Task launch failed")
        assert (await hub.submit()).job_id == "101"
        slurm.queue = [make_job("7", state="CANCELLED")]
        await hub.watch.refresh()
        assert await hub.submitter.known_job(UID) == "101", (
            "the failed one is not the pod's, also for a new hub"
        )

    within(settings, slurm, scenario)


def test_a_start_that_only_seems_to_fail_counts(settings: Settings) -> None:
    async def scenario(hub: Hub) -> None:
        hub.answer = LaunchFailed(JobId("7"), "lost sight of it")
        settings.files.pod(UID).root.mkdir(parents=True)
        settings.files.pod(UID).claim.write_text("7\n")
        assert (await hub.submit()).job_id == "7"
        assert hub.slurm.submitted == []

    within(settings, FakeSlurm(), scenario)


def test_a_site_without_a_way_says_so_once(settings: Settings) -> None:
    async def scenario(hub: Hub) -> None:
        hub.launcher.site = Site(problem="no library")
        request = hub.submitter.request(make_pod(), "batch")
        assert hub.launcher.chooses(request, True) == (False, "no library")
        assert hub.launcher.chooses(request, True) == (False, "")

    within(settings, FakeSlurm(), scenario)


class Ends:
    """Slurm's steps and ends, as the keeper is told them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.with_step: set[JobId] = set()
        self.status: int | None = None
        self.completed: list[tuple[JobId, int]] = []
        monkeypatch.setattr(immediate, "steps", lambda: self.with_step)
        monkeypatch.setattr(immediate, "step_status", lambda _job: self.status)
        monkeypatch.setattr(
            immediate,
            "complete",
            lambda _library, job, status: self.completed.append((job, status)),
        )


def kept(
    settings: Settings, slurm: FakeSlurm, *, looks: int = 2, linked: bool = False
) -> list[tuple[PodUid, JobId]]:
    """What a keeper disowned after some looks."""
    disowned: list[tuple[PodUid, JobId]] = []

    async def disown(uid: PodUid, job_id: JobId) -> None:
        disowned.append((uid, job_id))

    async def scenario(hub: Hub) -> None:
        keeper = LaunchKeeper(settings, slurm, hub.watch, hub.launcher, lambda _uid: linked, disown)
        for _ in range(looks):
            await keeper._look()

    within(settings, slurm, scenario)
    return disowned


@pytest.fixture
def running(settings: Settings) -> FakeSlurm:
    slurm, files = FakeSlurm(), settings.files.pod(UID)
    slurm.queue = [make_job("7")]
    files.root.mkdir(parents=True)
    write_json(files.job, {"job_id": "7", "lane": "immediate"})
    files.claim.write_text("7\n")
    return slurm


def test_a_job_that_outlived_its_step_ends_with_the_pods_exit_code(
    settings: Settings, running: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(monkeypatch)
    write_json(settings.files.pod(UID).report, {"phase": "Done", "exit_code": 3})
    assert kept(settings, running, looks=1) == []
    assert ends.completed == [], "one look may be too early"
    kept(settings, running)
    assert ends.completed == [("7", 3 << 8)]
    assert running.cancelled == []


def test_without_a_last_word_the_step_s_own_end_counts(
    settings: Settings, running: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = Ends(monkeypatch)
    ends.status = 9
    kept(settings, running)
    assert ends.completed == [("7", 9)]


def test_what_nobody_can_tell_is_cancelled(
    settings: Settings, running: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ends(monkeypatch)
    kept(settings, running)
    assert running.cancelled == ["7"]


def test_an_allocation_whose_pod_never_began_is_ended_and_the_pod_gets_another(
    settings: Settings, running: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ends(monkeypatch)
    claim = settings.files.pod(UID).claim
    claim.unlink()
    assert kept(settings, running) == [(UID, "7")]
    assert running.cancelled == ["7"]
    assert not claim.exists(), "the next job is to begin the pod"


@pytest.mark.parametrize("srun_at_work", [False, True])
def test_a_step_in_which_nobody_ever_began_is_ended_too(
    settings: Settings, running: FakeSlurm, monkeypatch: pytest.MonkeyPatch, srun_at_work: bool
) -> None:
    """Left by an srun that was killed in the middle of its work: Slurm counts it as running, no host knows it."""
    Ends(monkeypatch).with_step = {JobId("7")}
    settings.files.pod(UID).claim.unlink()
    sruns = [(77, "srun")] if srun_at_work else []
    monkeypatch.setattr(immediate, "left_behind", lambda _word: iter(sruns))
    now_s = itertools.count(0.0, 6.0)
    monkeypatch.setattr(immediate_launch, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    assert kept(settings, running, looks=2) == [], "a runner may be coming"
    assert kept(settings, running, looks=4) == ([] if srun_at_work else [(UID, "7")])


@pytest.mark.parametrize("why", ["step", "link", "batch"])
def test_what_is_well_is_left_alone(
    settings: Settings, running: FakeSlurm, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    ends = Ends(monkeypatch)
    if why == "step":
        ends.with_step = {JobId("7")}
    if why == "batch":
        write_json(settings.files.pod(UID).job, {"job_id": "7"})
    assert kept(settings, running, looks=3, linked=why == "link") == []
    assert (running.cancelled, ends.completed) == ([], [])
