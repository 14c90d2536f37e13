"""How many replicas each WorkerSet should have now, and which workers to drain, resume and give up. Pure.

Scale-in is a protocol over time: drain an idle worker → seen drained → mark its machine → lower the replicas by as many
as are marked → the target's controller deletes those → the detach handler lets go once Slurm's record is gone. Every step
is read off the facts, none is remembered: whoever decides next, after a crash or on another host, goes on where the last one
was. The only memory (since when a node is idle where Slurm does not tell; what workers turned out to have) can be lost at
the price of a delay.

What must never happen: a replica less than there are busy workers; a drain of a worker that runs a job; a change while facts
are missing. Replicas are absolute numbers, and are lowered only while there are exactly as many machines as replicas:
then a write that is repeated, or whose answer was lost, does no harm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from slurmlet.model.slurm_admin_values import WorkerNode
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import Machine, Snapshot, nodes_in_use
from slurmlet.operators.provisioning.autoscaler.demand import Ignored, demand_of
from slurmlet.operators.provisioning.autoscaler.machine_standing import (
    Place,
    Seen,
    Standings,
    capacity_of,
    lots_of,
    may_go,
    standings_of,
)
from slurmlet.operators.provisioning.autoscaler.packing import Packing, Unplaced, pack
from slurmlet.operators.provisioning.autoscaler.worker_sets import DrainPolicy


@dataclass(frozen=True)
class PolicyState:
    """What is carried from one decision to the next; an empty one is always a right start."""

    idle_since_s: Mapping[str, float] = field(default_factory=dict)  # by node
    seen: Mapping[str, Seen] = field(default_factory=dict)  # by set


@dataclass(frozen=True)
class SetDecision:
    """To be carried out in this order: unmark, undrain, drain, mark, and replicas last."""

    name: str
    desired: int  # what the facts call for in the end
    replicas: int | None = None  # to write to /scale; None: leave as it is
    unmark: tuple[str, ...] = ()  # machines
    undrain: tuple[str, ...] = ()  # nodes
    drain: tuple[str, ...] = ()  # nodes
    mark: tuple[str, ...] = ()  # machines that go when the replicas are lowered
    reasons: tuple[str, ...] = ()
    # For the status.
    busy: int = 0
    idle: int = 0
    starting: int = 0
    draining: int = 0
    unavailable: int = 0
    failed: int = 0
    waiting_jobs: int = 0  # that would run on machines of this set

    @property
    def changes(self) -> bool:
        return self.replicas is not None or bool(self.unmark or self.undrain or self.drain or self.mark)


@dataclass(frozen=True)
class Decision:
    sets: tuple[SetDecision, ...]
    state: PolicyState
    ignored: tuple[Ignored, ...] = ()  # jobs that are no reason for machines
    unplaced: tuple[Unplaced, ...] = ()  # jobs that are, and get none

    def of(self, name: str) -> SetDecision:
        return next(one for one in self.sets if one.name == name)


def decide(snapshot: Snapshot, state: PolicyState, now_s: float) -> Decision:
    if snapshot.problem:
        said = f"Slurm could not be asked, nothing is changed: {snapshot.problem}"
        return Decision(tuple(_unchanged(one.spec.name, one.replicas, said) for one in snapshot.sets), state)
    workers = {worker.name: worker for worker in snapshot.workers}
    in_use = nodes_in_use(snapshot)
    sets = [
        standings_of(facts, workers, in_use, state.seen.get(facts.spec.name), now_s)
        for facts in snapshot.sets
    ]
    demand = demand_of(snapshot.jobs, now_s, snapshot.partition_max_nodes)
    packing = pack(demand.waiting, lots_of(sets, workers, in_use), capacity_of(sets, workers))
    idle_since_s = _idle_since_s(sets, workers, state, now_s)
    decided = []
    for one in sets:
        if one.facts.problem:
            said = f"the target could not be read, nothing is changed: {one.facts.problem}"
            decided.append(_unchanged(one.spec.name, one.facts.replicas, said))
        else:
            decided.append(_SetPolicy(one, packing, workers, idle_since_s, now_s).decision())
    seen = {one.spec.name: one.seen for one in sets}
    return Decision(tuple(decided), PolicyState(idle_since_s, seen), demand.ignored, tuple(packing.unplaced))


def _unchanged(name: str, replicas: int, reason: str) -> SetDecision:
    return SetDecision(name, desired=replicas, reasons=(reason,))


def _idle_since_s(
    sets: list[Standings], workers: Mapping[str, WorkerNode], state: PolicyState, now_s: float
) -> dict[str, float]:
    """Of Slurm's own times the latest; a node that has just come has been idle since then, not since 1970."""
    found = {}
    for one in sets:
        for machine in one.at(Place.IDLE):
            worker = workers[machine.node]
            if worker.last_busy_at_s is None:
                found[machine.node] = state.idle_since_s.get(machine.node, now_s)
            else:
                found[machine.node] = max(worker.last_busy_at_s, worker.slurmd_started_at_s or 0.0)
    return found


