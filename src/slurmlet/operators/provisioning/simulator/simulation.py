"""One trace under one policy, and what came of it: how long jobs waited, what machines cost, what was done twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmlet.operators.provisioning.autoscaler.worker_sets import ScaleTarget, Shape, WorkerSet
from slurmlet.operators.provisioning.simulator.scaling_policies import (
    FixedPolicy,
    KedaPolicy,
    Policy,
    PowerSavingPolicy,
    SlurmletPolicy,
)
from slurmlet.operators.provisioning.simulator.simulated_cluster import Delays, Sample, SimulatedCluster
from slurmlet.operators.provisioning.simulator.trace_job import TraceJob

POLICIES: dict[str, Callable[[], Policy]] = {
    "slurmlet": SlurmletPolicy,
    "thesis": lambda: KedaPolicy(refined=True),
    "slinky": lambda: KedaPolicy(refined=False),
    "power-saving": PowerSavingPolicy,
    "fixed": FixedPolicy,
}
INTERVAL_S = 15.0


@dataclass(frozen=True)
class Outcome:
    """Waits are from when a job could begin to the start of the run that counted: work done twice is waited for."""

    policy: str
    jobs: int
    finished: int
    impossible: int
    waits_s: tuple[float, ...]
    node_hours: float
    busy_node_hours: float
    lost_node_hours: float  # of runs that were cut off
    requeues: int
    scale_outs: int  # machines made, or switched on
    ended_s: float
    samples: tuple[Sample, ...]
    decisions_s: tuple[float, ...] = ()  # how long each decision took, of real time
    queue_lengths: tuple[int, ...] = ()  # at each of these

    @property
    def unfinished(self) -> int:
        return self.jobs - self.finished - self.impossible

    @property
    def mean_wait_s(self) -> float:
        return sum(self.waits_s) / len(self.waits_s) if self.waits_s else 0.0

    def wait_s(self, share: float) -> float:
        """The wait that this share of the jobs had at most."""
        ordered = sorted(self.waits_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def default_set(
    *, cpus: int, memory_mb: int, most: int, least: int = 0, scale_in_after_s: float = 300.0
) -> WorkerSet:
    """Of a simulation without a file of WorkerSets."""
    return WorkerSet(
        name="workers",
        slurm_cluster="simulated",
        target=ScaleTarget("cluster.x-k8s.io/v1beta2", "MachineDeployment", "workers"),
        partitions=frozenset({"batch"}),
        shape=Shape(cpus, memory_mb),
        max=most,
        min=least,
        scale_in_after_s=scale_in_after_s,
    )


def simulate(
    trace: Sequence[TraceJob], sets: Sequence[WorkerSet], policy: Policy, delays: Delays, *, seed: int = 0,
    interval_s: float = INTERVAL_S, horizon_s: float | None = None,
) -> Outcome:  # fmt: skip
    """Until all jobs are done and machines are at rest, or the horizon: a policy may never get there."""
    cluster = SimulatedCluster(sets, trace, delays, seed=seed, cloud=policy.cloud)
    policy.begin(cluster)
    if horizon_s is None:
        longest_s = max((job.run_s for job in trace), default=0.0)
        horizon_s = cluster.last_submit_s * 1.5 + 20 * longest_s + 86_400
    last_done_s: float | None = None
    while cluster.now_s < horizon_s:
        policy.act(cluster)
        cluster.schedule()
        next_s = cluster.now_s + interval_s
        if not cluster.pending and not cluster.running and not cluster.nodes:
            # Nobody waits and nothing is there: on to the next submission.
            next_s = max(next_s, cluster.next_event_s or next_s)
        cluster.advance(next_s)
        if cluster.finished:
            if last_done_s is None:
                last_done_s = max((job.ended_s or 0.0 for job in cluster.done), default=0.0)
            if cluster.at_rest or not policy.shrinks or cluster.now_s > last_done_s + 3600:
                break
        else:
            last_done_s = None
    return _outcome(cluster, policy)


def _outcome(cluster: SimulatedCluster, policy: Policy) -> Outcome:
    done = cluster.done
    ours = policy if isinstance(policy, SlurmletPolicy) else None
    return Outcome(
        policy=policy.name,
        jobs=len(cluster.jobs),
        finished=len(done),
        impossible=sum(job.impossible for job in cluster.jobs),
        waits_s=tuple(max(0.0, (job.ended_s or 0.0) - job.trace.run_s - job.eligible_s) for job in done),
        node_hours=cluster.node_s / 3600,
        busy_node_hours=cluster.busy_node_s / 3600,
        lost_node_hours=sum(job.lost_node_s for job in cluster.jobs) / 3600,
        requeues=sum(job.requeues for job in cluster.jobs),
        scale_outs=cluster.boots,
        ended_s=max((job.ended_s or 0.0 for job in done), default=0.0),
        samples=(*cluster.samples, cluster.sample()),
        decisions_s=tuple(ours.durations_s) if ours else (),
        queue_lengths=tuple(ours.queue_lengths) if ours else (),
    )
