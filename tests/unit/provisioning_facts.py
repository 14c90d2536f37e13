"""Facts for tests of the autoscaler, with everything that a test does not speak of at its plainest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_admin_values import DRAIN_REASON, Gres, QueuedJob, WorkerNode
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import Machine, SetFacts, Snapshot
from slurmlet.operators.provisioning.autoscaler.decision import Decision, PolicyState, SetDecision, decide
from slurmlet.operators.provisioning.autoscaler.worker_sets import ScaleTarget, Shape, WorkerSet

NOW_S = 1_700_000_000.0
OURS = f"{DRAIN_REASON} idle"


def worker_set(name: str = "small", **fields: Any) -> WorkerSet:
    plain = WorkerSet(
        name=name,
        slurm_cluster="one",
        target=ScaleTarget("cluster.x-k8s.io/v1beta2", "MachineDeployment", name),
        partitions=frozenset({"batch"}),
        shape=Shape(16, 64_000),
        max=10,
    )
    return replace(plain, **fields)


def waiting_job(number: int = 1, **fields: Any) -> QueuedJob:
    plain = QueuedJob(
        JobId(str(number)), "user1", "PENDING", "Resources", ("batch",), cpus=16, submitted_at_s=NOW_S - 60
    )
    return replace(plain, **fields)


def running_job(number: int, *nodes: str, **fields: Any) -> QueuedJob:
    return waiting_job(number, state="RUNNING", reason="", nodes=nodes, **fields)


def node(
    name: str, *, idle_s: float = 0.0, busy: bool = False, reason: str = "", flags: frozenset[str] = frozenset(),
    gres: Gres = (), **fields: Any,
) -> WorkerNode:  # fmt: skip
    plain = WorkerNode(
        name=name,
        state="ALLOCATED" if busy else "IDLE",
        flags=flags | {"DRAIN"} if reason else flags,
        reason=reason,
        partitions=frozenset({"batch"}),
        cpus=16,
        memory_mb=64_000,
        gres=gres,
        cpus_allocated=16 if busy else 0,
        slurmd_started_at_s=NOW_S - 86_400,
        last_busy_at_s=NOW_S - idle_s,
    )
    return replace(plain, **fields)


def facts(*names: str, replicas: int | None = None, spec: WorkerSet | None = None, **fields: Any) -> SetFacts:
    """A set with machines of these names, which are their nodes' too."""
    machines = tuple(Machine(name, name, NOW_S - 86_400, **fields) for name in names)
    return SetFacts(spec or worker_set(), len(names) if replicas is None else replicas, machines)


def decision(
    *sets: SetFacts, workers: list[WorkerNode] | None = None, jobs: list[QueuedJob] | None = None,
    state: PolicyState | None = None, now_s: float = NOW_S,
) -> Decision:  # fmt: skip
    return decide(Snapshot(sets, tuple(workers or ()), tuple(jobs or ())), state or PolicyState(), now_s)


def only(*sets: SetFacts, **given: Any) -> SetDecision:
    (found,) = decision(*sets, **given).sets
    return found
