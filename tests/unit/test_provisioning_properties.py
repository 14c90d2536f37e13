"""What must hold for any facts, and for any course of events: no job is ever cut off, no bound exceeded, nothing bounces."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from slurmlet.model.slurm_admin_values import QueuedJob
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import (
    Machine,
    SetFacts,
    Snapshot,
    nodes_in_use,
)
from slurmlet.operators.provisioning.autoscaler.decision import PolicyState, SetDecision, decide
from slurmlet.operators.provisioning.autoscaler.feature_expressions import ways
from slurmlet.operators.provisioning.autoscaler.worker_sets import WorkerSet
from slurmlet.operators.provisioning.simulator.scaling_policies import SlurmletPolicy
from slurmlet.operators.provisioning.simulator.simulated_cluster import Delays, SimulatedCluster
from slurmlet.operators.provisioning.simulator.simulation import default_set, simulate
from slurmlet.operators.provisioning.simulator.trace_job import TraceJob
from tests.unit.provisioning_facts import NOW_S, OURS, node, waiting_job, worker_set

NO_REASON_FOR_MACHINES = st.sampled_from([
    {"held": True, "reason": "JobHeldUser"},
    {"held": True, "reason": "JobHeldAdmin"},
    {"reason": "Dependency", "dependency": "afterok:7(unfulfilled)"},
    {"reason": "Resources", "dependency": "afterok:7(unfulfilled)"},
    {"reason": "DependencyNeverSatisfied"},
    {"reason": "BeginTime", "eligible_at_s": NOW_S + 60},
    {"reason": "None", "eligible_at_s": NOW_S + 60},
    {"reason": "JobArrayTaskLimit", "array_id": "9", "tasks_pending": 50, "tasks_at_once": 2},
    {"reason": "Resources", "array_id": "9", "tasks_pending": 50, "tasks_at_once": 0},
    {"reason": "QOSMaxJobsPerUserLimit"},
    {"reason": "AssocGrpCpuLimit"},
    {"reason": "MaxGRESPerAccount"},
    {"reason": "Licenses"},
    {"reason": "PartitionDown"},
    {"reason": "BadConstraints"},
    {"reason": "SomethingOfANewerSlurm"},
    {"reason": "Resources", "reservation": "maintenance"},
    {"reason": "Resources", "partitions": ("elsewhere",)},
    {"reason": "Resources", "features": "a100"},
    {"reason": "Resources", "features": "a100&("},
    {"reason": "Resources", "cpus_per_node": 17},
    {"reason": "Resources", "memory_mb_per_node": 64_001},
    {"reason": "Resources", "gres_per_node": (("gpu", 1),)},
    {"reason": "Resources", "nodes_min": 13, "cpus": 13},
])  # fmt: skip


@st.composite
def sets(draw: st.DrawFn, name: str) -> WorkerSet:
    most = draw(st.integers(0, 6))
    return worker_set(
        name,
        max=most,
        min=draw(st.integers(0, most)),
        scale_out_step=draw(st.none() | st.integers(1, 3)),
        scale_in_step=draw(st.none() | st.integers(1, 3)),
        paused=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    facts, workers, jobs = [], [], []
    for name in draw(st.sampled_from([("a",), ("a", "b")])):
        spec = draw(sets(name))
        machines = []
        for number in range(draw(st.integers(0, spec.max))):
            label = f"{name}{number}"
            marked = draw(st.booleans()) and draw(st.booleans())
            machines.append(
                Machine(
                    label,
                    label,
                    NOW_S - draw(st.sampled_from([10, 9_999])),
                    deleting=draw(st.booleans()) and draw(st.booleans()),
                    marked=marked,
                    marked_by_us=marked and draw(st.booleans()),
                    registered_before=draw(st.booleans()),
                )
            )
            kind = draw(
                st.sampled_from(
                    ["idle", "rested", "busy", "listed", "ours", "ours busy", "theirs", "down", "none"]
                )
            )
            if kind == "none":
                continue
            reason = OURS if "ours" in kind else "disk" if kind == "theirs" else ""
            worker = node(label, idle_s=900 if kind != "idle" else 5, busy="busy" in kind, reason=reason)
            workers.append(replace(worker, state="DOWN") if kind == "down" else worker)
            if kind == "listed" or (kind == "busy" and draw(st.booleans())):
                jobs.append(waiting_job(1000 + len(jobs), state="RUNNING", reason="", nodes=(label,)))
        replicas = max(0, sum(not m.deleting for m in machines) + draw(st.sampled_from([0, 0, 0, -1, 1])))
        facts.append(SetFacts(spec, min(replicas, spec.max), tuple(machines)))
    for number in range(draw(st.integers(0, 6))):
        nodes, cpus, priority = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.integers(0, 2))
        jobs.append(waiting_job(number, nodes_min=nodes, cpus=cpus, priority=priority))
    return Snapshot(tuple(facts), tuple(workers), tuple(jobs))


def each(snapshot: Snapshot) -> list[tuple[SetFacts, SetDecision]]:
    made = decide(snapshot, PolicyState(), NOW_S)
    return [(facts, made.of(facts.spec.name)) for facts in snapshot.sets]


@given(snapshots())
def test_no_busy_worker_is_drained_marked_or_given_up(snapshot: Snapshot) -> None:
    in_use = nodes_in_use(snapshot)
    for facts, made in each(snapshot):
        nodes = {machine.name: machine.node for machine in facts.machines}
        assert in_use.isdisjoint(made.drain)
        assert in_use.isdisjoint(nodes[name] for name in made.mark)
        busy = sum(machine.node in in_use and not machine.deleting for machine in facts.machines)
        if made.replicas is not None and made.replicas < facts.replicas:
            assert made.replicas >= busy
            # As many as go are marked, none of them is in use: the target takes those and no others.
            alive = [machine for machine in facts.machines if not machine.deleting]
            going = {m.name for m in alive if m.marked} | set(made.mark)
            assert len(alive) - made.replicas == len(going)
            assert in_use.isdisjoint(nodes[name] for name in going)
            assert not made.unmark or going.isdisjoint(made.unmark)


@given(snapshots())
def test_bounds_and_steps_are_kept(snapshot: Snapshot) -> None:
    for facts, made in each(snapshot):
        spec = facts.spec
        if made.replicas is not None and made.replicas > facts.replicas:
            assert made.replicas <= spec.max
            assert not made.mark
            assert not made.drain
            if spec.scale_out_step is not None:
                assert made.replicas - facts.replicas + made.starting <= spec.scale_out_step
        if made.drain and spec.scale_in_step is not None:
            deleting = sum(machine.deleting for machine in facts.machines)
            assert len(made.drain) + made.draining + deleting <= max(
                spec.scale_in_step, made.draining + deleting
            )
        if made.drain:
            assert made.busy + made.idle + made.starting + len(made.undrain) - len(made.drain) >= spec.min
        if spec.paused:
            assert not made.changes


@given(snapshots())
def test_only_our_own_drains_are_undone(snapshot: Snapshot) -> None:
    reasons = {worker.name: worker.reason for worker in snapshot.workers}
    for facts, made in each(snapshot):
        assert all(reasons[name] == OURS for name in made.undrain)
        assert all(reasons[name] == "" for name in made.drain)
        ours = {machine.name for machine in facts.machines if machine.marked_by_us}
        assert set(made.unmark) <= ours


@given(snapshots(), st.randoms(use_true_random=False))
def test_the_same_facts_in_any_order_give_the_same_decision(snapshot: Snapshot, draw: random.Random) -> None:
    jobs, workers = list(snapshot.jobs), list(snapshot.workers)
    draw.shuffle(jobs)
    draw.shuffle(workers)
    turned = [
        replace(one, machines=tuple(draw.sample(one.machines, len(one.machines)))) for one in snapshot.sets
    ]
    other = replace(snapshot, jobs=tuple(jobs), workers=tuple(workers), sets=tuple(turned))
    assert decide(other, PolicyState(), NOW_S) == decide(snapshot, PolicyState(), NOW_S)


@given(snapshots(), st.lists(NO_REASON_FOR_MACHINES, min_size=1, max_size=5))
def test_a_job_that_more_nodes_would_not_help_changes_nothing(
    snapshot: Snapshot, kinds: list[dict[str, object]]
) -> None:
    more: list[QueuedJob] = [waiting_job(500 + n, priority=9, **kind) for n, kind in enumerate(kinds)]
    before = decide(snapshot, PolicyState(), NOW_S)
    after = decide(replace(snapshot, jobs=(*snapshot.jobs, *more)), PolicyState(), NOW_S)
    assert after.sets == before.sets
    told = sum(one.count for one in after.ignored) + sum(
        one.count for one in after.unplaced if one.impossible
    )
    told -= sum(one.count for one in before.ignored) + sum(
        one.count for one in before.unplaced if one.impossible
    )
    assert told == sum(job.tasks_pending for job in more)


@given(st.text("ab&|()[]*12 ", max_size=30))
def test_any_constraint_is_understood_or_refused(text: str) -> None:
    try:
        found = ways(text)
    except ValueError:
        return
    assert found
    assert all(found)


JOBS = st.lists(
    st.builds(
        TraceJob,
        job_id=st.integers(1, 10**6).map(str),
        submit_s=st.integers(0, 1500).map(float),
        run_s=st.integers(1, 600).map(float),
        nodes=st.integers(1, 3),
        cpus=st.integers(3, 16),
        held_s=st.sampled_from([0.0, 0.0, 600.0]),
    ),
    min_size=1,
    max_size=8,
)


class CrashingPolicy(SlurmletPolicy):
    """Dies between any two steps of what was decided, and begins anew without memory."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self._random = draw

    def act(self, cluster: SimulatedCluster) -> None:
        self._version = -1
        if self._random.random() < 0.3:
            self._state = PolicyState()
        super().act(cluster)

    def carry_out(self, cluster: SimulatedCluster, made: SetDecision) -> None:
        whole = self.steps(cluster, made)
        cut = len(whole) if self._random.random() < 0.5 else self._random.randint(0, len(whole))
        for step in whole[:cut]:
            step()


