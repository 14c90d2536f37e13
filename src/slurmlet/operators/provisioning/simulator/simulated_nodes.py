"""Jobs and nodes of the simulation, and what Slurm would tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_admin_values import DRAIN_REASON, Gres, QueuedJob, WorkerNode
from slurmlet.operators.provisioning.autoscaler.feature_expressions import ways
from slurmlet.operators.provisioning.autoscaler.worker_sets import WorkerSet
from slurmlet.operators.provisioning.simulator.trace_job import TraceJob


class Power(Enum):
    OFF = "off"  # of a pool that Slurm's power saving drives: known to Slurm, and not there
    BOOTING = "booting"
    UP = "up"
    STOPPING = "stopping"


@dataclass(eq=False, slots=True)
class SimNode:
    name: str
    spec: WorkerSet
    created_s: float
    power: Power = Power.BOOTING
    free_cpus: int = 0
    free_memory_mb: int = 0
    free_gres: dict[str, int] = field(default_factory=dict)
    jobs: dict[SimJob, None] = field(default_factory=dict)  # ordered: a run is the same each time
    last_busy_s: float = 0.0
    up_s: float | None = None
    drained: bool = False
    marked: bool = False
    told: WorkerNode | None = None  # kept while nothing has changed


@dataclass(eq=False, slots=True)
class SimJob:
    trace: TraceJob
    nodes_wanted: int
    cpus: int  # on each node
    memory_mb: int
    gres: Gres
    request: tuple[object, ...]  # jobs with equal ones fit where the other does
    sets: frozenset[str]  # whose machines could run it
    partition: str
    impossible: bool = False
    on: list[SimNode] = field(default_factory=list)
    began_s: float | None = None  # the present run
    ended_s: float | None = None
    requeues: int = 0
    lost_node_s: float = 0.0
    run: int = 0  # an end event of an earlier run is not of this one
    told: QueuedJob | None = None

    @property
    def eligible_s(self) -> float:
        return self.trace.submit_s + self.trace.held_s

    @property
    def limit_s(self) -> float:
        return self.trace.limit_s if self.trace.limit_s is not None else self.trace.run_s * 2


def sim_job(trace: TraceJob, sets: Sequence[WorkerSet]) -> SimJob:
    """What it asks of each node. Tasks of a trace that only counts processors are spread over as many nodes as it takes."""
    partition = trace.partition
    if not any(partition in one.partitions for one in sets):
        # Names of a recorded site mean nothing here.
        partition = min(sets[0].partitions)
    open_to = [one for one in sets if partition in one.partitions and _has_features(trace.features, one)]
    largest = max((one.shape.cpus for one in open_to), default=1)
    nodes = max(trace.nodes, -(-trace.cpus // largest) if trace.nodes == 1 else 1)
    cpus, memory_mb = -(-trace.cpus // nodes), -(-trace.memory_mb // nodes)
    gres = tuple((name, -(-count // nodes)) for name, count in trace.gres)
    fitting = [one for one in open_to if _could_hold(one, cpus, memory_mb, gres)]
    return SimJob(
        trace=trace,
        nodes_wanted=nodes,
        cpus=cpus,
        memory_mb=memory_mb,
        gres=gres,
        request=(partition, trace.features, nodes, cpus, memory_mb, gres),
        sets=frozenset(one.name for one in fitting),
        partition=partition,
        impossible=sum(one.max for one in fitting) < nodes,
    )


def _has_features(expression: str, one: WorkerSet) -> bool:
    try:
        return any(all(group.accepts(one.features) for group in way) for way in ways(expression))
    except ValueError:
        return False


def _could_hold(one: WorkerSet, cpus: int, memory_mb: int, gres: Gres) -> bool:
    held = dict(one.shape.gres)
    return (
        one.shape.cpus >= cpus
        and one.shape.memory_mb >= memory_mb
        and all(held.get(name, 0) >= count for name, count in gres)
    )


def suits(job: SimJob, spec: WorkerSet) -> bool:
    return spec.name in job.sets


def has_room(job: SimJob, node: SimNode) -> bool:
    return (
        node.free_cpus >= job.cpus
        and node.free_memory_mb >= job.memory_mb
        and all(node.free_gres.get(name, 0) >= count for name, count in job.gres)
    )


def told_job(job: SimJob, now_s: float) -> QueuedJob:
    if job.told is None:
        held = job.eligible_s > now_s
        nodes = job.nodes_wanted
        job.told = QueuedJob(
            JobId(job.trace.job_id), job.trace.user, "RUNNING" if job.on else "PENDING",
            "JobHeldUser" if held else "Resources", (job.partition,), nodes_min=nodes, nodes_max=nodes,
            cpus=job.cpus * nodes, memory_mb=job.memory_mb * nodes, gres_per_node=job.gres,
            features=job.trace.features, held=held, submitted_at_s=job.trace.submit_s,
            nodes=tuple(node.name for node in job.on),
        )  # fmt: skip
    return job.told


def told_node(node: SimNode) -> WorkerNode:
    if node.told is None:
        shape = node.spec.shape
        node.told = WorkerNode(
            node.name, "MIXED" if node.jobs else "IDLE", frozenset({"DRAIN"} if node.drained else ()),
            reason=f"{DRAIN_REASON} idle" if node.drained else "", partitions=node.spec.partitions,
            features=node.spec.features, cpus=shape.cpus, memory_mb=shape.memory_mb, gres=shape.gres,
            cpus_allocated=shape.cpus - node.free_cpus, memory_allocated_mb=shape.memory_mb - node.free_memory_mb,
            slurmd_started_at_s=node.up_s, last_busy_at_s=node.last_busy_s, topology=node.spec.topology_domain,
        )  # fmt: skip
    return node.told
