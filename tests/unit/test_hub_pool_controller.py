"""The pool: what Slurm refuses and what dies at once is asked for later and later, and told; nothing is left behind."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.base.files import write_json
from slurmlet.hub.agents import Agents
from slurmlet.hub.allocations import pool_controller
from slurmlet.hub.allocations.allocation_jobs import AllocationJobs
from slurmlet.hub.allocations.pool_controller import PoolController
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.model.ids import JobId
from slurmlet.slurm.fake import FakeSlurm, away
from tests.unit.hub_making import TurnedClock, make_settings
from tests.unit.loopback import make_keys, until


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    make_keys(tmp_path / "pki")
    write_json(tmp_path / "pool.json", {"least": 1, "most": 1})
    return make_settings(tmp_path)


class FakeEvents:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def object_event(self, version: str, kind: str, obj: Any, type_: str, reason: str, message: str) -> None:
        assert (version, kind, type_, obj["metadata"]["name"]) == (
            "slurmlet.io/v1",
            "Pool",
            "Warning",
            "default",
        )
        self.told.append((reason, message))


class NoNodes:
    def objects(self) -> list[Any]:
        return []


class Link:
    alive = True

    async def tell(self, _message: Any) -> None: ...


class Rig:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.slurm, self.events, self.agents = settings, FakeSlurm(), FakeEvents(), Agents()
        self.clock = TurnedClock()
        self.watch = JobWatch(settings, self.slurm)
        jobs = AllocationJobs(settings, self.slurm, self.watch, RunnerAuthority(settings))
        self.pool = PoolController(
            settings, None, jobs, self.watch, self.agents, NoNodes(), self.events, list, self.clock  # type: ignore[arg-type]
        )  # fmt: skip

    async def turn(self, seconds: float = 2.0) -> None:
        self.clock.turn(seconds)
        await self.watch._look()
        await self.pool.reconcile("pool")

    async def turns(self, count: int) -> None:
        for _ in range(count):
            await self.turn()

    def directories(self) -> list[str]:
        nodes = self.settings.files.nodes
        return sorted(path.name for path in nodes.iterdir()) if nodes.exists() else []


def pooled(settings: Settings, scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        rig = Rig(settings)
        async with asyncio.timeout(20):
            await scenario(rig)

    asyncio.run(run())


def refuse() -> None:
    said = "Batch job submission failed: Invalid account or account/partition combination specified"
    raise SlurmError(f"sbatch failed (1): {said}", said=said)


def test_a_refused_pool_asks_less_and_less_often_tells_why_and_leaves_no_keys(settings: Settings) -> None:
    async def scenario(rig: Rig) -> None:
        rig.slurm.hooks["submit"] = refuse
        await rig.turns(150)  # five minutes, in which it asked 150 times before
        assert 5 <= len(rig.slurm.submitted) <= 8
        assert rig.directories() == []
        assert len(rig.events.told) == len(rig.slurm.submitted)
        reason, message = rig.events.told[0]
        assert reason == "PoolRefused"
        assert "Invalid account or account/partition combination" in message
        assert "slurmlet pool size --min N --max N --sbatch" in message
        count = len(rig.slurm.submitted)
        # What is asked for changes: that may be the remedy.
        write_json(settings.files.pool, {"least": 1, "most": 1, "options": [["account", "mine"]]})
        del rig.slurm.hooks["submit"]
        await rig.turn()
        assert len(rig.slurm.submitted) == count + 1
        assert len(rig.directories()) == 1
        await rig.turns(10)
        assert len(rig.slurm.submitted) == count + 1

    pooled(settings, scenario)


def test_a_member_whose_agent_dies_at_start_is_replaced_with_back_off_and_its_words_are_told(
    settings: Settings,
) -> None:
    async def scenario(rig: Rig) -> None:
        for _ in range(150):
            await rig.turn()
            for job in [one for one in rig.slurm.queue if one.state == "PENDING"]:
                rig.slurm.start(job.job_id)
                (directory,) = rig.directories()
                settings.files.node(directory).job_log.write_text("python3: command\\nnot found\\n")
                rig.slurm.finish(job.job_id, "FAILED", 127)
        assert 5 <= len(rig.slurm.submitted) <= 8
        assert len(rig.directories()) <= 1
        reason, message = rig.events.told[0]
        assert reason == "PoolNodeFailed"
        assert "Slurm job 101 of pool node pool-" in message
        assert "not found" in message

    pooled(settings, scenario)


def serve(rig: Rig) -> None:
    """The agents of all jobs dial in."""
    for job in rig.watch.pool_jobs():
        rig.slurm.start(job.job_id)
        rig.agents.expect(job.node, job.job_id).link = Link()  # type: ignore[assignment]


def test_a_member_that_served_is_replaced_at_once(settings: Settings) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.turns(2)
        serve(rig)
        await rig.turns(40)
        rig.slurm.finish(JobId("101"), "NODE_FAIL")
        await rig.turn()
        assert len(rig.slurm.submitted) == 2
        assert rig.events.told == []

    pooled(settings, scenario)


def test_a_member_that_was_let_go_is_no_failure(settings: Settings) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.turns(2)
        write_json(settings.files.pool, {"least": 0, "most": 0})
        await rig.turns(2)
        assert rig.slurm.cancelled == ["101"]
        assert rig.directories() == []
        write_json(settings.files.pool, {"least": 1, "most": 1})
        await rig.turn()
        assert len(rig.slurm.submitted) == 2
        assert rig.events.told == []

    pooled(settings, scenario)


def test_keys_stay_while_nobody_knows_whether_there_is_a_job(settings: Settings) -> None:
    async def scenario(rig: Rig) -> None:
        rig.slurm.hooks["submit"] = away
        await rig.turn()
        assert len(rig.directories()) == 1, "sbatch may have got through"
        await rig.turn()
        assert rig.directories() == [], "it did not"

    pooled(settings, scenario)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_failing_home_is_waited_for_and_told(
    settings: Settings, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = 0

    def failing(path: Path) -> Any:
        nonlocal reads
        reads += 1
        if reads < 4:
            raise OSError(code, "the home fails", str(path))
        return {"least": 1, "most": 1}

    monkeypatch.setattr(pool_controller, "read_json", failing)
    monkeypatch.setattr(pool_controller, "_TURN_S", 0.01)
    monkeypatch.setattr(pool_controller, "_TROUBLE", pool_controller.Backoff(0.01, 0.05))

    async def scenario(rig: Rig) -> None:
        await rig.watch._look()
        task = asyncio.create_task(rig.pool.run())
        await until(lambda: rig.slurm.submitted, 5)
        assert not task.done()
        assert [reason for reason, _ in rig.events.told] == ["PoolNotKept"] * 3
        assert "the home fails" in rig.events.told[0][1]
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    pooled(settings, scenario)
