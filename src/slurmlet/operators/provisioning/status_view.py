"""What `slurmlet provision status` and `plan` show: machines and their Slurm state side by side, and what would be done now.

Read only. Both read the same facts as the operator and, for the plan, ask the same function what to do; no operator has to
run for it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slurmlet.base.errors import SlurmError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.controller import key_of, told
from slurmlet.kube.discovery import Discovery
from slurmlet.model.job_states import Stage
from slurmlet.operators.provisioning.autoscaler.decision import PolicyState, decide
from slurmlet.operators.provisioning.autoscaler_controller import (
    SETS_PATH,
    ReadSet,
    is_power_saving,
    read_set,
    snapshot_of,
)
from slurmlet.operators.provisioning.scale_target import Member, ScaleTargets
from slurmlet.operators.provisioning.slurm_access import Look, SlurmLooks, SlurmSource

Obj = Mapping[str, Any]


@dataclass(frozen=True)
class MachineRow:
    worker_set: str
    machine: str  # "" where Slurm has a node and Kubernetes no machine for it
    phase: str  # of the Machine or pod
    node: str
    state: str  # of the Slurm node, with its flags; "" where Slurm does not know it
    reason: str
    jobs: tuple[str, ...]


@dataclass(frozen=True)
class SetRow:
    name: str
    target: str
    min: int
    max: int
    replicas: int | None
    desired: int | None
    waiting_jobs: int
    decided_at: str
    reason: str  # the last decision, or what is wrong


@dataclass(frozen=True)
class ClusterView:
    """One SlurmCluster with all that belongs to it. `problem`: why Slurm could not be asked."""

    name: str
    problem: str
    waiting: Mapping[str, int]  # jobs in the queue by Slurm's reason
    sets: tuple[SetRow, ...]
    machines: tuple[MachineRow, ...]


@dataclass(frozen=True)
class SetPlan:
    worker_set: str
    desired: int | None
    acts: tuple[str, ...]  # what would be done now
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ClusterPlan:
    name: str
    problem: str
    sets: tuple[SetPlan, ...]
    ignored: tuple[str, ...]  # jobs that are no reason for workers
    unplaced: tuple[str, ...]  # jobs that are, and get none


@dataclass(frozen=True)
class _Facts:
    cluster: Obj
    sets: tuple[ReadSet, ...]
    look: Look | None
    problem: str


async def _facts(client: ApiClient, source: SlurmSource, namespace: str) -> list[_Facts]:
    place = f"/namespaces/{namespace}" if namespace else ""
    clusters = (await client.get(f"{SETS_PATH}{place}/slurmclusters")).get("items") or ()
    listed = (await client.get(f"{SETS_PATH}{place}/workersets")).get("items") or ()
    looks, targets = SlurmLooks(source), ScaleTargets(client, Discovery(client))
    found = []
    for cluster in clusters:
        mine = [one for one in listed if _is_of(one, cluster)]
        sets = tuple(await asyncio.gather(*(read_set(targets, one) for one in mine)))
        look, problem = None, ""
        try:
            look = await looks.look(cluster)
        except (SlurmError, ApiError) as error:
            problem = told(error)
        found.append(_Facts(cluster, sets, look, problem))
    return found


def _is_of(worker_set: Obj, cluster: Obj) -> bool:
    here = worker_set["metadata"]["namespace"] == cluster["metadata"]["namespace"]
    return bool(here and worker_set["spec"].get("slurmCluster") == cluster["metadata"]["name"])


async def read_status(client: ApiClient, source: SlurmSource, namespace: str = "") -> list[ClusterView]:
    return [_view(facts) for facts in await _facts(client, source, namespace)]


def _view(facts: _Facts) -> ClusterView:
    look = facts.look
    waiting: Counter[str] = Counter()
    for job in look.jobs if look is not None else ():
        if job.stage is Stage.QUEUED:
            waiting[job.reason or "None"] += job.tasks_pending
    rows = [_machine_row(one, member, look) for one in facts.sets for member in _members(one)]
    known = {row.node for row in rows}
    strays = [node for node in (look.workers if look is not None else ()) if node.name not in known]
    rows += [
        MachineRow("", "", "", node.name, _state(look, node.name), node.reason, _jobs(look, node.name))
        for node in strays
    ]
    return ClusterView(
        name=key_of(facts.cluster),
        problem=facts.problem,
        waiting=dict(waiting.most_common()),
        sets=tuple(_set_row(one) for one in facts.sets),
        machines=tuple(rows),
    )


def _members(one: ReadSet) -> Sequence[Member]:
    return one.target.members if one.target is not None else ()


def _machine_row(one: ReadSet, member: Member, look: Look | None) -> MachineRow:
    phase = str((member.obj.get("status") or {}).get("phase") or "")
    known = look.by_name.get(member.node) if look is not None else None
    return MachineRow(
        worker_set=one.name,
        machine=member.name,
        phase="Deleting" if member.deleting else phase,
        node=member.node,
        state=_state(look, member.node),
        reason=known.reason if known is not None else "",
        jobs=_jobs(look, member.node),
    )


def _state(look: Look | None, node: str) -> str:
    known = look.by_name.get(node) if look is not None else None
    if known is None:
        return ""
    flags = sorted(known.flags - {"DYNAMIC_NORM"})
    return "+".join((known.state, *flags))


def _jobs(look: Look | None, node: str) -> tuple[str, ...]:
    return tuple(str(job.job_id) for job in look.jobs_on(node)) if look is not None else ()


def _set_row(one: ReadSet) -> SetRow:
    status, spec = one.obj.get("status") or {}, one.obj["spec"]
    last = status.get("lastDecision") or {}
    ref = spec.get("scaleTargetRef") or {}
    return SetRow(
        name=one.name,
        target=f"{ref.get('kind')}/{ref.get('name')}",
        min=int(spec.get("min") or 0),
        max=int(spec.get("max") or 0),
        replicas=one.target.replicas if one.target is not None else None,
        desired=status.get("desired"),
        waiting_jobs=int(status.get("waitingJobs") or 0),
        decided_at=str(last.get("time") or ""),
        reason=told(one.problem) if one.problem is not None else str(last.get("reason") or ""),
    )


async def read_plan(
    client: ApiClient, source: SlurmSource, now_s: float, namespace: str = ""
) -> list[ClusterPlan]:
    return [_plan(facts, now_s) for facts in await _facts(client, source, namespace)]


def _plan(facts: _Facts, now_s: float) -> ClusterPlan:
    name = key_of(facts.cluster)
    if facts.look is None:
        return ClusterPlan(name, facts.problem, (), (), ())
    driven = [one for one in facts.sets if not is_power_saving(one.obj)]
    decision = decide(snapshot_of(driven, facts.look), PolicyState(), now_s)
    decided = {one.name: one for one in decision.sets}
    plans = []
    for one in facts.sets:
        made = decided.get(one.name)
        if is_power_saving(one.obj):
            plans.append(SetPlan(one.name, None, (), ("Slurm's power saving decides for this set",)))
        elif made is None or one.target is None:
            assert one.problem is not None
            plans.append(SetPlan(one.name, None, (), (told(one.problem),)))
        else:
            acts = [f"resume {node} in Slurm" for node in made.undrain]
            acts += [f"take the deletion mark off {machine}" for machine in made.unmark]
            acts += [f"drain {node} in Slurm" for node in made.drain]
            acts += [f"mark {machine} to be deleted first" for machine in made.mark]
            if made.replicas is not None:
                acts.append(f"set replicas from {one.target.replicas} to {made.replicas}")
            plans.append(SetPlan(one.name, made.desired, tuple(acts), made.reasons))
    return ClusterPlan(
        name,
        "",
        tuple(plans),
        tuple(f"{one.count} jobs (such as {one.example}): {one.why}" for one in decision.ignored),
        tuple(f"{one.count} jobs (such as {one.waiting.example}): {one.why}" for one in decision.unplaced),
    )


def as_json(found: Sequence[ClusterView | ClusterPlan]) -> list[dict[str, Any]]:
    return [asdict(one) for one in found]
