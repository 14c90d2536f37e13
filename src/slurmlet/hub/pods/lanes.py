"""The two ways a pod gets its runner, behind one seam: a Slurm job of its own, or an agent that is there already.

`Lane` is all that a pod's worker knows of it: have it started, what became of it, end it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from slurmlet.base.clock import rfc3339
from slurmlet.hub.agents import Agent, Agents
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes.partition_node_controller import PartitionNodeController
from slurmlet.hub.pods.job_file import read_job_file, write_job_file
from slurmlet.hub.pods.job_submission import Submitted, Submitter
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.hub.runner_links import LinkLost
from slurmlet.model import job_states
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import RUNNING, Fate, Stage
from slurmlet.model.launch_mode import looks_free
from slurmlet.slurm.interface import Slurm

# How long a signalled pod may wait for Slurm to say why: longer than KillWait (30 s), for so long may a job be COMPLETING.
_VERDICT_S = 45.0
# Within that a runner has mostly dialled in, once its process was started.
_DIALS_IN_S = 0.3


class Order(NamedTuple):
    """A start that could be made now."""

    place: Callable[[], Awaitable[JobId]]
    told: Callable[[JobId], tuple[str, str]]  # reason and message of the event
    notes: tuple[str, ...] = ()


class Size(NamedTuple):
    """What a pod without limits may use."""

    cpus: int = 1
    memory_bytes: int = 0


class Lane(Protocol):
    def order(self, state: PodState) -> Order | None:
        """What would start the pod; None while its node is not there. Raises RefusedPod, SlurmLimited."""

    async def known(self, uid: PodUid) -> JobId | None:
        """The job in which the pod was started, if it was; also by an earlier hub."""

    def settled(self, state: PodState) -> bool:
        """Whether silence about the pod means something already."""

    async def fate(self, state: PodState) -> Fate | None:
        """What became of it; None while nobody can say."""

    async def cancel(self, state: PodState) -> None:
        """End it for certain. Safe to repeat."""

    def expect(self, state: PodState) -> None:
        """Have Slurm asked often for a while where the pod waits for its word. After every step of the pod's worker."""

    def forget(self, state: PodState) -> None:
        """The pod is gone, and nobody asks what became of it any more."""

    def size(self, node: str) -> Size: ...


class QueueLane:
    """A pod on a partition node: a Slurm job of its own."""

    def __init__(
        self, submitter: Submitter, watch: JobWatch, nodes: PartitionNodeController, slurm: Slurm
    ) -> None:
        self._submitter, self._watch, self._nodes, self._slurm = submitter, watch, nodes, slurm

    def order(self, state: PodState) -> Order | None:
        partition = self._nodes.partition_of(state.node)
        if partition is None:
            return None
        request = self._submitter.request(state.pod, partition.name)
        self._submitter.wait_in_line(state.uid)

        how: list[Submitted] = []

        async def place() -> JobId:
            how.append(await self._submitter.submit(state.uid, request, looks_free(partition)))
            state.mark = self._watch.mark
            if how[-1].at_once:
                # It runs, and its runner is about to say more than Slurm could.
                state.expect_news(_DIALS_IN_S)
            return how[-1].job_id

        def told(job_id: JobId) -> tuple[str, str]:
            more = " and started immediately" if how[-1].at_once else ""
            more = f"{more}; not started immediately: {how[-1].why}" if how[-1].why else more
            return "Submitted", f"Submitted as Slurm job {job_id} to partition {partition.name}{more}"

        return Order(place, told, request.notes)

    async def known(self, uid: PodUid) -> JobId | None:
        return await self._submitter.known_job(uid)

    def settled(self, state: PodState) -> bool:
        return self._watch.looked_since(state.mark)

    async def fate(self, state: PodState) -> Fate | None:
        assert state.job_id is not None
        told = state.runner_done and not state.signalled
        return await self._watch.fate(state.job_id, ended_well=told)

    async def cancel(self, state: PodState) -> None:
        assert state.job_id is not None
        await self._slurm.cancel([state.job_id])

    def expect(self, state: PodState) -> None:
        if state.needs_slurm:
            what = "start" if state.queued else "end" if state.runner_done or state.deleting else "runner"
            self._watch.expect(state.uid, f"{what} of {state.job_id}")
        else:
            self._watch.settle(state.uid)

    def forget(self, state: PodState) -> None:
        self._submitter.forget(state.uid)
        self._watch.settle(state.uid)
        if state.job_id is not None:
            self._watch.forget(state.job_id)

    def size(self, node: str) -> Size:
        partition = self._nodes.partition_of(node)
        return Size(partition.cpus_per_node, partition.memory_mb_per_node << 20) if partition else Size()


