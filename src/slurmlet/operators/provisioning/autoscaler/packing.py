"""Which nodes the waiting jobs would take: those that are there first, then new machines of the set that fits best. Pure.

Nodes that are alike are handled as one *lot*, and jobs that ask for the same as one need: a queue of thousands on hundreds
of nodes is packed in well under a millisecond. This estimates what Slurm will do; it never has to match it, since Slurm
places every job itself. What must hold: a need is met by machines that could run it, and equal facts give equal answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from slurmlet.model.host_lists import expand
from slurmlet.model.slurm_admin_values import Gres
from slurmlet.operators.provisioning.autoscaler.demand import Need, Waiting
from slurmlet.operators.provisioning.autoscaler.feature_expressions import Group, Way, ways
from slurmlet.operators.provisioning.autoscaler.worker_sets import Shape


class Standing(IntEnum):
    """In the order in which they are taken."""

    PARTLY_USED = 0  # runs jobs and has room
    IDLE = 1
    DRAINED = 2  # by us: a resume away
    STARTING = 3
    NEW = 4
    NEW_OF_PAUSED = 5  # of a set that is not scaled by now: only what no other set could take


@dataclass(frozen=True, slots=True)
class Kind:
    """What nodes of a lot have in common; `worker_set` is "" for nodes that are not ours to scale."""

    standing: Standing
    worker_set: str
    partitions: frozenset[str]
    features: frozenset[str]
    domain: str


@dataclass(slots=True)
class Lot:
    """Nodes that are alike: `free` of each, and their names; machines that have no node yet have no names."""

    kind: Kind
    free: Shape
    count: int
    names: list[str] = field(default_factory=list)
    opened: bool = False  # a job of this packing is on them

    @property
    def whole(self) -> bool:
        return not self.opened and self.kind.standing is not Standing.PARTLY_USED

    @property
    def turn(self) -> tuple[bool, int, int, int, str, str]:
        standing = self.kind.standing
        there = standing <= Standing.IDLE or self.opened
        first = self.names[0] if self.names else ""
        return (not there, standing, not self.opened, self.free.cpus, self.kind.worker_set, first)


@dataclass(frozen=True, slots=True)
class Capacity:
    """What could be there at most: a set up to its maximum, or a node that is not ours. For telling what can never run."""

    kind: Kind
    shape: Shape
    count: int


@dataclass(frozen=True, slots=True)
class Unplaced:
    waiting: Waiting
    count: int
    why: str
    impossible: bool


@dataclass
class Packing:
    wanted: set[str] = field(default_factory=set)  # nodes that are there, or drained by us
    starting: dict[str, int] = field(
        default_factory=dict
    )  # by set: machines on their way that jobs will take
    new: dict[str, int] = field(default_factory=dict)  # by set: machines beyond those
    placed: dict[str, int] = field(default_factory=dict)  # by set: tasks that would run on its machines
    unplaced: list[Unplaced] = field(default_factory=list)


def pack(waiting: Sequence[Waiting], lots: Iterable[Lot], capacity: Sequence[Capacity]) -> Packing:
    packer = _Packer(list(lots), capacity)
    for one in waiting:
        packer.place(one)
    return packer.found


@dataclass(frozen=True, slots=True)
class _Request:
    """What one need asks of each of `nodes` nodes."""

    nodes: int
    cpus: int
    memory_mb: int
    gres: Gres
    exclusive: bool

    def fits(self, free: Shape, *, whole: bool) -> int:
        """How many jobs of these could be on such a node."""
        if self.exclusive and not whole:
            return 0
        most = free.cpus // self.cpus if self.cpus else 1 << 30
        if self.memory_mb:
            most = min(most, free.memory_mb // self.memory_mb)
        for name, count in self.gres:
            if count:
                most = min(most, gres_of(free.gres, name) // count)
        return min(most, 1) if self.exclusive else most

    def less(self, free: Shape, times: int) -> Shape:
        if self.exclusive:
            return Shape(0, 0)
        gres = free.gres
        for name, count in self.gres:
            gres = _gres_less(gres, name, count * times)
        return Shape(free.cpus - self.cpus * times, free.memory_mb - self.memory_mb * times, gres)


class _Packer:
    def __init__(self, lots: list[Lot], capacity: Sequence[Capacity]) -> None:
        self._lots = lots
        self._capacity = capacity
        self._sorted = False
        self.found = Packing()

    def place(self, waiting: Waiting) -> None:
        need = waiting.need
        try:
            alternatives = ways(need.features)
            named = frozenset(expand(need.required_nodes)) if need.required_nodes else None
            barred = frozenset(expand(need.excluded_nodes)) if need.excluded_nodes else frozenset()
        except ValueError as error:
            self._leave(waiting, waiting.count, str(error), impossible=True)
            return
        possible = [way for way in alternatives if self._problem(need, way, named) == ""]
        if not possible:
            self._leave(waiting, waiting.count, self._problem(need, alternatives[0], named), impossible=True)
            return
        left = waiting.count
        for limit in _limits(need, possible):
            for way in possible:
                if left:
                    left -= self._place_way(need, way, left, named, barred, limit)
        if left:
            self._place_part(need, possible[0], named, barred)
            self._leave(waiting, left, "no machine is left for it below the maximum", impossible=False)

    def _leave(self, waiting: Waiting, count: int, why: str, *, impossible: bool) -> None:
        self.found.unplaced.append(Unplaced(waiting, count, why, impossible))

    def _problem(self, need: Need, way: Way, named: frozenset[str] | None) -> str:
        """Why a need could not be met even by every set at its maximum with nothing on it; "" where it could."""
        if named is not None:
            there = {name for lot in self._lots for name in lot.names}
            return (
                ""
                if named <= there
                else f"it asks for nodes by name ({need.required_nodes}) that are not free"
            )
        asked = [one for one in self._capacity if not one.kind.partitions.isdisjoint(need.partitions)]
        if not asked:
            return f"no WorkerSet serves partition {','.join(need.partitions)}"
        for group in way:
            suited = [one for one in asked if group.accepts(one.kind.features)]
            if not suited:
                return f"no WorkerSet has the features {need.features}"
            request = _request(need, group, max(one.shape.cpus for one in suited))
            large = [one for one in suited if request.fits(one.shape, whole=True)]
            if not large:
                return f"no worker is large enough: each of its nodes needs {_words(request)}"
            by_domain: dict[str, int] = {}
            for one in large:
                domain = one.kind.domain if need.switches == 1 else ""
                by_domain[domain] = by_domain.get(domain, 0) + one.count
            if max(by_domain.values()) < request.nodes:
                where = "in one topology domain" if need.switches == 1 else "below the maximum"
                return f"it needs {request.nodes} nodes, and {max(by_domain.values())} can be had {where}"
        return ""

    def _place_way(
        self,
        need: Need,
        way: Way,
        count: int,
        named: frozenset[str] | None,
        barred: frozenset[str],
        limit: Standing,
    ) -> int:
        """How many of the jobs found their place."""
        if len(way) > 1:
            # Groups of different nodes: all must find theirs. Rare; one job at a time, without looking for the best.
            return sum(self._place_groups(need, way, named, barred, limit) for _ in range(min(count, 16)))
        done = 0
        for lots in self._domains(need, way[0], named, barred, limit):
            if done < count and lots:
                request = _request(need, way[0], max(lot.free.cpus for lot in lots))
                done += self._take(lots, request, count - done)
        return done

    def _place_groups(
        self, need: Need, way: Way, named: frozenset[str] | None, barred: frozenset[str], limit: Standing
    ) -> int:
        for group in way:
            lots = next(iter(self._domains(need, group, named, barred, limit)), [])
            largest = max((lot.free.cpus for lot in lots), default=0)
            if not lots or not self._take(lots, _request(need, group, largest), 1):
                return 0
        return 1

    def _place_part(self, need: Need, way: Way, named: frozenset[str] | None, barred: frozenset[str]) -> None:
        """The nodes that the next job can have by now: others end, and it must not wait behind smaller ones for ever."""
        for lots in self._domains(need, way[0], named, barred, Standing.NEW_OF_PAUSED)[:1]:
            request = _request(need, way[0], max((lot.free.cpus for lot in lots), default=0))
            self._take_shares(lots, request, 1, request.nodes)

    def _domains(
        self, need: Need, group: Group, named: frozenset[str] | None, barred: frozenset[str], limit: Standing
    ) -> list[list[Lot]]:
        """Lots that would do, in the order in which they are taken; by topology domain where the job must stay in one."""
        if barred or named is not None:
            self._set_apart(named if named is not None else barred)
        lowest = Standing.PARTLY_USED if need.takes_room else Standing.IDLE
        found: dict[str, list[Lot]] = {}
        if not self._sorted:
            self._lots = sorted((lot for lot in self._lots if lot.count), key=lambda lot: lot.turn)
            self._sorted = True
        for lot in self._lots:
            kind = lot.kind
            if (
                lot.count
                and lowest <= kind.standing <= limit
                and not kind.partitions.isdisjoint(need.partitions)
            ):
                if named is not None and not (lot.names and named.issuperset(lot.names)):
                    continue
                if group.accepts(kind.features) and not (barred and not barred.isdisjoint(lot.names)):
                    found.setdefault(kind.domain if need.switches == 1 else "", []).append(lot)
        return sorted(found.values(), key=lambda lots: -sum(lot.count for lot in lots if lot.names))

    def _set_apart(self, names: frozenset[str]) -> None:
        """Nodes that a job names are lots of their own from now on."""
        for lot in list(self._lots):
            apart = [name for name in lot.names if name in names]
            if apart and len(apart) < len(lot.names):
                lot.names = [name for name in lot.names if name not in names]
                lot.count = len(lot.names)
                self._lots.append(Lot(lot.kind, lot.free, len(apart), apart, lot.opened))
                self._sorted = False

    def _take(self, lots: list[Lot], request: _Request, count: int) -> int:
        """Place as many of `count` jobs as have all their nodes, each on nodes of its own."""
        shares = [(lot.count, request.fits(lot.free, whole=lot.whole)) for lot in lots]
        if sum(number * min(fit, count) for number, fit in shares) < request.nodes * count:
            low, high = 0, count - 1
            while low < high:
                middle = (low + high + 1) // 2
                there = sum(number * min(fit, middle) for number, fit in shares)
                low, high = (middle, high) if there >= request.nodes * middle else (low, middle - 1)
            count = low
        if count:
            self._take_shares(lots, request, count, request.nodes * count)
        return count

    def _take_shares(self, lots: list[Lot], request: _Request, most_each: int, wanted: int) -> None:
        for lot in lots:
            each = min(request.fits(lot.free, whole=lot.whole), most_each)
            if each <= 0 or wanted <= 0:
                continue
            full = min(lot.count, wanted // each)
            for number, times in ((full, each), (1, wanted - full * each)):
                if number and times > 0 and lot.count and wanted > 0:
                    self._split(lot, request, number, min(times, each))
                    wanted -= number * min(times, each)

    def _split(self, lot: Lot, request: _Request, number: int, times: int) -> None:
        names, lot.names = lot.names[:number], lot.names[number:]
        lot.count -= number
        kind, found = lot.kind, self.found
        if not lot.opened and kind.standing >= Standing.NEW:
            found.new[kind.worker_set] = found.new.get(kind.worker_set, 0) + number
        elif not lot.opened and kind.standing is Standing.STARTING:
            found.starting[kind.worker_set] = found.starting.get(kind.worker_set, 0) + number
        found.wanted.update(names)
        found.placed[kind.worker_set] = found.placed.get(kind.worker_set, 0) + number * times
        self._lots.append(Lot(kind, request.less(lot.free, times), number, names, opened=True))
        self._sorted = False


def _limits(need: Need, alternatives: Sequence[Way]) -> tuple[Standing, ...]:
    """How far to go in each round: what is there is used up, on whichever alternative, before anything new is asked for."""
    if len(alternatives) == 1 and need.switches != 1:
        return (Standing.NEW_OF_PAUSED,)  # lots are taken in that order anyway
    return (Standing.IDLE, Standing.STARTING, Standing.NEW, Standing.NEW_OF_PAUSED)


def _request(need: Need, group: Group, largest_cpus: int) -> _Request:
    nodes = group.count or need.nodes
    if largest_cpus and nodes * largest_cpus < need.cpus:
        # Tasks that Slurm spreads over as many nodes as it takes, unless the job says how many.
        spread = -(-need.cpus // largest_cpus)
        if group.count is None and (need.nodes_max is None or spread <= need.nodes_max):
            nodes = spread
    gres = {name: -(-count // nodes) for name, count in need.gres}
    for name, count in need.gres_per_node:
        gres[name] = max(count, gres.get(name, 0))
    return _Request(
        nodes=nodes,
        cpus=max(need.cpus_per_node, -(-need.cpus // nodes)),
        memory_mb=max(need.memory_mb_per_node, -(-need.memory_mb // nodes)),
        gres=tuple(sorted(gres.items())),
        exclusive=need.exclusive,
    )


def gres_of(gres: Gres, name: str) -> int:
    """A job that asks for "gpu" takes those of any type; one that asks for "gpu:a100" only these."""
    return sum(count for have, count in gres if have == name or have.startswith(f"{name}:"))


def _gres_less(gres: Gres, name: str, count: int) -> Gres:
    left = []
    for have, number in gres:
        if have == name or have.startswith(f"{name}:"):
            taken = min(number, count)
            count -= taken
            number -= taken
        left.append((have, number))
    return tuple(left)


def _words(request: _Request) -> str:
    parts = [f"{request.cpus} CPUs"]
    if request.memory_mb:
        parts.append(f"{request.memory_mb} MiB")
    parts += [f"{count} {name}" for name, count in request.gres if count]
    return ", ".join(parts)
