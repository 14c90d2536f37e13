"""What Slurm tells us, as plain values: jobs, ended jobs, partitions."""

from __future__ import annotations

from dataclasses import dataclass, field

from slurmlet.model.ids import JobId


@dataclass(frozen=True)
class Job:
    """A line of squeue."""

    job_id: JobId
    state: str  # base state in capitals, such as PENDING
    reason: str  # pending or failure reason, "" when Slurm says None
    nodes: str
    partition: str
    comment: str


@dataclass(frozen=True)
class EndedJob:
    job_id: JobId
    state: str
    exit_code: int
    signal: int
    cancelled_by_uid: int | None
    reason: str = ""


@dataclass(frozen=True)
class Partition:
    """A partition, summed over its nodes."""

    name: str
    up: bool
    default: bool
    time_limit: str  # as Slurm prints it: "10:00", "infinite"
    nodes: int
    nodes_usable: int
    cpus: int
    cpus_per_node: int  # of the largest node
    memory_mb: int
    memory_mb_per_node: int
    gpus: int
    features: frozenset[str] = frozenset()
    gres: frozenset[str] = frozenset()
    node_states: dict[str, int] = field(default_factory=dict)
    state: str = ""  # of the partition, as Slurm writes it: up, down, drain, inact
    reasons: tuple[str, ...] = ()  # why nodes are down or drained, in the words of whoever did it


@dataclass(frozen=True)
class Grant:
    """What a job holds on one host."""

    cpus: int
    memory_mb: int  # 0: Slurm does not hold memory per job here
    gres: tuple[tuple[str, int], ...] = ()  # ("gpu:a100", 2)
