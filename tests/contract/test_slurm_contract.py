"""The contract of Slurm's interface on the fake. On the real ones: tests/e2e/test_slurm_contract.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Job, Partition
from slurmlet.slurm.fake import FakeSlurm, away
from tests.contract.slurm_contract import AWAY_CASES, CASES, job_of

SHORT = Partition(
    name="short", up=True, default=False, time_limit="10:00", nodes=2, nodes_usable=2, cpus=32, cpus_per_node=16,
    memory_mb=12000, memory_mb_per_node=6000, gpus=0, node_states={"idle": 2}, state="up",
)  # fmt: skip


class FakeRig:
    runs_scripts = False

    def __init__(self, directory: Path) -> None:
        self.slurm = FakeSlurm()
        self.slurm.listed_partitions.append(SHORT)
        self._directory = directory

    def scratch(self) -> Path:
        return self._directory

    async def started(self, job_id: JobId) -> Job:
        self.slurm.start(job_id)
        self.slurm.advance(1)
        return await job_of(self, job_id)

    async def over(self, job_id: JobId, code: int = 0, signal: int = 0) -> None:
        job = await job_of(self, job_id)
        if job.state == "RUNNING":
            self.slurm.finish(job_id, "FAILED" if code or signal else "COMPLETED", code, signal)


@pytest.mark.parametrize("case", CASES)
def test_the_fake_keeps_the_contract(case: str, tmp_path: Path) -> None:
    asyncio.run(CASES[case](FakeRig(tmp_path)))


@pytest.mark.parametrize("case", AWAY_CASES)
def test_nobody_answers(case: str, tmp_path: Path) -> None:
    rig = FakeRig(tmp_path)
    methods = ("submit", "jobs", "ended", "cancel", "signal", "nodes", "partitions", "grants", "capabilities")
    rig.slurm.hooks = dict.fromkeys(methods, away)
    asyncio.run(AWAY_CASES[case](rig))


def test_time_limits_are_kept_and_ended_jobs_forgotten(tmp_path: Path) -> None:
    """What only a clock that is turned by hand can show."""

    async def scenario() -> None:
        from tests.contract.slurm_contract import spec

        rig = FakeRig(tmp_path)
        job_id = await rig.slurm.submit(spec(time_limit_min=1))
        rig.slurm.start(job_id)
        rig.slurm.advance(61)
        assert (await job_of(rig, job_id)).state == "TIMEOUT"
        rig.slurm.advance(301)
        assert await rig.slurm.jobs() == []
        assert (await rig.slurm.ended([job_id]))[job_id].state == "TIMEOUT"

    asyncio.run(scenario())