@given(JOBS, st.sampled_from([0.0, 10.0, 45.0]), st.randoms(use_true_random=False))
def test_whatever_happens_all_jobs_run_once_and_all_machines_go(
    jobs: list[TraceJob], react_s: float, draw: random.Random
) -> None:
    spec = default_set(cpus=16, memory_mb=64_000, most=4, scale_in_after_s=60)
    found = simulate(jobs, [spec], CrashingPolicy(draw), Delays(90, 20, react_s), interval_s=30)
    assert (found.finished, found.requeues) == (len(jobs), 0)
    assert max(sample.nodes for sample in found.samples) <= 4 + 1  # one may still be stopping
    assert found.samples[-1].busy == 0


@given(snapshots())
def test_with_a_constant_queue_decisions_come_to_rest(snapshot: Snapshot) -> None:
    """Jobs that neither start nor end: whatever was decided is carried out, and then nothing more is decided, ever."""
    spec = [one.spec for one in snapshot.sets if not one.spec.paused]
    waiting = [job for job in snapshot.jobs if not job.nodes]
    frozen = [replace(job, submitted_at_s=0.0) for job in waiting]
    if not spec:
        return
    cluster = SimulatedCluster(spec, [], Delays(boot_s=90, stop_s=20))
    cluster.queue = lambda: tuple(frozen)  # type: ignore[method-assign]
    policy = SlurmletPolicy()
    for _ in range(60):
        policy.act(cluster)
        cluster.advance(cluster.now_s + 60)
    boots, nodes = cluster.boots, set(cluster.nodes)
    for _ in range(60):
        policy.act(cluster)
        cluster.advance(cluster.now_s + 60)
    assert (cluster.boots, set(cluster.nodes)) == (boots, nodes)
    assert not any(one.drained for one in cluster.nodes.values())
