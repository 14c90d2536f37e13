"""Pods on allocation nodes: a real agent process over TLS on loopback, and what the hub makes of what it says."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.files import write_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.agents import Agent, Agents
from slurmlet.hub.hub_settings import SERVER_NAME, Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.pods.lanes import AgentLane, Lanes
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.runner_credentials import NODE_NAME_PREFIX, RunnerAuthority
from slurmlet.hub.runner_links import LinkServer
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import RUNNING, Fate, Stage
from slurmlet.slurm.fake import FakeSlurm
from tests.unit.fakes import FakeLink
from tests.unit.hub_making import make_settings
from tests.unit.loopback import make_keys, until
from tests.unit.reports import pod_report

POD: dict[str, Any] = {
    "metadata": {"uid": "u-1", "name": "p", "namespace": "default", "resourceVersion": "1"},
    "spec": {"nodeName": "n1"},
}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    make_keys(tmp_path / "pki")
    return make_settings(tmp_path)


async def nobody(*_: object) -> None:
    raise AssertionError("an agent was taken for a runner")


@asynccontextmanager
async def hub(settings: Settings, agents: Agents) -> AsyncIterator[None]:
    server = await LinkServer(settings, nobody, nobody, lambda _: None, agents).start(0)
    port = server.sockets[0].getsockname()[1]
    write_json(
        settings.files.hub, {"addresses": ["127.0.0.1"], "runner_port": port, "server_name": SERVER_NAME}
    )
    try:
        yield
    finally:
        server.close()


@pytest.fixture
def agent_process(settings: Settings) -> Iterator[subprocess.Popen[bytes]]:
    files = settings.files
    RunnerAuthority(settings).equip(files.node("n1"), "n1", NODE_NAME_PREFIX)
    environment = {**os.environ, "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "c1", "TMPDIR": str(files.root)}
    argv = [sys.executable, "-m", "slurmlet.entrypoint", "agent", "--run", str(files.node("n1").root)]
    process = subprocess.Popen(argv, env=environment, stderr=subprocess.DEVNULL)
    yield process
    process.kill()
    process.communicate()


class TestAgent:
    def test_it_dials_in_and_ends_when_told(
        self, settings: Settings, agent_process: subprocess.Popen[bytes]
    ) -> None:
        async def scenario() -> None:
            agents = Agents()
            async with hub(settings, agents):
                await until(lambda: (found := agents.get("n1")) is not None and found.alive, 20)
                found = agents.get("n1")
                assert found is not None
                assert found.link is not None
                assert (found.job_id, found.link.agent["host"]) == ("12", "c1")
                await agents.end_all(0.1, 5.0)
                assert not found.alive

        asyncio.run(scenario())
        assert agent_process.wait(5) == 0

    def test_one_that_is_killed_comes_back(
        self, settings: Settings, agent_process: subprocess.Popen[bytes]
    ) -> None:
        async def scenario() -> None:
            agents = Agents()
            async with hub(settings, agents):
                await until(lambda: (found := agents.get("n1")) is not None and found.alive, 20)
                found = agents.get("n1")
                assert found is not None
                first = found.link
                children = (
                    Path(f"/proc/{agent_process.pid}/task/{agent_process.pid}/children").read_text().split()
                )
                os.kill(int(children[0]), signal.SIGKILL)
                await until(lambda: found.alive and found.link is not first, 20)
                await agents.end_all(0.0, 5.0)

        asyncio.run(scenario())
        assert agent_process.wait(5) == 0

    def test_a_runner_that_cannot_start_is_told_of(
        self, settings: Settings, agent_process: subprocess.Popen[bytes]
    ) -> None:
        """Its directory is missing: the fork fails, the agent does not."""

        async def scenario() -> None:
            heard: list[PodUid] = []
            agents = Agents()
            agents.subscribe_pods(heard.append)
            async with hub(settings, agents):
                await until(lambda: (found := agents.get("n1")) is not None and found.alive, 20)
                found = agents.get("n1")
                assert found is not None
                await agents.start(found, PodUid("u-9"))
                await until(lambda: heard == ["u-9"], 20)
                assert found.ended == {"u-9": 1}
                await agents.end_all(0.0, 5.0)

        asyncio.run(scenario())


def lane_with(settings: Settings) -> tuple[AgentLane, Agent, FakeLink, Agents]:
    agents = Agents()
    agent, link = agents.expect("n1", JobId("12")), FakeLink()
    agent.link = link  # type: ignore[assignment]
    watch = JobWatch(settings, FakeSlurm())
    return AgentLane(settings, agents, RunnerAuthority(settings), watch), agent, link, agents


class TestLane:
    def test_a_start_leaves_a_note_that_is_no_job_of_its_own(self, settings: Settings) -> None:
        async def scenario() -> None:
            lane, _, link, _ = lane_with(settings)
            state = PodState(POD)
            order = lane.order(state)
            assert order is not None
            state.job_id = await order.place()
            assert link.told == [{"type": "start-pod", "uid": "u-1"}]
            note = json.loads(settings.files.pod("u-1").job.read_text())
            assert "job_id" not in note, "or deleting the pod would cancel the allocation"
            assert await lane.known(PodUid("u-1")) == "12"
            assert await lane.fate(state) == RUNNING

        asyncio.run(scenario())

    def test_what_the_agent_does_not_know_is_started_again_once(self, settings: Settings) -> None:
        async def scenario() -> None:
            lane, agent, link, _ = lane_with(settings)
            state = PodState(POD)
            state.job_id = JobId("12")
            assert await lane.fate(state) == RUNNING
            assert len(link.told) == 1, "nobody ran it yet"
            agent.running.clear()
            settings.files.pod("u-1").root.mkdir(parents=True)
            settings.files.pod("u-1").claim.write_text("12\n")
            fate = await lane.fate(state)
            assert fate is not None
            assert (fate.stage, fate.reason, fate.by_itself) == (Stage.ENDED, "RunnerLost", True)
            assert len(link.told) == 1, "it ran already: never twice"

        asyncio.run(scenario())

    def test_a_lost_agent_is_waited_for_until_slurm_says_its_job_is_over(self, settings: Settings) -> None:
        async def scenario() -> None:
            lane, agent, _, _ = lane_with(settings)
            state = PodState(POD)
            state.job_id = JobId("12")
            agent.link = None
            assert await lane.fate(state) == RUNNING
            assert lane.order(state) is None
            agent.fate = Fate(Stage.ENDED, "NodeFailure", "Slurm job 12 lost its node")
            assert await lane.fate(state) == agent.fate

        asyncio.run(scenario())

    def test_why_a_signalled_pod_ended_is_for_slurm_to_say(self, settings: Settings) -> None:
        async def scenario() -> None:
            lane, agent, _, _ = lane_with(settings)
            state = PodState(POD)
            state.job_id = JobId("12")
            state.report = pod_report(phase="Done", problem={"reason": "Terminated", "message": ""})
            agent.ended["u-1"] = 0  # type: ignore[index]
            agent.fate = Fate(Stage.ENDED, "JobTimeout", "Slurm job 12 reached its time limit")
            assert await lane.fate(state) == agent.fate

        asyncio.run(scenario())

    def test_ending_a_pod_never_touches_the_allocation(self, settings: Settings) -> None:
        async def scenario() -> None:
            lane, _, link, _ = lane_with(settings)
            await lane.cancel(PodState(POD))
            assert link.told == [{"type": "kill-pod", "uid": "u-1"}]

        asyncio.run(scenario())

    def test_nodes_without_an_agent_take_the_queue(self, settings: Settings) -> None:
        async def scenario() -> None:
            lane, _, _, agents = lane_with(settings)
            queue: Any = object()
            lanes = Lanes(queue, lane, agents)
            assert lanes.of("n1") is lane
            assert lanes.of("batch") is queue

        asyncio.run(scenario())


def test_the_directories_of_a_run_lie_apart(tmp_path: Path) -> None:
    local, shared = tmp_path / "run-1", tmp_path / "elsewhere"
    local.mkdir()
    assert ClusterFiles(local).pods == local / "pods"
    (local / "shared").symlink_to(shared)
    files = ClusterFiles(local)
    assert {files.hub.parent, files.runner.parent, files.pods.parent, files.nodes.parent} == {shared}
    assert {files.pki.parent, files.etcd.parent, files.config.parent, files.token.parent.parent} == {local}
