"""Which jobs of the queue are a reason to have machines, and what each of them needs. Pure.

A job counts only where more nodes would let it start. Held, dependent and limited ones wait for something else; so does
whatever has a reason that is not known here: no machine is bought for what nobody understands. Each job that does not count
comes with the reason why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_admin_values import Gres, QueuedJob

# Slurm's reasons under which a job waits for nodes. PartitionNodeLimit and PartitionConfig: it wants more nodes than the
# partition has by now, which is what zero workers look like. ReqNodeNotAvail: the nodes are drained, maybe by us.
_WAITS_FOR_NODES = frozenset({
    "", "None", "Resources", "Priority", "NodeDown", "ReqNodeNotAvail", "PartitionNodeLimit", "PartitionConfig",
    "SchedDefer", "Constraints", "Cleaning",
})  # fmt: skip
# Slurm has not looked at the job yet: it may well start on a node that has room, without any machine of ours.
_NOT_LOOKED_AT = frozenset({"", "None", "SchedDefer"})
_SENTENCES = (
    "Nodes required for job are DOWN",  # squeue's words for Resources where nodes are drained
    "Requested topology configuration is not available",
)
_WAITS_FOR_OTHERS = {
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": "waits for another job that can never satisfy it",
    "JobHeldUser": "is held by its user",
    "JobHeldAdmin": "is held by an administrator",
    "JobHoldMaxRequeue": "is held: requeued too often",
    "BeginTime": "is not to begin yet",
    "JobArrayTaskLimit": "is at the limit of its array",
    "Licenses": "waits for licenses",
    "Reservation": "waits for its reservation",
    "PartitionDown": "is in a partition that is down",
    "PartitionInactive": "is in a partition that is inactive",
    "PartitionTimeLimit": "is over the partition's time limit",
    "BadConstraints": "asks for what Slurm says no node can have",
}
_LIMITS = ("QOS", "Assoc", "Max", "AccountingPolicy")


# All that a job's need and its standing depend on, save the times. A queue of thousands holds few different ones of these.
_request = attrgetter(
    "reason", "held", "dependency", "reservation", "partitions", "nodes_min", "nodes_max", "cpus", "memory_mb", "gres",
    "cpus_per_node", "memory_mb_per_node", "gres_per_node", "features", "exclusive", "switches", "required_nodes",
    "excluded_nodes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Need:
    """What one job waits for; jobs that ask for the same have equal needs, and are counted together."""

    partitions: tuple[str, ...]
    nodes: int
    nodes_max: int | None
    # Of the whole job, and of each node.
    cpus: int
    memory_mb: int
    gres: Gres
    cpus_per_node: int
    memory_mb_per_node: int
    gres_per_node: Gres
    features: str = ""
    exclusive: bool = False
    switches: int = 0  # the most leaf switches that it may span; 0: any number
    required_nodes: str = ""
    excluded_nodes: str = ""
    takes_room: bool = False  # Slurm has yet to try it on nodes that are partly in use


@dataclass(frozen=True, slots=True)
class Waiting:
    """Jobs with equal needs: how many tasks of them may run, and the first of them, for people."""

    need: Need
    count: int
    example: str


@dataclass(frozen=True, slots=True)
class Ignored:
    why: str
    count: int
    example: str


@dataclass(frozen=True)
class Demand:
    waiting: tuple[Waiting, ...]  # in the order in which Slurm would start them
    ignored: tuple[Ignored, ...]


class _Tally:
    """Jobs that are alike, while they are counted, and the first of them in the order in which Slurm would start them."""

    __slots__ = ("count", "first", "priority", "submitted_s")

    def __init__(self, first: QueuedJob) -> None:
        self.count = 0
        self.first = first
        self.priority = first.priority
        self.submitted_s = _submitted_s(first)

    def add(self, job: QueuedJob, tasks: int) -> None:
        self.count += tasks
        priority = job.priority
        if priority < self.priority:
            return
        submitted_s = _submitted_s(job)
        if priority == self.priority:
            if submitted_s > self.submitted_s:
                return
            if submitted_s == self.submitted_s and job.job_id >= self.first.job_id:
                return
        self.first, self.priority, self.submitted_s = job, priority, submitted_s

    @property
    def turn(self) -> tuple[int, float, str]:
        return (-self.priority, self.submitted_s, self.first.job_id)


def _submitted_s(job: QueuedJob) -> float:
    return job.submitted_at_s if job.submitted_at_s is not None else float("inf")


def demand_of(
    jobs: Iterable[QueuedJob], now_s: float, partition_max_nodes: Mapping[str, int] | None = None
) -> Demand:
    running: dict[str, int] = {}
    queued: list[QueuedJob] = []
    is_queued: dict[str, bool] = {}  # by state: looked up once for each, of thousands of jobs
    for job in jobs:
        if job.state not in is_queued:
            is_queued[job.state] = job.stage is Stage.QUEUED
        if is_queued[job.state] and not job.nodes:
            queued.append(job)
        elif job.array_id:
            running[job.array_id] = running.get(job.array_id, 0) + 1
    alike: dict[object, _Tally] = {}
    ignored: dict[str, _Tally] = {}
    for job in queued:
        tasks = job.tasks_pending
        if job.eligible_at_s is not None and job.eligible_at_s > now_s:
            ignored.setdefault(_WAITS_FOR_OTHERS["BeginTime"], _Tally(job)).add(job, tasks)
            continue
        if job.tasks_at_once is not None:
            allowed = max(0, min(tasks, job.tasks_at_once - running.get(job.array_id, 0)))
            if allowed < tasks:
                limited = ignored.setdefault(_WAITS_FOR_OTHERS["JobArrayTaskLimit"], _Tally(job))
                limited.add(job, tasks - allowed)
            tasks = allowed
        if tasks > 0:
            request = _request(job)
            tally = alike.get(request)
            if tally is None:
                tally = alike[request] = _Tally(job)
            tally.add(job, tasks)
    return _sorted_out(alike.values(), ignored, partition_max_nodes or {})


def _sorted_out(
    alike: Iterable[_Tally], ignored: dict[str, _Tally], partition_max_nodes: Mapping[str, int]
) -> Demand:
    counting: dict[Need, _Tally] = {}
    for tally in alike:
        first = tally.first
        why = why_not(first) or _too_large(first, partition_max_nodes)
        # Needs are equal where only Slurm's reason differs (Priority, Resources).
        into = (
            ignored.setdefault(why, _Tally(first))
            if why
            else counting.setdefault(need_of(first), _Tally(first))
        )
        into.add(first, tally.count)
    waiting = sorted(counting.items(), key=lambda item: item[1].turn)
    return Demand(
        tuple(Waiting(need, tally.count, tally.first.job_id) for need, tally in waiting),
        tuple(Ignored(why, tally.count, tally.first.job_id) for why, tally in sorted(ignored.items())),
    )


def _too_large(job: QueuedJob, partition_max_nodes: Mapping[str, int]) -> str:
    limits = [partition_max_nodes.get(partition, job.nodes_min) for partition in job.partitions]
    return "is over its partition's limit on nodes" if limits and max(limits) < job.nodes_min else ""


def why_not(job: QueuedJob) -> str:
    """Why a job that waits, and may begin by now, is no reason for more machines; "" where it is one."""
    reason = job.reason.partition(",")[0].strip()
    if job.held:
        return _WAITS_FOR_OTHERS.get(reason, "is held")
    if reason in _WAITS_FOR_OTHERS:
        return _WAITS_FOR_OTHERS[reason]
    if job.dependency:
        return _WAITS_FOR_OTHERS["Dependency"]
    if job.reservation:
        return "runs in a reservation, on nodes that are there"
    if reason in _WAITS_FOR_NODES or job.reason.startswith(_SENTENCES):
        return ""
    if reason.startswith(_LIMITS):
        return f"is over a limit of its user, account or QOS ({reason})"
    return f"waits for something other than nodes ({reason[:60]})"


def need_of(job: QueuedJob) -> Need:
    return Need(
        partitions=job.partitions,
        nodes=max(1, job.nodes_min),
        nodes_max=job.nodes_max,
        cpus=job.cpus,
        memory_mb=job.memory_mb,
        gres=job.gres,
        cpus_per_node=job.cpus_per_node,
        memory_mb_per_node=job.memory_mb_per_node,
        gres_per_node=job.gres_per_node,
        features=job.features,
        exclusive=job.exclusive,
        switches=job.switches,
        required_nodes=job.required_nodes,
        excluded_nodes=job.excluded_nodes,
        takes_room=job.reason.strip() in _NOT_LOOKED_AT,
    )
