"""Where each machine of a set stands, and what that leaves for jobs: Kubernetes' facts and Slurm's put together. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from slurmlet.model.slurm_admin_values import WorkerNode
from slurmlet.operators.provisioning.autoscaler.cluster_snapshot import Machine, SetFacts
from slurmlet.operators.provisioning.autoscaler.packing import Capacity, Kind, Lot, Standing, gres_of
from slurmlet.operators.provisioning.autoscaler.worker_sets import Shape, WorkerSet

# Idle, and yet not to be taken away: Slurm means to start a job there, or somebody reserved it.
_SPOKEN_FOR = frozenset({"PLANNED", "RESERVED", "MAINTENANCE"})


class Place(Enum):
    BUSY = "busy"
    IDLE = "idle"
    DRAINING = "draining"  # by us, with a job that came in between
    DRAINED = "drained"  # by us
    STARTING = "starting"
    FAILED = "failed"  # no node in Slurm by the deadline
    UNAVAILABLE = "unavailable"  # down, or drained by a person: not ours to judge
    LEAVING = "leaving"  # being deleted


@dataclass(frozen=True, slots=True)
class Seen:
    """The most that any worker made under this spec turned out to have. A spec that promises more would otherwise bring up
    one machine after the other for a job that can use none of them. Machines of an earlier spec prove nothing.
    """

    spec: WorkerSet
    since_s: float
    shape: Shape | None = None  # None: no machine has come since
    features: frozenset[str] = frozenset()
    partitions: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Standings:
    """One set's machines by their place; `missing`: replicas asked for that are not there yet (or, negative, too many)."""

    facts: SetFacts
    seen: Seen
    places: Mapping[Place, tuple[Machine, ...]]
    missing: int
    alive: int  # machines that are not being deleted
    busy: int
    starting: int
    going: int  # workers on their way out

    @property
    def spec(self) -> WorkerSet:
        return self.facts.spec

    def at(self, place: Place) -> tuple[Machine, ...]:
        return self.places.get(place, ())

    def count(self, *places: Place) -> int:
        return sum(len(self.places.get(place, ())) for place in places)


def standings_of(
    facts: SetFacts,
    workers: Mapping[str, WorkerNode],
    in_use: frozenset[str],
    seen: Seen | None,
    now_s: float,
) -> Standings:
    alive = sum(not machine.deleting for machine in facts.machines)
    missing = facts.replicas - alive
    places: dict[Place, list[Machine]] = {}
    for machine in sorted(facts.machines, key=lambda machine: machine.name):
        place = _place_of(machine, workers.get(machine.node), machine.node in in_use, facts.spec, now_s)
        if missing < 0 and machine.marked_by_us and place in (Place.DRAINED, Place.FAILED):
            place = Place.LEAVING  # replicas are lowered already: it can no longer be kept
        places.setdefault(place, []).append(machine)
    if seen is None or seen.spec != facts.spec:
        seen = Seen(facts.spec, now_s)
    seen = _seen(facts, workers, seen)
    counts = {place: len(found) for place, found in places.items()}
    draining = counts.get(Place.DRAINING, 0)
    return Standings(
        facts,
        seen,
        {place: tuple(found) for place, found in places.items()},
        missing,
        alive,
        busy=counts.get(Place.BUSY, 0) + draining,
        starting=counts.get(Place.STARTING, 0) + max(0, missing),
        going=draining + counts.get(Place.DRAINED, 0) + counts.get(Place.LEAVING, 0),
    )


def _seen(facts: SetFacts, workers: Mapping[str, WorkerNode], before: Seen) -> Seen:
    """From the workers that are there; what was seen of those that are gone is kept until others come."""
    found: Seen | None = None
    for machine in facts.machines:
        worker = workers.get(machine.node)
        if worker is None or machine.deleting or not worker.registered:
            continue
        if machine.created_at_s is not None and machine.created_at_s < before.since_s:
            continue
        shape = Shape(worker.cpus, worker.memory_mb, worker.gres)
        if found is None or found.shape is None:
            found = Seen(before.spec, before.since_s, shape, worker.features, worker.partitions)
        elif (
            shape != found.shape or worker.features != found.features or worker.partitions != found.partitions
        ):
            found = replace(
                found,
                shape=_most(shape, found.shape),
                features=found.features | worker.features,
                partitions=found.partitions | worker.partitions,
            )
    return found or before


def _least(promised: Shape, seen: Shape) -> Shape:
    gres = tuple((name, min(count, gres_of(seen.gres, name))) for name, count in promised.gres)
    return Shape(min(promised.cpus, seen.cpus), min(promised.memory_mb, seen.memory_mb), gres)


def _most(one: Shape, other: Shape) -> Shape:
    held = dict(other.gres)
    gres = {name: max(count, held.get(name, 0)) for name, count in one.gres}
    return Shape(
        max(one.cpus, other.cpus),
        max(one.memory_mb, other.memory_mb),
        tuple(sorted({**held, **gres}.items())),
    )


