"""A pod becomes one job, whatever happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.clock import Clock
from slurmlet.base.errors import RefusedPod, SlurmError
from slurmlet.base.files import read_json, write_json
from slurmlet.base.processes import Completed
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs import look_pace
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.jobs.submission_gate import SlurmLimited, SubmissionGate
from slurmlet.hub.pods.job_submission import Submitter
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.model.ids import PodUid
from slurmlet.slurm.fake import FakeSlurm, away
from slurmlet.slurm.refusals import slurm_error
from tests.unit.hub_making import make_job, make_settings
from tests.unit.loopback import make_keys

UID = PodUid("u-1")
POD: dict[str, Any] = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
    "spec": {"containers": [{"name": "c", "image": "i"}]},
}


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr(look_pace, "SHORTEST_S", 0.001)
    make_keys(tmp_path / "pki")
    return make_settings(tmp_path)


def submit_with(
    settings: Settings, slurm: FakeSlurm, scenario: Callable[[Submitter], Awaitable[None]]
) -> None:
    """A fresh hub: nothing in memory but what Slurm and the directory tell."""

    async def run() -> None:
        watch = JobWatch(settings, slurm)
        task = asyncio.create_task(watch.run())
        try:
            await watch.refresh()
            await asyncio.wait_for(
                scenario(
                    Submitter(settings, slurm, watch, RunnerAuthority(settings), SubmissionGate(Clock()))
                ),
                2,
            )
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_pod_is_submitted_with_all_its_runner_needs(settings: Settings) -> None:
    slurm, files = FakeSlurm(), settings.files.pod(UID)

    def at_sbatch() -> None:
        assert set(read_json(files.job)) == {"intent_at"}, "the intent is on disk before sbatch runs"
        assert files.credential.stat().st_mode & 0o777 == 0o600
        assert files.root.stat().st_mode & 0o777 == 0o700

    slurm.hooks["submit"] = at_sbatch

    async def scenario(submitter: Submitter) -> None:
        assert await submitter.known_job(UID) is None
        assert (await submitter.submit(UID, submitter.request(POD, "batch"))).job_id == "101"
        assert read_json(files.job)["job_id"] == "101"
        assert await submitter.known_job(UID) == "101"

    submit_with(settings, slurm, scenario)
    (spec,) = slurm.submitted
    assert spec.comment == f"slurmlet:deadbeef:{UID} cluster=default pod=ns/p"
    assert spec.output == str(files.job_log)
    assert spec.script.endswith(f"{settings.files.runner} {files.root}\n")


def crash() -> None:
    raise SystemError("the hub is killed in the middle of sbatch")


def test_a_job_that_a_dead_hub_submitted_is_found_and_not_submitted_again(settings: Settings) -> None:
    slurm = FakeSlurm()
    slurm.hooks["submit"] = crash

    async def dies(submitter: Submitter) -> None:
        with pytest.raises(SystemError):
            await submitter.submit(UID, submitter.request(POD, "batch"))

    submit_with(settings, slurm, dies)
    slurm.hooks.clear()
    slurm.queue = [make_job("77", state="PENDING")]  # sbatch had come through

    async def comes_back(submitter: Submitter) -> None:
        assert await submitter.known_job(UID) == "77"
        assert (await submitter.submit(UID, submitter.request(POD, "batch"))).job_id == "77"
        assert read_json(settings.files.pod(UID).job)["job_id"] == "77"

    submit_with(settings, slurm, comes_back)
    assert len(slurm.submitted) == 1


def test_an_intent_that_never_reached_slurm_is_carried_out(settings: Settings) -> None:
    slurm = FakeSlurm()
    settings.files.pod(UID).root.mkdir(parents=True)
    write_json(settings.files.pod(UID).job, {"intent_at": "2026-01-01T00:00:00Z"})

    async def scenario(submitter: Submitter) -> None:
        assert (await submitter.submit(UID, submitter.request(POD, "batch"))).job_id == "101"

    submit_with(settings, slurm, scenario)
    assert slurm.looks >= 2, "Slurm is asked before a second attempt"


def test_a_job_that_appears_while_the_hub_asks_is_taken(settings: Settings) -> None:
    """The look that counts begins after the attempt: the first one, at the start of the hub, saw nothing."""
    slurm = FakeSlurm()
    settings.files.pod(UID).root.mkdir(parents=True)
    write_json(settings.files.pod(UID).job, {"intent_at": "2026-01-01T00:00:00Z"})

    async def scenario(submitter: Submitter) -> None:
        slurm.queue = [make_job("77")]
        assert (await submitter.submit(UID, submitter.request(POD, "batch"))).job_id == "77"

    submit_with(settings, slurm, scenario)
    assert slurm.submitted == []


def test_when_slurm_is_away_the_intent_stays_for_the_next_attempt(settings: Settings) -> None:
    slurm = FakeSlurm()

    slurm.hooks["submit"] = away

    async def scenario(submitter: Submitter) -> None:
        with pytest.raises(SlurmError):
            await submitter.submit(UID, submitter.request(POD, "batch"))
        assert set(read_json(settings.files.pod(UID).job)) == {"intent_at"}
        # It had come through after all: the answer was lost, not the job.
        slurm.queue = [make_job("77")]
        assert (await submitter.submit(UID, submitter.request(POD, "batch"))).job_id == "77"

    submit_with(settings, slurm, scenario)
    assert len(slurm.submitted) == 1


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "sbatch: error: invalid partition specified: nope\n"
            "sbatch: error: Batch job submission failed: Invalid partition name specified",
            "invalid partition specified: nope; Batch job submission failed: Invalid partition name specified",
        ),
        ("sbatch: fatal: --mem and --mem-per-cpu are exclusive.", "--mem and --mem-per-cpu are exclusive."),
        ("", "sbatch failed (1): no error message"),
    ],
)  # fmt: skip
def test_what_slurm_refuses_is_refused_in_its_words_and_leaves_no_intent(
    settings: Settings, said: str, told: str
) -> None:
    slurm = FakeSlurm()

    def refuse() -> None:
        raise slurm_error(Completed(("sbatch",), 1, "", said))

    slurm.hooks["submit"] = refuse

    async def scenario(submitter: Submitter) -> None:
        with pytest.raises(RefusedPod) as refused:
            await submitter.submit(UID, submitter.request(POD, "batch"))
        assert (refused.value.message, refused.value.reason) == (told, "SlurmRefused")
        assert not settings.files.pod(UID).job.exists()

    submit_with(settings, slurm, scenario)


def test_no_more_than_a_few_sbatch_run_at_once(settings: Settings) -> None:
    slurm, running, most = FakeSlurm(), 0, 0

    async def slow() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1

    slurm.hooks["submit"] = slow

    async def scenario(submitter: Submitter) -> None:
        request = submitter.request(POD, "batch")
        await asyncio.gather(*(submitter.submit(PodUid(f"u-{number}"), request) for number in range(20)))

    submit_with(settings, slurm, scenario)
    assert len(slurm.submitted) == 20
    assert most <= settings.sbatch_at_once


def test_the_credential_of_a_pod_is_made_once(settings: Settings) -> None:
    authority, files = RunnerAuthority(settings), settings.files.pod(UID)
    authority.equip(files, UID)
    first = files.credential.read_bytes()
    authority.equip(files, UID)
    assert files.credential.read_bytes() == first


def test_a_job_whose_comment_a_site_rewrote_is_found_by_its_name(settings: Settings) -> None:
    slurm = FakeSlurm()
    slurm.hooks["submit"] = crash

    async def dies(submitter: Submitter) -> None:
        with pytest.raises(SystemError):
            await submitter.submit(UID, submitter.request(POD, "batch"))

    submit_with(settings, slurm, dies)
    slurm.hooks.clear()
    (spec,) = slurm.submitted
    other = replace(make_job("70", state="RUNNING"), comment="site policy", name="p.ns.default.cafebabe.u-1")
    slurm.queue = [other, replace(make_job("77", state="PENDING"), comment="site policy", name=spec.name)]

    async def comes_back(submitter: Submitter) -> None:
        assert (await submitter.submit(UID, submitter.request(POD, "batch"))).job_id == "77"

    submit_with(settings, slurm, comes_back)
    assert len(slurm.submitted) == 1


def limited(said: str) -> Callable[[], None]:
    def refuse() -> None:
        raise SlurmError(said, reason="SlurmLimited", transient=True)

    return refuse


def test_a_limit_that_passes_leaves_no_intent_and_no_second_request(settings: Settings) -> None:
    slurm = FakeSlurm()
    slurm.hooks["submit"] = limited("AssocMaxSubmitJobLimit; Job violates accounting/qos policy")

    async def scenario(submitter: Submitter) -> None:
        for _ in range(3):
            with pytest.raises(SlurmLimited, match="AssocMaxSubmitJobLimit"):
                await submitter.submit(UID, submitter.request(POD, "batch"))
        assert not settings.files.pod(UID).job.exists()

    looks = slurm.looks
    submit_with(settings, slurm, scenario)
    assert len(slurm.submitted) == 1
    assert slurm.looks - looks <= 3, "nothing is to be looked for: Slurm has answered"


def test_what_slurm_can_never_accept_is_told_as_such(settings: Settings) -> None:
    slurm = FakeSlurm()
    slurm.hooks["submit"] = limited("QOSMaxCpuPerJobLimit; Job violates accounting/qos policy")

    async def scenario(submitter: Submitter) -> None:
        with pytest.raises(RefusedPod, match="QOSMaxCpuPerJobLimit") as found:
            await submitter.submit(UID, submitter.request(POD, "batch"))
        assert found.value.reason == "SlurmRefused"

    submit_with(settings, slurm, scenario)
