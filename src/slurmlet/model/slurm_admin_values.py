"""What an administrator's tool sees of Slurm: everybody's jobs, and nodes with all that decides over their machines.

The same values whether Slurm's commands or its REST API are used. Times are seconds since the epoch, durations are seconds,
memory is MiB. A user's own jobs and nodes, with far less in them, are in slurm_values.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Stage, stage_of

# ("gpu:a100", 2), as everywhere in slurmlet; without a type ("gpu", 2).
Gres = tuple[tuple[str, int], ...]

# What a drain of ours begins with. Any other reason is a person's (or a health check's), and is left alone.
DRAIN_REASON = "slurmlet-provision:"


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that has not ended, of any user. Of an array: a record per task that has started, one for all that have not."""

    job_id: JobId
    user: str
    state: str  # base state in capitals, such as PENDING; ask `stage`
    reason: str = ""  # why it waits, in Slurm's word: Resources, Dependency, QOSMaxNodePerUserLimit …
    partitions: tuple[str, ...] = ()  # any of them will do
    # What the whole job asks for, or holds once it runs.
    nodes_min: int = 1
    nodes_max: int | None = None  # None: as many as its tasks take
    cpus: int = 1
    memory_mb: int = 0
    gres: Gres = ()
    # What each of its nodes must have at least (squeue says 1 CPU where nobody asked); 0 and () where only the whole was
    # asked for.
    cpus_per_node: int = 0
    memory_mb_per_node: int = 0
    gres_per_node: Gres = ()
    features: str = ""  # an expression: "ib&ssd", "[rack1|rack2]"
    exclusive: bool = False  # takes whole nodes
    switches: int = 0  # --switches: the most leaf switches that it may span; 0: any number
    required_nodes: str = ""  # a list of hosts, as Slurm writes it
    excluded_nodes: str = ""
    reservation: str = ""
    dependency: str = ""  # what it waits for, such as "afterok:12(unfulfilled)"; "" once fulfilled
    held: bool = False  # by its user or an administrator (priority 0)
    # Of an array: how many tasks wait in this record, and how many of the array may run at once (None: all).
    array_id: str = ""
    tasks_pending: int = 1
    tasks_at_once: int | None = None
    limit_s: float | None = None  # None: no limit
    submitted_at_s: float | None = None
    eligible_at_s: float | None = None  # --begin, or when a dependency was fulfilled
    started_at_s: float | None = None  # of a job that runs
    priority: int = 0
    account: str = ""
    qos: str = ""
    nodes: tuple[str, ...] = ()  # that it holds

    @property
    def stage(self) -> Stage:
        return stage_of(self.state)


# Node flags under which no job may be placed though the base state says otherwise.
_CLOSED_FLAGS = frozenset(
    {"DRAIN", "FAIL", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN",
     "MAINTENANCE", "REBOOT_ISSUED", "REBOOT_REQUESTED", "INVALID_REG", "INVALID"}
)  # fmt: skip
_BUSY_STATES = frozenset({"ALLOCATED", "MIXED"})


@dataclass(frozen=True, slots=True)
class WorkerNode:
    """A node's record in slurmctld. `state` is the base state in capitals (IDLE, MIXED, ALLOCATED, DOWN, ERROR, UNKNOWN,
    FUTURE), `flags` whatever stands beside it (DRAIN, COMPLETING, DYNAMIC_NORM, CLOUD, NOT_RESPONDING …).
    """

    name: str
    state: str
    flags: frozenset[str] = frozenset()
    address: str = ""  # NodeAddr
    hostname: str = ""  # NodeHostName
    reason: str = ""  # why it is down or drained, without who and when
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()  # active ones
    cpus: int = 1
    memory_mb: int = 0
    gres: Gres = ()
    cpus_allocated: int = 0
    memory_allocated_mb: int = 0
    booted_at_s: float | None = None
    slurmd_started_at_s: float | None = None  # None: it never registered since slurmctld knows it
    last_busy_at_s: float | None = None
    topology: str = ""  # where it stands, as Slurm tells it ("tree:leaf1"); "" where it does not
    comment: str = ""
    extra: str = ""
    instance_id: str = ""
    version: str = ""  # of slurmd

    @property
    def busy(self) -> bool:
        """Somebody's job is on it, or is being cleaned up. A suspended job counts only in `SlurmAdmin.queue`."""
        return (
            self.state in _BUSY_STATES
            or self.cpus_allocated > 0
            or not self.flags.isdisjoint({"COMPLETING", "BLOCKED"})
        )

    @property
    def drain(self) -> bool:
        """No new job is placed here, since somebody (or slurmd's own check) said so."""
        return "DRAIN" in self.flags or "FAIL" in self.flags

    @property
    def drained(self) -> bool:
        """Nothing runs and nothing can start: the machine may be taken away. A node that is down counts only with a
        drain: without one, it may come back and be given a job.
        """
        return self.drain and not self.busy

    @property
    def drained_by_us(self) -> bool:
        return self.drain and self.reason.startswith(DRAIN_REASON)

    @property
    def registered(self) -> bool:
        """A slurmd has spoken for it and is believed to be there."""
        return self.slurmd_started_at_s is not None and self.responding

    @property
    def responding(self) -> bool:
        return "NOT_RESPONDING" not in self.flags and self.state not in ("DOWN", "UNKNOWN", "FUTURE", "ERROR")

    @property
    def idle(self) -> bool:
        """Takes a job this moment, and has none."""
        return self.state == "IDLE" and not self.busy and not (self.flags & _CLOSED_FLAGS)

    @property
    def usable(self) -> bool:
        """May be given (further) jobs."""
        return self.state in {*_BUSY_STATES, "IDLE"} and not (self.flags & _CLOSED_FLAGS)

    @property
    def dynamic(self) -> bool:
        """Made by a registration (`slurmd -Z`) or by `scontrol create`: its record can be deleted."""
        return any(flag.startswith("DYNAMIC") for flag in self.flags)

    @property
    def cloud(self) -> bool:
        """Driven by Slurm's own power saving (State=CLOUD)."""
        return "CLOUD" in self.flags

    @property
    def powered_down(self) -> bool:
        """Slurm has switched it off, or is about to: no job is placed there before it was switched on again."""
        return self.cloud and not self.flags.isdisjoint({"POWERED_DOWN", "POWERING_DOWN"})