def _place_of(
    machine: Machine, worker: WorkerNode | None, in_use: bool, spec: WorkerSet, now_s: float
) -> Place:
    if machine.deleting:
        return Place.LEAVING
    if worker is None:
        return _unregistered(machine, spec, now_s)
    if in_use:
        return Place.DRAINING if worker.drained_by_us else Place.BUSY
    if worker.drained_by_us:
        return Place.DRAINED
    if worker.idle:
        return Place.IDLE
    if worker.slurmd_started_at_s is None and not worker.drain:
        return _unregistered(machine, spec, now_s)
    return Place.UNAVAILABLE


def _unregistered(machine: Machine, spec: WorkerSet, now_s: float) -> Place:
    if machine.registered_before:
        # Slurm has forgotten it. It may still have a job on it: a person has to look.
        return Place.UNAVAILABLE
    if machine.created_at_s is not None and now_s - machine.created_at_s > spec.startup_deadline_s:
        return Place.FAILED
    return Place.STARTING


def may_go(worker: WorkerNode) -> bool:
    return worker.flags.isdisjoint(_SPOKEN_FOR)


def lots_of(
    sets: Iterable[Standings], workers: Mapping[str, WorkerNode], in_use: frozenset[str]
) -> list[Lot]:
    """What jobs could be placed on: nodes that are there, machines on their way, and new ones up to each maximum."""
    lots: dict[tuple[Kind, Shape], Lot] = {}
    owned: dict[str, Standings | None] = {}
    for one in sets:
        for machine in one.facts.machines:
            owned[machine.node] = one
        for machine in one.at(Place.LEAVING):
            owned[machine.node] = None
        for to_come, count in _to_come(one):
            kind, shape = _promised(to_come, one)
            lots[kind, shape] = Lot(kind, shape, count)
    for name in sorted(workers):
        worker = workers[name]
        owner = owned.get(name)
        standing = _standing(worker, in_use=name in in_use)
        if standing is None or (owner is None and (name in owned or standing is Standing.DRAINED)):
            continue
        kind = Kind(
            standing,
            owner.spec.name if owner else "",
            worker.partitions,
            worker.features,
            _domain(worker, owner),
        )
        free = _free(worker)
        lot = lots.get((kind, free))
        if lot is None:
            lot = lots[kind, free] = Lot(kind, free, 0)
        lot.count += 1
        lot.names.append(name)
    return list(lots.values())


def _standing(worker: WorkerNode, *, in_use: bool) -> Standing | None:
    if worker.drained_by_us and not in_use and worker.responding:
        return Standing.DRAINED
    if worker.idle and not in_use:
        return None if "RESERVED" in worker.flags else Standing.IDLE
    return Standing.PARTLY_USED if worker.usable and worker.cpus_allocated < worker.cpus else None


def _free(worker: WorkerNode) -> Shape:
    # GRES in use are not told by node: on a node that is partly used, none are counted as free.
    gres = () if worker.busy else worker.gres
    return Shape(worker.cpus - worker.cpus_allocated, worker.memory_mb - worker.memory_allocated_mb, gres)


def _to_come(one: Standings) -> list[tuple[Standing, int]]:
    spec = one.spec
    found = [(Standing.STARTING, one.starting)] if one.starting else []
    room = spec.max - max(one.facts.replicas, one.alive)
    if room > 0 and not one.facts.problem:
        found.append((Standing.NEW_OF_PAUSED if spec.paused else Standing.NEW, room))
    return found


def _promised(standing: Standing, one: Standings) -> tuple[Kind, Shape]:
    """What a machine that is not there yet will be: as its spec says, and not more than others turned out to be."""
    spec, seen = one.spec, one.seen
    partitions, features, shape = spec.partitions, spec.features, spec.shape
    if seen.shape is not None:
        partitions &= seen.partitions
        features &= seen.features
        shape = _least(shape, seen.shape)
    return Kind(standing, spec.name, partitions, features, spec.topology_domain), shape


def _domain(worker: WorkerNode, owner: Standings | None) -> str:
    return (owner.spec.topology_domain if owner else "") or worker.topology


def capacity_of(sets: Iterable[Standings], workers: Mapping[str, WorkerNode]) -> list[Capacity]:
    """What there could be at most, for telling a job that waits from one that waits for ever."""
    found: list[Capacity] = []
    owned: set[str] = set()
    for one in sets:
        owned.update(machine.node for machine in one.facts.machines)
        found.append(Capacity(*_promised(Standing.NEW, one), one.spec.max))
    others: dict[tuple[Kind, Shape], int] = {}
    for worker in workers.values():
        if worker.name not in owned and worker.usable:
            kind = Kind(Standing.IDLE, "", worker.partitions, worker.features, worker.topology)
            key = (kind, Shape(worker.cpus, worker.memory_mb, worker.gres))
            others[key] = others.get(key, 0) + 1
    return found + [Capacity(kind, shape, count) for (kind, shape), count in others.items()]
