"""The agents that dialled in, what each runs, and the words the hub has for them.

An agent is the truth about the pods of its node while its link lives; when it is gone, Slurm is (`keeping.py`). Nothing is
kept here that an agent would not tell again in its next hello.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from slurmlet.hub.runner_links import NODE_PREFIX, LinkLost, RunnerLink
from slurmlet.model.allocation_node import AllocationFacts
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import Fate
from slurmlet.protocol.messages import AgentToHub

log = logging.getLogger(__name__)


@dataclass
class Agent:
    """One allocation node. Changed by the hub's one thread alone."""

    name: str
    job_id: JobId
    facts: AllocationFacts | None = None
    link: RunnerLink | None = None
    lost_s: float | None = None  # since when nobody heard of it
    running: set[PodUid] = field(default_factory=set)
    ended: dict[PodUid, int] = field(default_factory=dict)  # exit codes of runners
    ended_s: dict[PodUid, float] = field(default_factory=dict)  # when we heard of it
    fate: Fate | None = None  # of the allocation, once it is over

    @property
    def alive(self) -> bool:
        return self.link is not None and self.link.alive


class Agents:
    def __init__(self) -> None:
        self._agents: dict[str, Agent] = {}
        self._left = asyncio.Event()
        self._node_listeners: list[Callable[[Agent], None]] = []
        self._pod_listeners: list[Callable[[PodUid], None]] = []

    def subscribe_nodes(self, changed: Callable[[Agent], None]) -> None:
        """`changed` hears of each agent that dialled in or hung up."""
        self._node_listeners.append(changed)

    def subscribe_pods(self, changed: Callable[[PodUid], None]) -> None:
        """`changed` hears of each pod about which there is news."""
        self._pod_listeners.append(changed)

    def node_changed(self, agent: Agent) -> None:
        for changed in self._node_listeners:
            changed(agent)

    def pod_changed(self, uid: PodUid) -> None:
        for changed in self._pod_listeners:
            changed(uid)

    def forget_pod(self, node: str, uid: PodUid) -> None:
        """The pod is gone, and nobody asks how it ended any more."""
        agent = self._agents.get(node)
        if agent is not None:
            agent.ended.pop(uid, None)
            agent.ended_s.pop(uid, None)

    def __iter__(self) -> Iterator[Agent]:
        return iter(list(self._agents.values()))

    def get(self, name: str) -> Agent | None:
        return self._agents.get(name)

    def expect(self, name: str, job_id: JobId) -> Agent:
        """A node that is known to exist (its Node object or its job says so) and may dial in."""
        now_s = asyncio.get_running_loop().time()
        return self._agents.setdefault(name, Agent(name, job_id, lost_s=now_s))

    def forget(self, name: str) -> None:
        self._agents.pop(name, None)

    # Links (hub/runner_links.Peers)

    async def link_came(self, link: RunnerLink) -> None:
        name, hello = link.uid.removeprefix(NODE_PREFIX), link.agent
        agent = self.expect(name, JobId(hello["job_id"]))
        if agent.link is not None:
            agent.link.end()
        agent.link, agent.lost_s = link, None
        agent.job_id = JobId(hello["job_id"] or agent.job_id)
        agent.running = {PodUid(uid) for uid in hello["pods"]}
        agent.ended = {PodUid(uid): code for uid, code in hello["ended"].items()}
        log.info("node %s: its agent of job %s dialled in from %s", name, agent.job_id, hello["host"])
        self.node_changed(agent)

    async def link_said(self, link: RunnerLink, message: AgentToHub) -> None:
        agent = self._agents.get(link.uid.removeprefix(NODE_PREFIX))
        if agent is not None and message["type"] == "pod-ended":
            uid = PodUid(message["uid"])
            agent.running.discard(uid)
            agent.ended[uid] = message["exit_code"]
            agent.ended_s[uid] = asyncio.get_running_loop().time()
            self.pod_changed(uid)

    def link_ended(self, link: RunnerLink) -> None:
        agent = self._agents.get(link.uid.removeprefix(NODE_PREFIX))
        if agent is not None and agent.link is link:
            agent.link = None
            agent.lost_s = asyncio.get_running_loop().time()
            log.info("node %s: its agent hung up", agent.name)
            self._left.set()
            self.node_changed(agent)

    # Words for agents

    async def start(self, agent: Agent, uid: PodUid) -> None:
        """Have the pod's runner started. Raises LinkLost; safe to repeat."""
        if agent.link is None:
            raise LinkLost
        await agent.link.tell({"type": "start-pod", "uid": uid})
        agent.running.add(uid)

    async def kill(self, agent: Agent, uid: PodUid) -> None:
        if agent.link is not None:
            await agent.link.tell({"type": "kill-pod", "uid": uid})

    async def end_all(self, grace_s: float, slack_s: float) -> None:
        """The cluster ends: every agent ends its pods and itself. Returns when all have hung up, or after the time."""
        for agent in self:
            try:
                if agent.link is not None:
                    await agent.link.tell({"type": "end", "grace_s": grace_s})
            except LinkLost:
                pass
        self._left.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s + slack_s):
                while any(agent.alive for agent in self):
                    await self._left.wait()
                    self._left.clear()
