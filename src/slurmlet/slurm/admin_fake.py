"""An administrator's Slurm in memory, with a clock that is turned by hand: what tests of the provisioning operator stand on.

It ships with the package and passes the same contract tests as the real ones. Nodes register and vanish, jobs come,
start and end when told to; `schedule` places waiting jobs on idle nodes as slurmctld would, whole nodes at a time.
Nothing that the interface offers ends a job: `killed` lists those that lost a node all the same, and must stay empty.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode

Hook = Callable[[], Awaitable[None] | None]
DYNAMIC = frozenset({"DYNAMIC_NORM"})


class FakeAdmin:
    def __init__(self, first_id: int = 101) -> None:
        self.now_s = 1_700_000_000.0
        self.jobs: dict[JobId, QueuedJob] = {}
        self.nodes: dict[str, WorkerNode] = {}
        self.limits: dict[str, int] = {}  # MaxNodes by partition
        self.hooks: dict[str, Hook] = {}
        self.calls: list[tuple[str, ...]] = []  # what was changed, in order
        self.killed: list[JobId] = []
        self._ids = itertools.count(first_id)

    # What tests do with it

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def register(self, name: str, **fields: Any) -> WorkerNode:
        """A slurmd speaks for the node: its record is made, or is responding again. Since 24.05 this resets NodeAddr."""
        fresh: dict[str, Any] = {
            "state": "IDLE", "address": name, "hostname": name, "partitions": frozenset({"batch"}), "cpus": 4,
            "memory_mb": 8000, "flags": DYNAMIC, "booted_at_s": self.now_s, "slurmd_started_at_s": self.now_s,
            "last_busy_at_s": self.now_s,
        }  # fmt: skip
        known = self.nodes.get(name)
        if known is not None:
            kept = {"flags": known.flags - {"NOT_RESPONDING"}, "reason": known.reason}
            busy = {"state": known.state, "cpus_allocated": known.cpus_allocated} if known.busy else {}
            fresh = {**fresh, **kept, **busy}
        self.nodes[name] = WorkerNode(name=name, **{**fresh, **fields})
        return self.nodes[name]

    def vanish(self, name: str) -> None:
        """The machine goes away: its jobs die, and slurmctld notices after a while."""
        for job in [one for one in self.jobs.values() if name in one.nodes]:
            self.killed.append(job.job_id)
            self.finish(job.job_id)
        if name in self.nodes:
            node = self.nodes[name]
            self.nodes[name] = replace(node, state="DOWN", flags=node.flags | {"NOT_RESPONDING"})

    def submit(self, **fields: Any) -> JobId:
        job_id = JobId(str(next(self._ids)))
        asked: dict[str, Any] = {
            "user": "user1", "state": "PENDING", "reason": "Resources", "partitions": ("batch",),
            "submitted_at_s": self.now_s, "eligible_at_s": self.now_s, "priority": 100,
        }  # fmt: skip
        self.jobs[job_id] = QueuedJob(job_id=job_id, **{**asked, **fields})
        return job_id

    def start(self, job_id: JobId, nodes: Iterable[str], state: str = "RUNNING") -> None:
        held = tuple(nodes)
        self.jobs[job_id] = replace(
            self.jobs[job_id], state=state, reason="", nodes=held, started_at_s=self.now_s
        )
        for name in held:
            node = self.nodes[name]
            self.nodes[name] = replace(node, state="ALLOCATED", cpus_allocated=node.cpus)

    def finish(self, job_id: JobId) -> None:
        for name in self.jobs.pop(job_id).nodes:
            if name in self.nodes:
                self.nodes[name] = replace(
                    self.nodes[name], state="IDLE", cpus_allocated=0, last_busy_at_s=self.now_s
                )

    def schedule(self) -> list[JobId]:
        """Start what can start, in the order of submission."""
        started = []
        for job in list(self.jobs.values()):
            free = [
                node.name
                for node in self.nodes.values()
                if node.idle and node.partitions & set(job.partitions)
            ]
            if job.stage is Stage.QUEUED and not job.held and len(free) >= job.nodes_min:
                self.start(job.job_id, free[: job.nodes_min])
                started.append(job.job_id)
        return started

    # What Slurm does

    async def queue(self) -> list[QueuedJob]:
        await self._hook("queue")
        return list(self.jobs.values())

    async def workers(self) -> list[WorkerNode]:
        await self._hook("workers")
        return list(self.nodes.values())

    async def partition_limits(self) -> dict[str, int]:
        await self._hook("partition_limits")
        return dict(self.limits)

    async def drain(self, name: str, reason: str) -> None:
        node = await self._change("drain", name, reason)
        self.nodes[name] = replace(node, flags=node.flags | {"DRAIN"}, reason=reason)

    async def resume(self, name: str) -> None:
        node = await self._change("resume", name)
        self.nodes[name] = replace(node, flags=node.flags - {"DRAIN"}, reason="")

    async def delete(self, name: str) -> None:
        await self._hook("delete")
        self.calls.append(("delete", name))
        node = self.nodes.get(name)
        if node is None:
            return
        if not node.dynamic:
            raise SlurmError("Invalid node state specified", said="Invalid node state specified")
        if node.busy:
            raise SlurmError("Requested nodes are busy", reason="NodeBusy", transient=True)
        # As the real one: a suspended job does not protect its node.
        self.killed += [job.job_id for job in self.jobs.values() if name in job.nodes]
        del self.nodes[name]

    async def set_address(self, name: str, address: str) -> None:
        node = await self._change("set_address", name, address)
        self.nodes[name] = replace(node, address=address)

    async def power_up(self, name: str) -> None:
        node = await self._change("power_up", name)
        self.nodes[name] = replace(node, flags=(node.flags - {"POWERED_DOWN"}) | {"POWERING_UP"})

    async def power_down(self, name: str) -> None:
        node = await self._change("power_down", name)
        self.nodes[name] = replace(node, flags=(node.flags - {"POWERING_UP"}) | {"POWERING_DOWN"})

    async def close(self) -> None:
        """There is nothing to close."""

    # Within

    async def _change(self, method: str, name: str, *words: str) -> WorkerNode:
        await self._hook(method)
        self.calls.append((method, name, *words))
        if name not in self.nodes:
            said = f"Invalid node name specified: {name}"
            raise SlurmError(said, said=said)
        return self.nodes[name]

    async def _hook(self, method: str) -> None:
        hook = self.hooks.get(method)
        waited = hook() if hook is not None else None
        if inspect.isawaitable(waited):
            await waited
