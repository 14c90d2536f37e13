"""A Slurm with machines that come and go, in simulated time: a queue with backfill, targets with replicas.

It does what Slurm and Cluster API do as far as a scaling policy can tell: a machine takes minutes to boot; a target whose
replicas are lowered deletes marked machines first and any others after; a job whose node is deleted is requeued and starts
from its beginning. Nothing here decides on sizes: that is the policies' part.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import Machine
from slurmlet.operators.provisioning.autoscaler.worker_sets import WorkerSet
from slurmlet.operators.provisioning.simulator.simulated_nodes import (
    Power,
    SimJob,
    SimNode,
    has_room,
    sim_job,
    suits,
    told_job,
    told_node,
)
from slurmlet.operators.provisioning.simulator.trace_job import TraceJob

# How far down the queue is looked for a job that may start before its turn (bf_max_job_test).
_BACKFILL_DEPTH = 100


@dataclass(frozen=True)
class Delays:
    boot_s: float = 300.0
    stop_s: float = 60.0
    react_s: float = 0.0  # of the target's controller to other replicas


@dataclass(frozen=True, slots=True)
class Sample:
    at_s: float
    nodes: int
    busy: int
    pending: int


class SimulatedCluster:
    def __init__(
        self,
        sets: Sequence[WorkerSet],
        jobs: Iterable[TraceJob],
        delays: Delays,
        *,
        seed: int = 0,
        cloud: bool = False,
    ) -> None:
        self.sets = {one.name: one for one in sets}
        self.delays = delays
        self.now_s = 0.0
        self.version = 0  # changes with every fact
        self.nodes: dict[str, SimNode] = {}
        self.replicas = dict.fromkeys(self.sets, 0)
        self.pending: dict[SimJob, None] = {}  # in order of submission; a requeued job keeps its place
        self.running: dict[SimJob, None] = {}
        self.done: list[SimJob] = []
        self.samples: list[Sample] = []
        self.node_s = 0.0  # of machines that are there, booting and stopping ones too
        self.busy_node_s = 0.0
        self.boots = 0
        self._made = itertools.count(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._draw = random.Random(seed)  # noqa: S311
        self._cloud = cloud
        self.jobs = [sim_job(job, sets) for job in jobs]
        self.last_submit_s = max((job.trace.submit_s for job in self.jobs), default=0.0)
        for job in self.jobs:
            self.at(job.trace.submit_s, lambda job=job: self._submit(job))  # type: ignore[misc]

    # Time

    def at(self, when_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when_s, next(self._order), act))

    @property
    def next_event_s(self) -> float | None:
        return self._events[0][0] if self._events else None

    def advance(self, until_s: float) -> None:
        """Let everything happen up to and at that time; Slurm looks at its queue after each instant."""
        while self._events and self._events[0][0] <= until_s:
            when_s = self._events[0][0]
            self._pass_time(when_s)
            while self._events and self._events[0][0] == when_s:
                heapq.heappop(self._events)[2]()
            self.schedule()
        self._pass_time(until_s)

    def _pass_time(self, until_s: float) -> None:
        passed_s = until_s - self.now_s
        if passed_s <= 0:
            return
        now = self.sample()
        self.node_s += passed_s * now.nodes
        self.busy_node_s += passed_s * now.busy
        if not self.samples or replace(self.samples[-1], at_s=now.at_s) != now:
            self.samples.append(now)
        self.now_s = until_s

    def sample(self) -> Sample:
        there = [node for node in self.nodes.values() if node.power is not Power.OFF]
        return Sample(self.now_s, len(there), sum(bool(node.jobs) for node in there), len(self.pending))

    @property
    def finished(self) -> bool:
        return (
            not self.running
            and self.now_s > self.last_submit_s
            and all(job.impossible for job in self.pending)
        )

    @property
    def at_rest(self) -> bool:
        """No machine is there beyond the minimum."""
        there = [node for node in self.nodes.values() if node.power is not Power.OFF]
        return len(there) <= sum(one.min for one in self.sets.values())

    # Jobs

    def _submit(self, job: SimJob) -> None:
        self.version += 1
        self.pending[job] = None
        if job.trace.held_s:
            self.at(job.eligible_s, lambda: self._release(job))

    def _release(self, job: SimJob) -> None:
        self.version += 1
        job.told = None

    def schedule(self) -> None:
        """Start what fits: the first that does not gets a reservation, which later ones may not delay."""
        hopeless: set[tuple[object, ...]] = set()
        reserved_s: float | None = None
        looked = 0
        for job in list(itertools.islice(self.pending, 2000)):
            if job.request in hopeless or job.eligible_s > self.now_s:
                continue
            looked += 1
            if looked > _BACKFILL_DEPTH:
                break
            nodes = None
            if reserved_s is None or self.now_s + job.limit_s <= reserved_s:
                nodes = self._find(job)
            if nodes is not None:
                self._start(job, nodes)
                continue
            hopeless.add(job.request)
            if reserved_s is None:
                reserved_s = self._earliest_s(job)

    def _candidates(self, job: SimJob) -> list[SimNode]:
        powers = (Power.UP, Power.OFF) if self._cloud else (Power.UP,)
        return [
            node for node in self.nodes.values() if node.power in powers and not node.drained and suits(job, node.spec)
        ]  # fmt: skip

    def _find(self, job: SimJob) -> list[SimNode] | None:
        fitting = [node for node in self._candidates(job) if has_room(job, node)]
        if len(fitting) < job.nodes_wanted:
            return None
        fitting.sort(key=lambda node: (node.power is Power.OFF, node.free_cpus))
        return fitting[: job.nodes_wanted]

    def _earliest_s(self, job: SimJob) -> float | None:
        """When it can start at the latest on the nodes that are there; None where they are too few."""
        free_s = []
        for node in self._candidates(job):
            ends = [other.began_s + other.limit_s for other in node.jobs if other.began_s is not None]
            free_s.append(self.now_s if has_room(job, node) else max(ends, default=self.now_s))
        return sorted(free_s)[job.nodes_wanted - 1] if len(free_s) >= job.nodes_wanted else None

    def _start(self, job: SimJob, nodes: list[SimNode]) -> None:
        del self.pending[job]
        self.running[job] = None
        job.on = nodes
        job.told = None
        for node in nodes:
            self._occupy(node, job, -1)
            if node.power is Power.OFF:
                self._power_up(node)
        if all(node.power is Power.UP for node in nodes):
            self._begin(job)

    def _begin(self, job: SimJob) -> None:
        job.began_s = self.now_s
        job.run += 1
        run = job.run
        self.at(self.now_s + job.trace.run_s, lambda: self._end(job, run))

    def _end(self, job: SimJob, run: int) -> None:
        if job.run != run or job not in self.running:
            return
        self._release_nodes(job)
        job.ended_s = self.now_s
        self.done.append(job)

    def _release_nodes(self, job: SimJob) -> None:
        del self.running[job]
        for node in job.on:
            self._occupy(node, job, +1)
            node.last_busy_s = self.now_s
        job.on = []
        job.told = None

    def _occupy(self, node: SimNode, job: SimJob, sign: int) -> None:
        self.version += 1
        node.told = None
        node.free_cpus += sign * job.cpus
        node.free_memory_mb += sign * job.memory_mb
        for name, count in job.gres:
            node.free_gres[name] = node.free_gres.get(name, 0) + sign * count
        if sign < 0:
            node.jobs[job] = None
        else:
            del node.jobs[job]

    def _requeue(self, job: SimJob) -> None:
        if job.began_s is not None:
            # Its share of each node: others are cut off there too.
            shares = sum(job.cpus / node.spec.shape.cpus for node in job.on)
            job.lost_node_s += (self.now_s - job.began_s) * shares
        self._release_nodes(job)
        job.began_s = None
        job.run += 1
        job.requeues += 1
        # It keeps its submit time, and so its place in the queue.
        self.pending = dict.fromkeys(sorted([*self.pending, job], key=lambda one: one.trace.submit_s))

    # Machines

    def set_replicas(self, name: str, count: int) -> None:
        self.replicas[name] = count
        self.version += 1
        if self.delays.react_s:
            self.at(self.now_s + self.delays.react_s, lambda: self._reconcile(name))
        else:
            self._reconcile(name)

    def _reconcile(self, name: str) -> None:
        """What the target's controller does: new machines, or deletions, marked ones first and then whichever."""
        count = self.replicas[name]
        alive = [
            node
            for node in self.nodes.values()
            if node.spec.name == name and node.power is not Power.STOPPING
        ]
        for _ in range(count - len(alive)):
            self.add_node(name)
        if count < len(alive):
            self._draw.shuffle(alive)
            alive.sort(key=lambda node: not node.marked)
            for node in alive[: len(alive) - count]:
                self.delete(node)

    def add_node(self, name: str, power: Power = Power.BOOTING) -> SimNode:
        spec = self.sets[name]
        node = SimNode(f"{name}-{next(self._made)}", spec, self.now_s, power)
        node.free_cpus, node.free_memory_mb = spec.shape.cpus, spec.shape.memory_mb
        node.free_gres = dict(spec.shape.gres)
        node.last_busy_s = self.now_s
        self.nodes[node.name] = node
        self.version += 1
        if power is Power.BOOTING:
            self._power_up(node)
        elif power is Power.UP:
            node.up_s = self.now_s
        return node

    def _power_up(self, node: SimNode) -> None:
        node.power = Power.BOOTING
        self.boots += 1
        self.at(self.now_s + self.delays.boot_s, lambda: self._up(node))

    def _up(self, node: SimNode) -> None:
        if node.power is not Power.BOOTING:
            return
        node.power = Power.UP
        node.up_s = node.last_busy_s = self.now_s
        node.told = None
        self.version += 1
        for job in node.jobs:
            if job.began_s is None and all(one.power is Power.UP for one in job.on):
                self._begin(job)

    def delete(self, node: SimNode) -> None:
        """Whatever runs there is requeued: to look first is the policy's part."""
        for job in list(node.jobs):
            self._requeue(job)
        self._stop(node, lambda: self.nodes.pop(node.name, None))

    def power_down(self, node: SimNode) -> None:
        def off() -> None:
            node.power = Power.OFF

        self._stop(node, off)

    def _stop(self, node: SimNode, then: Callable[[], object]) -> None:
        node.power = Power.STOPPING
        node.told = None
        self.version += 1

        def stopped() -> None:
            self.version += 1
            then()

        self.at(self.now_s + self.delays.stop_s, stopped)

    def drain(self, name: str, *, drained: bool) -> None:
        node = self.nodes[name]
        node.drained, node.told = drained, None
        self.version += 1

    def mark(self, name: str, *, marked: bool) -> None:
        self.nodes[name].marked = marked
        self.version += 1

    # What Slurm and Kubernetes would tell

    def queue(self) -> tuple[QueuedJob, ...]:
        return tuple(told_job(job, self.now_s) for job in itertools.chain(self.running, self.pending))

    def workers(self) -> tuple[WorkerNode, ...]:
        return tuple(told_node(node) for node in self.nodes.values() if node.up_s is not None)

    def machines(self, name: str) -> tuple[Machine, ...]:
        return tuple(
            Machine(
                node.name, node.name, node.created_s, node.power is Power.STOPPING, node.marked, node.marked
            )
            for node in self.nodes.values()
            if node.spec.name == name
        )
