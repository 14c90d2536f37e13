"""Nodes of allocations: made when an agent dials in, gone with its job; one that cannot be written is told and mended."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.hub.agents import Agents
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes import allocation_node_controller
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.images.image_store import Image
from slurmlet.model.ids import JobId
from slurmlet.model.partition_node import HubFacts
from slurmlet.slurm.fake import FakeSlurm
from tests.unit.hub_making import make_settings
from tests.unit.loopback import Api, Stored, api_server, make_keys, until

NODES = "/api/v1/nodes"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
FACTS = HubFacts("10.0.0.1", "login", 40123, "24.11.5", "v1.36.3", "0.1.0", "deadbeef")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


class FakeEvents:
    def __init__(self) -> None:
        self.told: list[tuple[str, str, str]] = []

    def node_event(self, name: str, _kind: str, reason: str, message: str) -> None:
        self.told.append((name, reason, message))


class Link:
    def __init__(self) -> None:
        self.alive = True
        self.hello = self.agent = {"host": "c1", "cpus": 4, "memory_mb": 4000, "job_id": "12"}


class Rig:
    def __init__(self, api: Api, root: Path, images: Callable[[], list[Image]]) -> None:
        self.api, self.slurm, self.events, self.agents = api, FakeSlurm(), FakeEvents(), Agents()
        self.nodes, self.leases = Stored(api, NODES), Stored(api, LEASES)
        settings = make_settings(root, lease_renew_s=0.02)
        self.watch = JobWatch(settings, self.slurm)
        self.keeper = AllocationNodeController(
            settings, api.client, self.slurm, self.agents, self.watch, self.events, FACTS, images  # type: ignore[arg-type]
        )  # fmt: skip

    def dial_in(self, name: str) -> None:
        agent = self.agents.expect(name, JobId("12"))
        agent.link, agent.lost_s = Link(), None  # type: ignore[assignment]
        self.agents.node_changed(agent)

    def hang_up(self, name: str) -> None:
        agent = self.agents.get(name)
        assert agent is not None
        agent.link, agent.lost_s = None, asyncio.get_running_loop().time()
        self.agents.node_changed(agent)

    def renewals(self, name: str) -> int:
        return len(self.api.seen("PATCH", f"{LEASES}/{name}"))


def kept(
    keys: Path,
    root: Path,
    scenario: Callable[[Rig], Awaitable[None]],
    images: Callable[[], list[Image]] = list,
) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            rig = Rig(api, root, images)
            task = asyncio.create_task(rig.keeper.run())
            try:
                await scenario(rig)
                assert not task.done()
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation_node_controller, "_TURN_S", 0.02)
    monkeypatch.setattr(allocation_node_controller, "_UNHEARD_S", 0.05)
    monkeypatch.setattr(allocation_node_controller, "_GOODBYE_S", 0.05)


def test_a_node_from_the_agents_call_to_the_end_of_its_job(keys: Path, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.dial_in("n1")
        await asyncio.wait_for(rig.keeper.until_ready({"n1"}), 2)
        assert rig.nodes.objects["n1"]["metadata"]["name"] == "n1"
        await until(lambda: rig.renewals("n1") >= 2)
        assert rig.leases.objects["n1"]["metadata"]["ownerReferences"][0]["uid"] == "uid-n1"
        directory = tmp_path / "nodes" / "n1"
        directory.mkdir(parents=True)
        await rig.watch._look()  # Slurm knows nothing of job 12
        rig.hang_up("n1")
        await until(lambda: "n1" not in rig.nodes.objects)
        await until(lambda: not directory.exists())
        await until(lambda: rig.agents.get("n1") is None)

    kept(keys, tmp_path, scenario)


def test_an_earlier_hubs_node_is_known_again(keys: Path, tmp_path: Path) -> None:
    async def scenario(rig: Rig) -> None:
        rig.nodes.put({"metadata": {"name": "n1", "labels": {"slurmlet.io/job": "12"}}})
        await rig.keeper.load()
        agent = rig.agents.get("n1")
        assert agent is not None
        assert (agent.job_id, rig.keeper.is_ready("n1")) == ("12", False)
        rig.dial_in("n1")
        await asyncio.wait_for(rig.keeper.until_ready({"n1"}), 2)

    kept(keys, tmp_path, scenario)


@pytest.mark.parametrize("error", [OSError(errno.ESTALE, "Stale file handle"), KeyError("a bug")])
def test_one_node_that_cannot_be_described_is_told_and_mended_and_costs_no_other_its_lease(
    keys: Path, tmp_path: Path, error: Exception
) -> None:
    calls: list[Any] = []

    def failing() -> list[Image]:
        calls.append(None)
        if 1 < len(calls) < 5:
            raise error
        return []

    async def scenario(rig: Rig) -> None:
        rig.dial_in("n1")
        await asyncio.wait_for(rig.keeper.until_ready({"n1"}), 2)
        rig.dial_in("n2")
        await until(lambda: ("n2", "NodeNotUpdated", str(error)) in rig.events.told)
        before = rig.renewals("n1")
        await until(lambda: rig.renewals("n1") > before)
        await asyncio.wait_for(rig.keeper.until_ready({"n2"}), 2)
        await until(lambda: rig.renewals("n2") >= 1)

    kept(keys, tmp_path, scenario, failing)
