"""All facts that one decision is made from: the queue, Slurm's nodes, and for each WorkerSet its target and machines.

A snapshot is of one Slurm cluster, with all WorkerSets that belong to it: a job may run on any of them. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode
from slurmlet.operators.provisioning.autoscaler.worker_sets import WorkerSet


@dataclass(frozen=True, slots=True)
class Machine:
    """One replica of a set's target: a Machine of Cluster API, a pod of a NodeSet."""

    name: str
    node: str  # its name in Slurm
    created_at_s: float | None = None
    deleting: bool = False  # has a deletion timestamp
    marked: bool = False  # the target's controller takes it first when replicas are lowered
    marked_by_us: bool = False
    registered_before: bool = False  # it was seen in Slurm once: then it did not fail to start


@dataclass(frozen=True, slots=True)
class SetFacts:
    spec: WorkerSet
    replicas: int  # spec.replicas of the target, as its /scale says
    machines: tuple[Machine, ...] = ()
    problem: str = ""  # why the target or its machines could not be read: nothing is decided for this set


@dataclass(frozen=True)
class Snapshot:
    sets: tuple[SetFacts, ...] = ()
    workers: tuple[WorkerNode, ...] = ()
    jobs: tuple[QueuedJob, ...] = ()
    problem: str = ""  # why Slurm could not be asked: nothing is decided at all
    # MaxNodes of partitions that have one: what tells a job that is too large for ever from one that waits for machines.
    partition_max_nodes: Mapping[str, int] = field(default_factory=dict)


def nodes_in_use(snapshot: Snapshot) -> frozenset[str]:
    """Nodes that run, suspend, start or clean up after a job, whether the job's record or the node's says so.

    The two are read one after the other: a job that started in between is in one of them only.
    """
    held = {name for job in snapshot.jobs if job.nodes and job.stage is not Stage.ENDED for name in job.nodes}
    return frozenset(held.union(worker.name for worker in snapshot.workers if worker.busy))