class _SetPolicy:
    """One set's part of a decision."""

    def __init__(
        self, one: Standings, packing: Packing, workers: Mapping[str, WorkerNode], idle_since_s: Mapping[str, float],
        now_s: float,
    ) -> None:  # fmt: skip
        self._one = one
        self._spec = one.spec
        self._packing = packing
        self._workers = workers
        self._idle_since_s = idle_since_s
        self._now_s = now_s
        self._reasons: list[str] = []
        self._idle = one.at(Place.IDLE)
        self._new = packing.new.get(one.spec.name, 0)

    def decision(self) -> SetDecision:
        one, spec = self._one, self._spec
        desired = self._desired()
        undrain = self._undrain()
        grow = self._grow(len(undrain))
        drain: tuple[Machine, ...] = ()
        leave: tuple[Machine, ...] = ()
        if not grow:
            leave = self._leave(undrain)
            drain = self._drain(len(undrain))
        unmark = self._unmark(undrain)
        replicas = one.facts.replicas + grow if grow else one.alive - len(leave) if leave else None
        made = SetDecision(
            name=spec.name,
            desired=desired,
            replicas=replicas,
            unmark=tuple(machine.name for machine in unmark),
            undrain=tuple(machine.node for machine in undrain),
            drain=tuple(machine.node for machine in drain),
            mark=tuple(machine.name for machine in leave if not machine.marked),
            reasons=(self._summary(desired), *self._reasons),
            busy=one.busy,
            idle=len(self._idle),
            starting=one.starting,
            draining=one.count(Place.DRAINING, Place.DRAINED),
            unavailable=one.count(Place.UNAVAILABLE),
            failed=one.count(Place.FAILED),
            waiting_jobs=self._packing.placed.get(spec.name, 0),
        )
        return _paused(made) if spec.paused else made

    def _wanted(self, machines: tuple[Machine, ...]) -> list[Machine]:
        return [machine for machine in machines if machine.node in self._packing.wanted]

    def _desired(self) -> int:
        one, spec = self._one, self._spec
        there = self._wanted(self._idle) + self._wanted(one.at(Place.DRAINED))
        wanted = one.busy + len(there) + self._packing.starting.get(spec.name, 0) + self._new
        aside = one.count(Place.UNAVAILABLE)
        return max(one.busy + aside, min(spec.max, max(spec.min, wanted) + aside))

    def _undrain(self) -> list[Machine]:
        """Workers that we drained and that are needed after all: cheaper, and sooner there, than new ones."""
        one, spec = self._one, self._spec
        found = list(one.at(Place.DRAINING))
        found += self._wanted(one.at(Place.DRAINED))
        short = spec.min - self._usable(len(found) - one.count(Place.DRAINING))
        responding = [
            machine
            for machine in one.at(Place.DRAINED)
            if machine not in found and self._workers[machine.node].responding
        ]
        found += responding[: max(0, short)]
        if found:
            self._say(f"resume {_names(found)}: needed after all")
        return found

    def _usable(self, undrained: int) -> int:
        return self._one.busy + len(self._idle) + self._one.starting + undrained

    def _grow(self, undrained: int) -> int:
        one, spec = self._one, self._spec
        undrained -= one.count(Place.DRAINING)
        wanted = max(self._new, spec.min - self._usable(undrained))
        if wanted <= 0:
            return 0
        if one.missing < 0:
            self._say(f"{-one.missing} machines are still to be deleted: scale-out waits for that")
            return 0
        allowed = spec.max - one.facts.replicas
        if spec.scale_out_step is not None:
            allowed = min(allowed, spec.scale_out_step - one.starting)
            if 0 <= allowed < wanted:
                self._say(
                    f"scale-out step: {one.starting} machines are starting, {spec.scale_out_step} may at a time"
                )
        grow = max(0, min(wanted, allowed))
        if grow:
            self._say(f"scale out by {grow} to {one.facts.replicas + grow} replicas")
        return grow

    def _drain(self, undrained: int) -> tuple[Machine, ...]:
        one, spec = self._one, self._spec
        if spec.drain_policy is DrainPolicy.NEVER:
            return ()
        surplus = [
            machine
            for machine in self._idle
            if machine.node not in self._packing.wanted and may_go(self._workers[machine.node])
        ]
        rested = [machine for machine in surplus if self._idle_for_s(machine) >= spec.scale_in_after_s]
        rested.sort(key=lambda machine: (-self._idle_for_s(machine), machine.name))
        allowed = self._usable(undrained - one.count(Place.DRAINING)) - spec.min
        if spec.scale_in_step is not None:
            allowed = min(allowed, spec.scale_in_step - one.going)
        chosen = tuple(rested[: max(0, allowed)])
        if chosen:
            longest_s = self._idle_for_s(chosen[0])
            self._say(
                f"drain {_names(chosen)}: idle for {longest_s:.0f} s (at least {spec.scale_in_after_s:.0f} s)"
            )
        elif len(surplus) > len(rested):
            self._say(
                f"{len(surplus) - len(rested)} idle workers wait for {spec.scale_in_after_s:.0f} s of idleness"
            )
        return chosen

    def _idle_for_s(self, machine: Machine) -> float:
        return self._now_s - self._idle_since_s[machine.node]

    def _leave(self, undrain: list[Machine]) -> tuple[Machine, ...]:
        """Machines to give up by lowering the replicas. All that are marked count: the target deletes those first."""
        one = self._one
        drained = tuple(machine for machine in one.at(Place.DRAINED) if machine not in undrain)
        failed = one.at(Place.FAILED)
        if not drained and not failed:
            return ()
        ours = {machine.name for machine in (*drained, *failed)}
        marked = [machine for place in Place for machine in one.at(place) if machine.marked]
        others = [m for m in marked if not m.deleting and m.name not in ours]
        if [machine for machine in others if not machine.marked_by_us]:
            self._say(f"scale-in waits: {_names(others)} carry a deletion mark that is not ours")
            return ()
        if one.missing or others:
            self._say("scale-in waits until there are as many machines as replicas, and none other is marked")
            return ()
        # One that failed at a time: if Slurm is what fails, not all machines should go for it.
        marked_failed = tuple(machine for machine in failed if machine.marked)
        leave = (*drained, *(marked_failed or failed[:1]))
        parts = [f"{_names(drained)} drained"] if drained else []
        parts += [f"{_names(leave[len(drained) :])} never registered with Slurm"] if failed else []
        self._say(f"scale in by {len(leave)} to {one.alive - len(leave)} replicas: {', '.join(parts)}")
        return leave

    def _unmark(self, undrain: list[Machine]) -> list[Machine]:
        """A mark of ours on a machine that shall stay, so that no later scale-in takes it."""
        one = self._one
        places = (Place.BUSY, Place.IDLE, Place.STARTING, Place.UNAVAILABLE)
        staying = [machine for place in places for machine in one.at(place)]
        return [machine for machine in (*staying, *undrain) if machine.marked_by_us]

    def _summary(self, desired: int) -> str:
        one = self._one
        states = [
            f"{count} {name}"
            for name, count in (
                ("busy", one.busy),
                ("idle", len(self._idle)),
                ("starting", one.starting),
                ("draining", one.count(Place.DRAINING, Place.DRAINED)),
                ("unavailable", one.count(Place.UNAVAILABLE)),
                ("failed", one.count(Place.FAILED)),
                ("leaving", one.count(Place.LEAVING)),
            )
            if count
        ]
        placed = self._packing.placed.get(self._spec.name, 0)
        jobs = f"{placed} waiting jobs" if placed else "no waiting jobs"
        more = f", {self._new} more machines" if self._new else ""
        return f"{', '.join(states) or 'no machines'}; {jobs}{more}; desired {desired}"

    def _say(self, sentence: str) -> None:
        self._reasons.append(sentence)


def _paused(made: SetDecision) -> SetDecision:
    would = ["paused, nothing is changed", *(f"would {reason}" for reason in made.reasons[1:])]
    return replace(
        made, replicas=None, unmark=(), undrain=(), drain=(), mark=(), reasons=(made.reasons[0], *would)
    )


def _names(machines: list[Machine] | tuple[Machine, ...]) -> str:
    names = [machine.name for machine in machines]
    return ", ".join(names) if len(names) <= 5 else f"{', '.join(names[:5])} and {len(names) - 5} more"
