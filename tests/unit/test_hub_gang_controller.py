"""Gangs: one allocation for all pods, none before all serve; one gang's trouble is told on its pods and is nobody else's."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.hub.agents import Agents
from slurmlet.hub.allocations import gang_controller
from slurmlet.hub.allocations.allocation_jobs import AllocationJobs
from slurmlet.hub.allocations.gang_controller import GangController
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import gangs
from slurmlet.slurm.fake import FakeSlurm, away
from tests.unit.hub_making import make_settings
from tests.unit.loopback import Api, Pushed, api_server, make_keys, until


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gang_controller, "_TURN_S", 0.01)
    monkeypatch.setattr(gang_controller, "_TROUBLE", Backoff(0.01, 0.05))
    monkeypatch.setattr(gang_controller, "_EMPTY_S", 0.0)


def pod(name: str, size: int = 2, gang: str = "g", uid: str = "") -> dict[str, Any]:
    annotations = {gangs.GANG: gang, gangs.SIZE_ANNOTATION: str(size)}
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": uid or name,
        "annotations": annotations,
        "resourceVersion": "5",
    }
    return {"metadata": metadata, "spec": {"schedulingGates": [{"name": gangs.GANG}], "containers": []}}


class FakeEvents:
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def pod_event(self, pod: Any, _kind: str, reason: str, message: str) -> None:
        self.told.append((pod["metadata"]["name"], reason, message))

    def reasons(self, name: str) -> list[str]:
        return [reason for who, reason, _ in self.told if who == name]


class ReadyNodes:
    def is_ready(self, _name: str) -> bool:
        return True


class Link:
    def __init__(self) -> None:
        self.alive = True
        self.told: list[str] = []

    async def tell(self, message: Any) -> None:
        self.told.append(message["type"])


class Rig:
    def __init__(self, api: Api, keys: Path, root: Path) -> None:
        self.api, self.slurm, self.events, self.agents = api, FakeSlurm(), FakeEvents(), Agents()
        (root / "pki").symlink_to(keys)
        self.settings = make_settings(root)
        self.pushed = Pushed()
        self.watch = JobWatch(self.settings, self.slurm)
        self.authority = RunnerAuthority(self.settings)
        jobs = AllocationJobs(self.settings, self.slurm, self.watch, self.authority)
        self.gangs = GangController(
            self.settings, api.client, jobs, self.watch, self.agents, ReadyNodes(), self.events, lambda: []  # type: ignore[arg-type]
        )  # fmt: skip

    def directories(self) -> list[str]:
        nodes = self.settings.files.nodes
        return sorted(path.name for path in nodes.iterdir()) if nodes.exists() else []

    def serve(self) -> list[Link]:
        """The job runs on two hosts, and both agents dial in."""
        (job,) = self.watch.gang_jobs().values()
        self.slurm.start(job.job_id, "c1")
        links = []
        for number in range(job.hosts):
            agent = self.agents.expect(f"{job.node}-{number}", job.job_id)
            agent.link = Link()  # type: ignore[assignment]
            links.append(agent.link)
        return links  # type: ignore[return-value]

    def released(self) -> list[str]:
        return sorted({path.rpartition("/")[2] for how, path, _, _ in self.api.requests if how == "PATCH"})


def ganged(keys: Path, root: Path, pods: list[Any], scenario: Callable[[Rig], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            listed, pushed = {"metadata": {"resourceVersion": "9"}, "items": pods}, Pushed()
            api.on("GET", "/api/v1/pods", listed, pushed)
            api.on("PATCH", "*", {})
            rig = Rig(api, keys, root)
            rig.pushed = pushed
            tasks = [asyncio.create_task(work) for work in (rig.watch.run(), rig.gangs.run())]
            try:
                async with asyncio.timeout(20):
                    await scenario(rig)
                assert not any(task.done() for task in tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_pods_are_let_go_when_their_one_allocation_serves_and_not_before(keys: Path, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await until(lambda: rig.watch.gang_jobs(), 5)
        assert len(rig.slurm.submitted) == 1
        assert rig.released() == []
        assert rig.events.reasons("a")[0] == "GangSubmitted"
        rig.serve()
        await until(lambda: rig.released() == ["a", "b"], 5)
        assert len(rig.slurm.submitted) == 1

    ganged(keys, tmp_path, [pod("a"), pod("b")], scenario)


def test_an_incomplete_gang_asks_for_nothing(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_controller, "_COMING_S", 0.0)

    async def scenario(rig: Rig) -> None:
        await until(lambda: "GangIncomplete" in rig.events.reasons("a"), 5)
        assert rig.slurm.submitted == []

    ganged(keys, tmp_path, [pod("a")], scenario)


def test_an_allocation_without_pods_is_given_back_and_its_keys_go(keys: Path, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        await until(lambda: rig.watch.gang_jobs(), 5)
        for name in ("a", "b"):
            rig.pushed.push("DELETED", pod(name))
        await until(lambda: rig.slurm.cancelled, 10)
        await until(lambda: rig.directories() == [], 10)

    ganged(keys, tmp_path, [pod("a"), pod("b")], scenario)


def refuse() -> None:
    said = "Requested node configuration is not available"
    raise SlurmError(f"sbatch failed (1): {said}", said=said)


def test_a_refused_gang_is_told_asked_for_rarely_and_leaves_no_keys(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_controller, "_REFUSED", Backoff(0.3, 10.0))

    async def scenario(rig: Rig) -> None:
        rig.slurm.hooks["submit"] = refuse
        await until(lambda: rig.slurm.submitted, 5)
        await asyncio.sleep(1.2)
        assert 2 <= len(rig.slurm.submitted) <= 3, "at 0, 0.3 and 0.9 s"
        assert rig.events.reasons("a") == ["GangRefused"], "the same words are not told twice"
        assert "Requested node configuration is not available" in rig.events.told[0][2]
        await until(lambda: rig.directories() == [], 5)

    ganged(keys, tmp_path, [pod("a"), pod("b")], scenario)


def test_other_pods_under_a_refused_gangs_name_are_not_held_back(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gang_controller, "_REFUSED", Backoff(600.0, 600.0))

    async def scenario(rig: Rig) -> None:
        rig.slurm.hooks["submit"] = refuse
        await until(lambda: rig.events.reasons("a") == ["GangRefused"], 5)
        rig.pushed.push("DELETED", pod("b"))
        rig.pushed.push("ADDED", pod("b", uid="b-2"))
        await until(lambda: len(rig.slurm.submitted) == 2, 5)
        await asyncio.sleep(0.2)
        assert len(rig.slurm.submitted) == 2

    ganged(keys, tmp_path, [pod("a"), pod("b")], scenario)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug")])
def test_one_gangs_trouble_is_told_mended_and_nobody_elses(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def scenario(rig: Rig) -> None:
        fails = 3
        equip = rig.authority.equip

        def failing(files: Any, name: str, prefix: str) -> None:
            nonlocal fails
            if fails and gangs.key_of(pod("a")) in name:
                fails -= 1
                raise error
            equip(files, name, prefix)

        monkeypatch.setattr(rig.authority, "equip", failing)
        await until(lambda: len(rig.watch.gang_jobs()) == 2, 10)
        assert rig.events.reasons("a")[:4] == ["GangNotKept"] * 3 + ["GangSubmitted"]
        assert any(who == "a" and str(error) in message for who, _, message in rig.events.told)
        assert "GangNotKept" not in rig.events.reasons("c")
        assert len(rig.slurm.submitted) == 2
        await until(lambda: len(rig.directories()) == 4, 5)

    pods = [pod("a"), pod("b"), pod("c", gang="other"), pod("d", gang="other")]
    ganged(keys, tmp_path, pods, scenario)


def test_a_slurm_that_is_away_is_waited_for_and_asked_once(keys: Path, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.slurm.hooks["submit"] = away
        await until(lambda: "GangNotKept" in rig.events.reasons("a"), 5)
        del rig.slurm.hooks["submit"]
        await until(lambda: rig.watch.gang_jobs(), 5)
        await asyncio.sleep(0.2)
        assert len(rig.watch.gang_jobs()) == 1
        assert len([one for one in rig.slurm.queue if one.state == "PENDING"]) == 1

    ganged(keys, tmp_path, [pod("a"), pod("b")], scenario)
