"""Keeps one Node per agent: made when it dials in, Ready while it is connected, gone when its allocation is over.

A link that is lost while Slurm says that the job runs is a matter of waiting: the agent dials again, its pods run on.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from typing import Any

from slurmlet.base.clock import rfc3339
from slurmlet.base.errors import SlurmletError
from slurmlet.hub.agents import Agent, Agents
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes.node_objects import NODES, NodeRecords
from slurmlet.images.image_store import Image
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Again, Controller, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import allocation_node as model
from slurmlet.model import partition_node
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_values import Grant
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
_OURS = f"{partition_node.KIND_LABEL}={model.KIND}"
_TURN_S = 1.0
# An agent that was killed is back sooner; before that nobody needs to hear of it.
_UNHEARD_S = 3.0
# Pods are told of the end before their Node goes, and garbage collection with it.
_GOODBYE_S = 5.0
_STATUS_REFRESH_S = 300.0
_WORKERS = 8
_UNKNOWN = ((False, "", ""), 0.0)
Obj = dict[str, Any]


class AllocationNodeController:
    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        slurm: Slurm,
        agents: Agents,
        watch: JobWatch,
        events: EventRecorder,
        hub: partition_node.HubFacts,
        images: Callable[[], list[Image]] = list,
    ) -> None:
        self._settings, self._client, self._slurm, self._agents = settings, client, slurm, agents
        self._watch, self._events, self._hub = watch, events, hub
        self._list_images = images
        self._records = NodeRecords(client, settings.lease_s)
        self._objects: dict[str, Obj] = {}
        self._written: dict[str, tuple[tuple[bool, str, str], float]] = {}
        self._grants: dict[JobId, asyncio.Task[dict[str, Grant]]] = {}
        self._removed_s: dict[str, float] = {}
        self._renewed_s: dict[str, float] = {}
        self._described = asyncio.Event()
        backoff = Backoff(first_s=_TURN_S, most_s=max(_TURN_S, settings.lease_renew_s))
        self._controller = Controller(
            "allocation node", self.reconcile, workers=_WORKERS, backoff=backoff, on_failure=self._failed
        )
        agents.subscribe_nodes(lambda agent: self._controller.add(agent.name))

    @property
    def controllers(self) -> tuple[Controller[str], ...]:
        return (self._controller,)

    def objects(self) -> list[Obj]:
        return list(self._objects.values())

    def changed(self, node: Obj) -> None:
        """Somebody of ours wrote it."""
        self._objects[node["metadata"]["name"]] = node

    def is_ready(self, name: str) -> bool:
        """Whether the API server has been told so."""
        return self._written.get(name, _UNKNOWN)[0][0]

    async def until_ready(self, names: set[str]) -> None:
        while not all(self.is_ready(name) for name in names):
            self._described.clear()
            await self._described.wait()

    async def load(self) -> None:
        """Nodes that an earlier hub made: their agents will dial in again, or Slurm tells that they are over."""
        listed = await self._client.get(NODES, labelSelector=_OURS)
        for node in listed.get("items") or ():
            name = node["metadata"]["name"]
            self._objects[name] = node
            self._agents.expect(name, JobId(node["metadata"]["labels"].get(model.JOB_LABEL, "")))
            self._controller.add(name)

    async def run(self) -> None:
        await self._controller.run()

    async def reconcile(self, name: str) -> Again:
        """The lease first: it says that the agent lives, whatever else cannot be written or asked for."""
        agent = self._agents.get(name)
        if agent is None:
            return None
        known = name in self._objects
        if known:
            await self._renew(agent)
        await self._keep(agent)
        if not known:
            await self._renew(agent)
        return _TURN_S

    def _failed(self, name: str, error: Exception, _failures: int, _delay_s: float) -> None:
        # While the API server is away, events cannot be written either.
        if not isinstance(error, ApiError):
            self._events.node_event(name, "Warning", "NodeNotUpdated", told(error))

    async def _keep(self, agent: Agent) -> None:
        if agent.fate is not None:
            await self._say_goodbye(agent)
        elif agent.alive:
            await self._describe(agent, model.READY)
        elif self._unheard_s(agent) > _UNHEARD_S:
            await self._judge(agent)

    def _unheard_s(self, agent: Agent) -> float:
        now_s = asyncio.get_running_loop().time()
        return now_s - agent.lost_s if agent.lost_s is not None else 0.0

    async def _judge(self, agent: Agent) -> None:
        """Nobody answers: what does Slurm say?"""
        fate = await self._watch.fate(agent.job_id) if agent.job_id else None
        if fate is not None and fate.stage is Stage.ENDED:
            agent.fate = fate
            log.info("node %s: %s", agent.name, fate.message)
            self._events.node_event(agent.name, "Warning", fate.reason, fate.message)
            for uid in list(agent.running):
                self._agents.pod_changed(uid)
            self._removed_s[agent.name] = asyncio.get_running_loop().time() + _GOODBYE_S
            state = (False, fate.reason, fate.message)
        else:
            text = f"the agent of Slurm job {agent.job_id} is not connected; its pods may still be running"
            state = (False, partition_node.AGENT_LOST, text)
        await self._describe(agent, state)

    async def _say_goodbye(self, agent: Agent) -> None:
        if asyncio.get_running_loop().time() < self._removed_s.get(agent.name, 0.0):
            return
        await self._records.remove(agent.name)
        self._objects.pop(agent.name, None)
        self._written.pop(agent.name, None)
        self._removed_s.pop(agent.name, None)
        self._renewed_s.pop(agent.name, None)
        self._grants.pop(agent.job_id, None)
        await asyncio.to_thread(shutil.rmtree, self._settings.files.node(agent.name).root, ignore_errors=True)
        self._agents.forget(agent.name)

    async def _describe(self, agent: Agent, state: tuple[bool, str, str]) -> None:
        now_s = asyncio.get_running_loop().time()
        written, when_s = self._written.get(agent.name, (None, 0.0))
        if written == state and agent.name in self._objects and now_s - when_s < _STATUS_REFRESH_S:
            return
        if agent.link is not None:
            agent.facts = model.facts(agent.name, agent.link.hello, await self._grant(agent))
        if agent.facts is None:
            return  # an earlier hub's node that did not dial in yet: its status stays as it is
        node = await self._records.make(model.node_object(agent.facts))
        stored = await asyncio.to_thread(self._list_images)
        images = partition_node.image_list((one.reference, one.repo_digest, one.size_bytes) for one in stored)
        status = model.node_status(agent.facts, self._hub, state, rfc3339(), node.get("status") or {}, images)
        self._objects[agent.name] = await self._records.describe(agent.name, status, state[0])
        if written is None or written[0] != state[0]:
            kind = "Normal" if state[0] else "Warning"
            self._events.node_event(agent.name, kind, state[1], state[2])
        self._written[agent.name] = (state, now_s)
        self._described.set()

    async def _grant(self, agent: Agent) -> Grant | None:
        """Asked once for all hosts of a job."""
        task = self._grants.get(agent.job_id)
        if task is None:
            task = self._grants[agent.job_id] = asyncio.create_task(
                self._slurm.grants(agent.job_id), name=f"grant of job {agent.job_id}"
            )
        assert agent.link is not None
        try:
            return (await task).get(agent.link.agent["host"])
        except SlurmletError as error:
            log.warning("what job %s holds is not known: %s", agent.job_id, error.message)
            self._grants.pop(agent.job_id, None)
            return None

    async def _renew(self, agent: Agent) -> None:
        now_s = asyncio.get_running_loop().time()
        late_s = now_s - self._renewed_s.get(agent.name, float("-inf"))
        if agent.alive and agent.name in self._objects and late_s >= self._settings.lease_renew_s:
            await self._records.renew(agent.name, self._objects[agent.name]["metadata"]["uid"])
            self._renewed_s[agent.name] = now_s