class AgentLane:
    """A pod on an allocation node: a fork of its agent. Never touches the allocation itself."""

    def __init__(
        self, settings: Settings, agents: Agents, authority: RunnerAuthority, watch: JobWatch
    ) -> None:
        self._settings, self._agents, self._authority, self._watch = settings, agents, authority, watch

    def order(self, state: PodState) -> Order | None:
        agent = self._agents.get(state.node)
        if agent is None or not agent.alive or agent.fate is not None:
            return None

        async def place() -> JobId:
            await asyncio.to_thread(self._prepare, agent, state.uid)
            await self._agents.start(agent, state.uid)
            state.expect_news(_DIALS_IN_S)
            return agent.job_id

        def told(job_id: JobId) -> tuple[str, str]:
            return "Starting", f"Starting on {agent.name} in Slurm job {job_id}"

        return Order(place, told)

    def _prepare(self, agent: Agent, uid: PodUid) -> None:
        files = self._settings.files.pod(uid)
        self._authority.equip(files, uid)
        # Not "job_id": that would make it a job of the pod's own, to be cancelled with it.
        write_job_file(files, {"allocation": agent.job_id, "node": agent.name, "started_at": rfc3339()})

    async def known(self, uid: PodUid) -> JobId | None:
        note = await asyncio.to_thread(read_job_file, self._settings.files.pod(uid))
        return JobId(note["allocation"]) if note.get("allocation") else None

    def settled(self, state: PodState) -> bool:  # noqa: ARG002
        return True

    async def fate(self, state: PodState) -> Fate | None:
        agent, uid = self._agents.get(state.node), state.uid
        if agent is None:
            return job_states.fate_of_lost(state.job_id or "")
        if uid in agent.ended:
            return await self._fate_of_ended(agent, state)
        if agent.fate is not None:
            return agent.fate
        if agent.alive and uid not in agent.running:
            return await self._start_again(agent, state)
        return RUNNING

    async def _fate_of_ended(self, agent: Agent, state: PodState) -> Fate:
        """A pod that was signalled may have been so because its allocation ends: then why is for Slurm to say."""
        ended = job_states.fate_of_runner(agent.name, agent.ended[state.uid])
        if not state.signalled:
            return ended
        fate = agent.fate or await self._watch.fate(agent.job_id)
        if fate is not None and fate.stage is Stage.ENDED:
            return fate
        waited_s = asyncio.get_running_loop().time() - agent.ended_s.get(state.uid, 0.0)
        return RUNNING if waited_s < _VERDICT_S else ended

    async def _start_again(self, agent: Agent, state: PodState) -> Fate | None:
        """The agent does not know the pod: the word to start it was lost, or the agent that ran it was."""
        claimed = await asyncio.to_thread(self._settings.files.pod(state.uid).claim.exists)
        if claimed:
            return job_states.fate_of_runner(agent.name, None)
        try:
            await self._agents.start(agent, state.uid)
        except LinkLost:
            return None
        return RUNNING

    async def cancel(self, state: PodState) -> None:
        agent = self._agents.get(state.node)
        if agent is not None:
            await self._agents.kill(agent, state.uid)

    def expect(self, state: PodState) -> None:
        """Agents tell how their pods end; only why an allocation ends is for Slurm to say."""
        if state.runner_done and state.signalled and not state.job_over:
            self._watch.expect(state.uid, f"end of {state.job_id}")
        else:
            self._watch.settle(state.uid)

    def forget(self, state: PodState) -> None:
        self._watch.settle(state.uid)
        self._agents.forget_pod(state.node, state.uid)

    def size(self, node: str) -> Size:
        agent = self._agents.get(node)
        facts = agent.facts if agent is not None else None
        return Size(facts.cpus, facts.memory_mb << 20) if facts is not None else Size()


class Lanes:
    """Which lane a node's pods take."""

    def __init__(self, queue: Lane, agent: Lane, agents: Agents) -> None:
        self._queue, self._agent, self._agents = queue, agent, agents

    def of(self, node: str) -> Lane:
        return self._queue if self._agents.get(node) is None else self._agent
