"""Which requests may be started at once, and how srun is asked."""

from __future__ import annotations

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import job_states
from slurmlet.model.ids import JobId
from slurmlet.model.launch_mode import can_start_at_once, launch_of, looks_free
from slurmlet.model.sbatch_options import parse_words
from slurmlet.model.slurm_values import Job, JobSpec, Partition
from slurmlet.slurm.command_options import srun_words


def job_with(*words: str) -> JobSpec:
    return JobSpec("p.ns.c", "", output="/x", nodes=1, tasks=1, options=tuple(parse_words("test", words)))


def test_the_default_is_batch_and_other_words_are_refused() -> None:
    assert launch_of({}) == "batch"
    assert launch_of({"slurmlet.io/launch": "batch"}) == "batch"
    with pytest.raises(RefusedPod, match=r"slurmlet\.io/launch"):
        launch_of({"slurmlet.io/launch": "now"})


def test_srun_gets_what_sbatch_would_less_what_only_sbatch_knows() -> None:
    spec = job_with("--mem=50M", "--constraint=a&b")
    assert can_start_at_once(spec)
    assert srun_words(spec) == [
        "--job-name=p.ns.c", "--export=ALL", "--nodes=1", "--ntasks=1", "--mem=50M", "--constraint=a&b",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "word",
    ["--hold", "--begin=now+1hour", "--dependency=afterok:1", "--nodes=2", "--ntasks=4", "--exclusive", "--deadline=x"],
)  # fmt: skip
def test_what_waits_or_holds_more_than_one_task_is_for_the_queue(word: str) -> None:
    assert not can_start_at_once(job_with(word))


def test_the_last_partition_counts() -> None:
    assert job_with("--partition=a", "--mem=1", "--partition=b").asked_partition == "b"


@pytest.mark.parametrize(
    ("states", "free"),
    [({"idle": 1, "down": 2}, True), ({"mixed*": 1}, True), ({"allocated": 3, "drained": 1}, False), ({}, True)],
)  # fmt: skip
def test_a_partition_looks_free_while_a_node_has_room(states: dict[str, int], free: bool) -> None:
    partition = Partition("p", True, True, "infinite", 3, 3, 12, 4, 100, 100, 0, node_states=states)
    assert looks_free(partition) is free


def job(state: str, reason: str, nodes: str = "") -> Job:
    return Job(JobId("1"), state, reason, nodes, "p", "")


def test_only_jobs_that_lack_resources_say_that_none_are_free() -> None:
    assert job_states.waits_for_resources(job("PENDING", "Resources"))
    assert not job_states.waits_for_resources(job("PENDING", "JobHeldUser"))
    assert not job_states.waits_for_resources(job("RUNNING", ""))


def test_a_refused_request_is_not_taken_for_a_job_that_failed() -> None:
    assert job_states.never_placed(job("FAILED", "BadConstraints"))
    assert not job_states.never_placed(job("FAILED", "NonZeroExitCode", "c1"))
    assert not job_states.never_placed(job("CANCELLED", ""))
