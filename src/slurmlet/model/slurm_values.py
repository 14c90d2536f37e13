"""What is asked of Slurm and what it tells, as plain values, the same whether its commands or its REST API are used.

Times are seconds since the epoch, durations are seconds, memory is MiB. No word of sbatch's is known here but in
`JobSpec.options`, which hands on what a person wrote in an annotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slurmlet.model.ids import JobId

# A long option of sbatch's without its dashes, and its value; None where it stands alone.
Option = tuple[str, str | None]


@dataclass(frozen=True)
class JobSpec:
    """A batch job. What is None or empty is left to Slurm; it is never requeued."""

    name: str
    script: str
    comment: str = ""
    partition: str = ""
    directory: str = ""  # where the script runs
    output: str = ""  # a path, taken literally; what is there is kept
    # Of the script, beside the few variables that every job gets (slurm/environment.py).
    environment: Mapping[str, str] = field(default_factory=dict)
    nodes: int | None = None
    tasks: int | None = None
    tasks_per_node: int | None = None
    cpus_per_task: int | None = None
    memory_mb: int | None = None  # on each node
    memory_mb_per_cpu: int | None = None
    gres: tuple[tuple[str, int], ...] = ()  # on each node: ("gpu:a100", 2)
    time_limit_min: int | None = None
    account: str = ""
    qos: str = ""
    reservation: str = ""
    features: str = ""  # an expression: "ib&ssd"
    licenses: str = ""
    nice: int | None = None
    exclusive: bool = False
    hosts: tuple[str, ...] = ()  # these and no others
    # Win over what the fields say.
    options: tuple[Option, ...] = ()

    def option(self, name: str) -> str | None:
        """The last value of an option: the one that counts."""
        found = [value for each, value in self.options if each == name]
        return found[-1] if found else None

    @property
    def asked_partition(self) -> str:
        return self.option("partition") or self.partition


@dataclass(frozen=True, slots=True)
class Job:
    """A job that slurmctld remembers."""

    job_id: JobId
    state: str  # base state in capitals, such as PENDING
    reason: str  # pending or failure reason, "" when Slurm gives none
    nodes: str  # as Slurm writes lists of hosts
    partition: str
    comment: str
    name: str = ""
    node_count: int = 1
    limit_s: float | None = None  # None: no limit
    left_s: float | None = None  # of the limit; None: no limit, or not known
    submitted_at_s: float | None = None
    starts_at_s: float | None = None  # of a job in the queue: when Slurm expects it to start
    ends_at_s: float | None = None  # of a running job: when its limit is reached


@dataclass(frozen=True, slots=True)
class EndedJob:
    job_id: JobId
    state: str
    exit_code: int
    signal: int
    cancelled_by_uid: int | None
    reason: str = ""
    started_at_s: float | None = None
    ended_at_s: float | None = None


@dataclass(frozen=True)
class SlurmNode:
    name: str
    state: str  # as sinfo writes it, without its marks: idle, mixed, allocated, drained …
    usable: bool  # may run jobs, now or once it is free
    cpus: int
    cpus_allocated: int
    memory_mb: int
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    gres: frozenset[str] = frozenset()
    reason: str = ""  # why it is down or drained

    @property
    def has_room(self) -> bool:
        return self.usable and self.cpus_allocated < self.cpus


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


@dataclass(frozen=True)
class Capabilities:
    """What this Slurm is and can do; asked once, as it changes with an upgrade only."""

    version: str  # "24.11.5"
    accounting: bool  # a database knows how jobs ended
    # Why no job can be started at once, past the queue (slurm/immediate.py); "" where the way is proven.
    immediate_problem: str = ""
    async_steps: bool = False  # `srun --async`: Slurm itself looks after a step that nobody waits for
    kill_wait_s: float = 30.0  # between SIGTERM and SIGKILL
    plugin_dirs: str = ""
    parser: str = ""  # of slurmrestd's: "v0.0.42"; "" for the commands

    @property
    def release(self) -> tuple[int, int]:
        """(24, 11); (0, 0) where the version is not of that form."""
        words = self.version.split(".")
        if len(words) < 2 or not (words[0].isdecimal() and words[1].isdecimal()):
            return 0, 0
        return int(words[0]), int(words[1])
