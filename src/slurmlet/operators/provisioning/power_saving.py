"""Slurm's own power saving as the driver: ResumeProgram and SuspendProgram, and CLOUD nodes mapped to Machines.

The programs only write down which nodes are to be on, as an annotation of the WorkerSet that stands for them, and return at
once; slurmctld waits for nobody. The controller brings the machines in line with that: as many as nodes are on, each with
the name of a node (an annotation that the bootstrap data are made from). A repeated call changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.conditions import Condition, status_patch
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.events import EventRecorder
from slurmlet.kube.finalizers import is_deleting
from slurmlet.kube.work_queue import Backoff
from slurmlet.model.host_lists import expand
from slurmlet.operators.provisioning import worker_annotations as marks
from slurmlet.operators.provisioning.autoscaler_controller import (
    API_VERSION,
    SETS_PATH,
    is_power_saving,
    read_set,
)
from slurmlet.operators.provisioning.scale_target import Member, ScaleTargets, Target, annotations_of

Obj = Mapping[str, Any]
_CONFLICTS = 10
_AGAIN_S, _SOON_S = 15.0, 0.5
_BACKOFF = Backoff(first_s=0.5, most_s=60.0)


# The programs that slurmctld calls


async def power(client: ApiClient, namespace: str, nodes: Sequence[str], on: bool) -> list[str]:
    """Write down that these nodes are to be on (or off); returns what was changed, for people. Raises UserError."""
    listed = await client.get(_sets_path(namespace))
    sets = [one for one in listed.get("items") or () if is_power_saving(one) and not is_deleting(one)]
    changed, left = [], list(nodes)
    for one in sets:
        mine = [name for name in nodes if name in names_of(one, marks.POWER_SAVING_NODES)]
        left = [name for name in left if name not in mine]
        if mine and await _write(client, one, mine, on):
            changed.append(f"{key_of(one)}: {','.join(mine)} {'on' if on else 'off'}")
    if left:
        raise UserError(
            f"no WorkerSet stands for {','.join(left)}",
            hint=f"Name them in the annotation {marks.POWER_SAVING_NODES} of a WorkerSet.",
        )
    return changed


async def _write(client: ApiClient, worker_set: Obj, nodes: Sequence[str], on: bool) -> bool:
    """slurmctld starts several programs at once: only a list that nobody changed meanwhile may be replaced."""
    path = _sets_path(worker_set["metadata"]["namespace"], worker_set["metadata"]["name"])
    for _ in range(_CONFLICTS):
        present = names_of(worker_set, marks.POWERED_ON)
        wanted = present | set(nodes) if on else present - set(nodes)
        if wanted == present:
            return False
        metadata = {
            "resourceVersion": worker_set["metadata"]["resourceVersion"],
            "annotations": {marks.POWERED_ON: ",".join(sorted(wanted))},
        }
        try:
            await client.patch(path, {"metadata": metadata})
            return True
        except ApiError as error:
            if error.status != 409:
                raise
            worker_set = await client.get(path)
    raise ApiError(409, f"{path} changed {_CONFLICTS} times while {marks.POWERED_ON} was written", "Conflict")


def resume_jobs(path: str) -> str:
    """What SLURM_RESUME_FILE tells of the jobs that the nodes are wanted for; "" where there is none to read."""
    try:
        jobs = json.loads(Path(path).read_text()).get("jobs") or () if path else ()
        return ", ".join(f"{one['job_id']} on {one.get('nodes_resume', '')}" for one in jobs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ""


# What the operator makes of it


@dataclass(frozen=True)
class PowerPlan:
    """`name`: members that get the name of a node; `mark`: those to go; `replicas`: None where they are right."""

    name: tuple[tuple[Member, str], ...]
    mark: tuple[Member, ...]
    replicas: int | None


def plan_power(target: Target, wanted: frozenset[str], most: int) -> PowerPlan:
    """Pure. Machines beyond those that are wanted go only where it is certain which: those marked, and no others."""
    alive = [one for one in target.members if not one.deleting]
    given = {one.annotations[marks.SLURM_NODE]: one for one in alive if marks.SLURM_NODE in one.annotations}
    nameless = [one for one in alive if marks.SLURM_NODE not in one.annotations]
    waiting = sorted(wanted - given.keys())
    pairs = tuple(zip(nameless, waiting, strict=False))
    off = [one for name, one in sorted(given.items()) if name not in wanted]
    # One that got no name, while none is waiting for a machine, has nothing to do.
    spare = nameless[len(waiting) :] if len(alive) >= target.replicas else []
    go = (*off, *spare)
    replicas = min(most, len(wanted))
    if replicas < target.replicas and len(alive) != target.replicas:
        # Lowered only from a number that is there: what was lowered already is not lowered again.
        replicas = target.replicas
    mark = tuple(one for one in go if marks.SCALE_IN not in one.annotations)
    return PowerPlan(pairs, mark, None if replicas == target.replicas else replicas)


class PowerSavingController:
    """Keys are WorkerSets that Slurm's power saving drives."""

    def __init__(
        self, client: ApiClient, worker_sets: Informer, targets: ScaleTargets, events: EventRecorder
    ) -> None:
        self._client, self._sets, self._targets, self._events = client, worker_sets, targets, events
        self.controller: Controller[str] = Controller("power-saving", self.reconcile, backoff=_BACKOFF)
        worker_sets.feed(self.controller, lambda one: key_of(one) if is_power_saving(one) else None)

    async def reconcile(self, key: str) -> Again:
        obj = self._sets.get(key)
        if obj is None or is_deleting(obj) or not is_power_saving(obj):
            return None
        found = await read_set(self._targets, obj)
        if found.target is None or found.spec is None:
            assert found.problem is not None
            await self._status(obj, Condition("Ready", False, found.problem.reason, told(found.problem)))
            return _AGAIN_S
        try:
            wanted = names_of(obj, marks.POWERED_ON) & names_of(obj, marks.POWER_SAVING_NODES)
        except ValueError as error:
            text = f"metadata.annotations: {marks.POWER_SAVING_NODES} or {marks.POWERED_ON}: {error}"
            await self._status(obj, Condition("Ready", False, "Invalid", text))
            return _AGAIN_S
        plan = plan_power(found.target, frozenset(wanted), found.spec.max)
        if not found.spec.paused:
            await self._carry_out(obj, found.target, plan)
        text = f"{len(wanted)} of {len(names_of(obj, marks.POWER_SAVING_NODES))} nodes are to be on"
        await self._status(
            obj,
            Condition("Ready", True, "PowerSaving", text),
            replicas=found.target.replicas,
            desired=len(wanted),
        )
        return _SOON_S * 4 if plan.replicas is not None or plan.name or plan.mark else _AGAIN_S

    async def _carry_out(self, obj: Obj, target: Target, plan: PowerPlan) -> None:
        for member, name in plan.name:
            await self._targets.annotate(member, {marks.SLURM_NODE: name})
            self._event(obj, "NodeAssigned", f"{member.name} is to be node {name}")
        for member in plan.mark:
            await self._targets.mark(member)
        if plan.replicas is not None:
            await self._targets.set_replicas(target, plan.replicas)
            self._event(
                obj, "ScaledOut" if plan.replicas > target.replicas else "ScaledIn",
                f"{target.replicas} → {plan.replicas} replicas, as Slurm's power saving asks for",
            )  # fmt: skip

    async def _status(self, obj: Obj, condition: Condition, **fields: Any) -> None:
        generation = int(obj["metadata"].get("generation") or 0)
        patch = status_patch(obj, condition, observedGeneration=generation, **fields)
        if patch is not None:
            path = _sets_path(obj["metadata"]["namespace"], obj["metadata"]["name"])
            try:
                self._sets.keep(await self._client.patch(f"{path}/status", patch))
            except ApiError as error:
                if error.status not in (404, 409):
                    raise

    def _event(self, obj: Obj, reason: str, message: str) -> None:
        self._events.object_event(API_VERSION, "WorkerSet", obj, "Normal", reason, message)


def names_of(worker_set: Obj, annotation: str) -> set[str]:
    """Raises ValueError for what is no list of hosts."""
    return set(expand(annotations_of(worker_set).get(annotation) or ""))


def _sets_path(namespace: str, name: str = "") -> str:
    place = f"/namespaces/{namespace}" if namespace else ""
    return f"{SETS_PATH}{place}/workersets{f'/{name}' if name else ''}"
