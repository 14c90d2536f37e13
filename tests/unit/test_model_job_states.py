"""The one table of Slurm's job states: every state from 22.05 to 26.05 has its row, an unknown one counts as alive."""

from __future__ import annotations

import pytest

from slurmlet.model import job_states
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_values import EndedJob, Job

# What job_state_string() of any of these versions prints, and the flags that only scontrol and JSON name.
QUEUED = (
    "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT", "POWER_UP_NODE",
)  # fmt: skip
RUNNING = ("RUNNING", "SUSPENDED", "STOPPED", "SIGNALING", "RESIZING", "EXPEDITING")
ENDING = ("COMPLETING", "STAGE_OUT")
ENDED = {
    "COMPLETED": "RunnerLost", "FAILED": "JobFailed", "CANCELLED": "JobCancelled", "TIMEOUT": "JobTimeout",
    "DEADLINE": "JobDeadline", "OUT_OF_MEMORY": "OutOfMemory", "NODE_FAIL": "NodeFailure", "BOOT_FAIL": "NodeFailure",
    "PREEMPTED": "Preempted", "REVOKED": "JobRevoked", "LAUNCH_FAILED": "JobLaunchFailed",
    "RECONFIG_FAIL": "NodeFailure",
}  # fmt: skip


def job(state: str, reason: str = "") -> Job:
    return Job(JobId("7"), state, reason, "c1", "batch", "")


def ended(state: str, *, code: int = 0, signal: int = 0, by: int | None = None, reason: str = "") -> EndedJob:
    return EndedJob(JobId("7"), state, code, signal, by, reason)


@pytest.mark.parametrize(
    ("state", "stage"),
    [
        *((state, Stage.QUEUED) for state in QUEUED),
        *((state, Stage.RUNNING) for state in RUNNING),
        *((state, Stage.ENDING) for state in ENDING),
        *((state, Stage.ENDED) for state in ENDED),
    ],
)
def test_every_state_has_its_stage(state: str, stage: Stage) -> None:
    assert state in job_states._TABLE, "a row of its own, not the one for unknown states"
    assert job_states.fate_of(job(state)).stage is stage
    assert job_states.fate_of_ended(ended(state)).stage is stage
    assert job_states.is_over(state) is (stage is Stage.ENDED)
    assert job_states.holds_resources(state) is (stage is not Stage.ENDED)


def test_the_table_knows_no_state_that_is_not_tested_here() -> None:
    assert set(job_states._TABLE) == {*QUEUED, *RUNNING, *ENDING, *ENDED}


@pytest.mark.parametrize("state", ["?", "UNKNOWN", "HIBERNATING", ""])
def test_an_unknown_state_counts_as_alive(state: str) -> None:
    assert not job_states.is_over(state)
    for fate in (job_states.fate_of(job(state)), job_states.fate_of_ended(ended(state))):
        assert (fate.stage, fate.reason) == (Stage.RUNNING, "")


@pytest.mark.parametrize(("state", "reason"), ENDED.items())
def test_every_end_has_a_reason_and_a_sentence(state: str, reason: str) -> None:
    fate = job_states.fate_of_ended(ended(state))
    assert fate.reason == reason
    assert fate.message.startswith("Slurm job 7 ")
    # Only where the runner ended the job is its report the truth about the pod.
    assert fate.by_itself is (state in ("COMPLETED", "FAILED", "OUT_OF_MEMORY"))


@pytest.mark.parametrize(
    ("last_word", "message"),
    [
        (ended("CANCELLED", by=1000), "Slurm job 7 was cancelled by uid 1000"),
        (ended("CANCELLED", by=1002), "Slurm job 7 was cancelled by user2"),
        (ended("CANCELLED"), "Slurm job 7 was cancelled"),
        (ended("TIMEOUT", reason="TimeLimit"), "Slurm job 7 reached its time limit (TimeLimit)"),
        (ended("FAILED", code=3), "Slurm job 7 failed before its runner could report (exit code 3)"),
        (ended("FAILED", signal=9), "Slurm job 7 failed before its runner could report (signal 9)"),
        (ended("OUT_OF_MEMORY"), "Slurm job 7 was killed for using more memory than it asked for"),
        (ended("NODE_FAIL"), "Slurm job 7 lost its node"),
    ],
)
def test_what_people_read(last_word: EndedJob, message: str) -> None:
    assert job_states.fate_of_ended(last_word, {1002: "user2"}).message == message


def test_the_pending_reason_is_kept_for_queued_jobs_only() -> None:
    assert job_states.fate_of(job("PENDING", "Resources")).pending_reason == "Resources"
    assert job_states.fate_of(job("RUNNING", "Resources")).pending_reason == ""
    assert job_states.fate_of(job("FAILED", "NonZeroExitCode")).message.endswith("(NonZeroExitCode)")


def test_a_job_nobody_knows_is_lost() -> None:
    fate = job_states.fate_of_lost("7")
    assert (fate.stage, fate.reason, fate.by_itself) == (Stage.ENDED, "JobLost", False)
    assert fate.message == "Slurm job 7 is no longer known to Slurm"
