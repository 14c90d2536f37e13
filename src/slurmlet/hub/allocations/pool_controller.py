"""Keeps the pool as large as it should be: asks for allocations, drains and ends them, replaces them in time.

All it knows it reads again each turn: pool.json, the jobs by their comment, the Nodes with their annotations, the pods.
A hub that is started anew goes on where the last one was. What Slurm refuses, and what ends before it serves, is asked for
again later and later; draining and ending go on meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmError, SlurmletError
from slurmlet.base.files import read_json
from slurmlet.hub.agents import Agents
from slurmlet.hub.allocations.allocation_jobs import AllocationJobs, end
from slurmlet.hub.allocations.growth import Growth
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.nodes.allocation_node_controller import AllocationNodeController
from slurmlet.hub.nodes.node_objects import NODES
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.runner_links import LinkLost
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import Again, Controller, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import pool
from slurmlet.model.gangs import GANG
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, stage_of
from slurmlet.model.pool import Member, PoolSpec
from slurmlet.model.pool_jobs import PoolJob
from slurmlet.model.slurm_values import JobSpec

log = logging.getLogger(__name__)
_TURN_S = 2.0
_MOST_AT_ONCE = 10
# Of turns that fail altogether: the API server or the home is away.
_TROUBLE = Backoff(first_s=_TURN_S, most_s=60.0)
_POOL = "pool"  # the one key: a cluster has one pool
_LOG_TAIL_BYTES = 400
Obj = dict[str, Any]


class PoolController:
    def __init__(
        self,
        settings: Settings,
        client: ApiClient,
        jobs: AllocationJobs,
        watch: JobWatch,
        agents: Agents,
        nodes: AllocationNodeController,
        events: EventRecorder,
        pods: Callable[[], Iterable[PodState]],
        clock: Clock | None = None,
    ) -> None:
        self._settings, self._client, self._jobs, self._watch = settings, client, jobs, watch
        self._agents, self._nodes = agents, nodes
        self._events, self._pods = events, pods
        self._busy_s: dict[str, float] = {}  # when each member last had a pod
        self._active = False
        self._tidied: set[str] | None = None  # who was there when directories were last looked through
        self._spec = PoolSpec()
        self._growth = Growth(clock or Clock())
        self._controller = Controller(_POOL, self.reconcile, backoff=_TROUBLE, on_failure=self._failed)

    @property
    def controllers(self) -> tuple[Controller[str], ...]:
        return (self._controller,)

    async def run(self) -> None:
        self._controller.add(_POOL)
        await self._controller.run()

    async def reconcile(self, _key: str) -> Again:
        raw = await asyncio.to_thread(read_json, self._settings.files.pool)
        if isinstance(raw, dict) or self._active:
            self._active = await self._turn(pool.spec_of(raw if isinstance(raw, dict) else {}))
        return _TURN_S

    def _failed(self, _key: str, error: Exception, _failures: int, delay_s: float) -> None:
        self._tell("PoolNotKept", f"{told(error)}; retrying in {delay_s:.0f} s")

    def _tell(self, reason: str, message: str) -> None:
        """A pool is no object of the API, but events may be about it all the same."""
        about = {"metadata": {"name": self._settings.cluster, "uid": f"pool-{self._settings.cluster_id}"}}
        self._events.object_event("slurmlet.io/v1", "Pool", about, "Warning", reason, message)

    async def _turn(self, spec: PoolSpec) -> bool:
        if not self._jobs.are_known(_POOL):
            return True
        if spec != self._spec:
            # What was refused as it was asked for before says nothing about this.
            self._spec = spec
            self._growth.begin_anew()
        members = [self._member(job) for job in self._watch.pool_jobs()]
        await self._notice_ended(members)
        waiting = await self._waiting_pods() if spec.most > spec.least else 0
        plan = pool.plan(spec, members, waiting)
        ids = {one.name: one.job_id for one in members}
        for name, why in plan.retire:
            await self._retire(name, why, ids[name])
        for name in plan.evict:
            await self._move_pods(name)
        for name in plan.release:
            await self._release(name, ids[name])
        await self._grow(spec, min(plan.add, _MOST_AT_ONCE))
        return bool(members) or spec.most > 0

    async def _notice_ended(self, members: Sequence[Member]) -> None:
        """Members whose jobs are over: those that never served hold the next one back, and their keys go."""
        died = self._growth.look(members)
        logs = [await asyncio.to_thread(_tail, self._settings.files.node(one.name).job_log) for one in died]
        for one, said in zip(died, logs, strict=True):
            why = f": {said}" if said else ", and its log is empty"
            text = f"Slurm job {one.job_id} of pool node {one.name} ended before the node was Ready{why}"
            log.warning("pool: %s", text)
            self._tell("PoolNodeFailed", f"{text}; retrying in {self._growth.wait_s():.0f} s")
        self._busy_s = {one.name: self._busy_s[one.name] for one in members}
        known = {one.name for one in members} | {agent.name for agent in self._agents}
        # The home is shared and may be slow: it is looked at only when something came or went.
        if known != self._tidied:
            await asyncio.to_thread(self._remove_others, known)
            self._tidied = known

    def _remove_others(self, known: set[str]) -> None:
        """Directories, with the keys in them, of members that are over. Those of agents go with their Node."""
        for path in self._settings.files.nodes.glob("pool-*"):
            if path.name not in known:
                shutil.rmtree(path, ignore_errors=True)

    async def _grow(self, spec: PoolSpec, count: int) -> None:
        """Stops at the first refusal: the next one would be refused for the same reason."""
        for _ in range(count):
            if self._growth.wait_s() > 0:
                return
            try:
                member = await self._ask_for_one(spec)
            except SlurmletError as error:
                wait_s = self._growth.refused()
                said = error.said if isinstance(error, SlurmError) else error.message
                hint = (
                    error.hint or "Correct the options: slurmlet pool size --min N --max N --sbatch OPTIONS."
                )
                log.warning("pool: Slurm refused a job: %s; retrying in %.0f s", said, wait_s)
                self._tell(
                    "PoolRefused",
                    f"Slurm refused the job of a pool node: {said}. {hint} Retrying in {wait_s:.0f} s",
                )
                return
            self._growth.accepted(member)

    # What there is

    def _member(self, job: PoolJob) -> Member:
        agent = self._agents.get(job.node)
        node: Obj = next((one for one in self._nodes.objects() if one["metadata"]["name"] == job.node), {})
        pods = [
            one for one in self._pods() if one.node == job.node and not one.terminal and not _is_daemon(one)
        ]
        now_s = asyncio.get_running_loop().time()
        if pods or job.node not in self._busy_s:
            self._busy_s[job.node] = now_s
        annotations = (node.get("metadata") or {}).get("annotations") or {}
        return Member(
            name=job.node,
            job_id=job.job_id,
            queued=stage_of(job.state) is Stage.QUEUED,
            ready=agent is not None and agent.alive,
            pods=len(pods),
            idle_s=now_s - self._busy_s[job.node],
            left_s=job.left_s,
            limit_s=job.limit_s,
            retiring=annotations.get(pool.RETIRING_ANNOTATION, ""),
        )

    async def _waiting_pods(self) -> int:
        """Pods that the scheduler finds no node for; those of a gang have an allocation of their own."""
        listed = await self._client.get(
            "/api/v1/pods", fieldSelector="spec.nodeName=,status.phase=Pending", labelSelector=f"!{GANG}"
        )
        return sum(
            any(
                one["type"] == "PodScheduled" and one.get("reason") == "Unschedulable"
                for one in (item.get("status") or {}).get("conditions") or ()
            )
            for item in listed.get("items") or ()
        )

    # What is done

    async def _ask_for_one(self, spec: PoolSpec) -> Member:
        name = f"pool-{secrets.token_hex(3)}"
        files = self._settings.files.node(name)
        self._tidied = None
        # An OSError here is about the home, not about Slurm: the turn has failed, and its back-off counts.
        await self._jobs.equip(name)
        argv = shlex.join(["python3", "-IS", str(self._settings.files.runner), "agent", str(files.root)])
        job = JobSpec(
            name=name,
            script=f"#!/bin/sh\nunset SLURM_JWT\nexec {argv}\n",
            nodes=1,
            # A member is one host.
            options=tuple(one for one in spec.options if one[0] != "nodes"),
        )
        try:
            job_id = await self._jobs.submit(_POOL, self._settings.cluster, name, name, job)
        except SlurmletError as error:
            # Where nobody answered there may be a job; if not, the next look takes the directory away.
            if not error.transient:
                await asyncio.to_thread(shutil.rmtree, files.root, ignore_errors=True)
            raise
        log.info("pool: asked for node %s, Slurm job %s", name, job_id)
        return Member(name, job_id, queued=True)

    async def _retire(self, name: str, why: str, job_id: JobId) -> None:
        log.info("pool: node %s goes: %s", name, why)
        self._growth.leaves(name)
        if self._agents.get(name) is None:
            # Its job is in the queue, or has just begun: nothing can be on it.
            await self._jobs.cancel(_POOL, job_id)
            return
        change = {
            "metadata": {"annotations": {pool.RETIRING_ANNOTATION: why}},
            "spec": {"unschedulable": True},
        }
        self._nodes.changed(await self._client.patch(f"{NODES}/{name}", change))

    async def _move_pods(self, name: str) -> None:
        """Evict what a controller makes anew elsewhere; budgets are the API server's to keep. Others may finish."""
        for state in self._pods():
            managed = any(one.get("controller") for one in state.pod["metadata"].get("ownerReferences") or ())
            if state.node != name or state.terminal or state.deleting or not managed or _is_daemon(state):
                continue
            eviction = {
                "apiVersion": "policy/v1",
                "kind": "Eviction",
                "metadata": {"name": state.pod["metadata"]["name"]},
            }
            try:
                await self._client.create(f"{state.path}/eviction", eviction)
            except ApiError as error:
                if error.status not in (404, 409, 429):
                    raise

    async def _release(self, name: str, job_id: JobId) -> None:
        self._growth.leaves(name)
        agent = self._agents.get(name)
        if agent is not None and agent.link is not None:
            # One that hung up in this moment is told, or cancelled, in the next turn.
            with contextlib.suppress(LinkLost):
                await end(agent)
        else:
            await self._jobs.cancel(_POOL, job_id)


def _is_daemon(state: PodState) -> bool:
    owners = state.pod["metadata"].get("ownerReferences") or ()
    return any(one.get("kind") == "DaemonSet" for one in owners)


def _tail(path: Path) -> str:
    """The last words of a job's log, on one line."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_TAIL_BYTES))
            return " ".join(file.read().decode(errors="replace").split())
    except OSError:
        return ""
