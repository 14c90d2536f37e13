"""PodReport: the state of a pod as its runner reports it, always whole. Also what report.json holds. Types only.

Waiting reasons are the kubelet's: ContainerCreating, PodInitializing, CrashLoopBackOff, CreateContainerError,
CreateContainerConfigError, RunContainerError. Terminated reasons: Completed, Error, OOMKilled, ContainerCannotRun,
StartError. Times are RFC 3339 with Z, in whole seconds.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Optional, TypedDict

Phase = Literal["Starting", "Running", "Stopping", "Done"]


class Problem(TypedDict):
    """Why the pod as a whole failed."""

    reason: str
    message: str


class RunningUser(TypedDict):
    uid: int
    gid: int
    groups: List[int]


class EndedRun(TypedDict):
    """The end of a container's previous run."""

    reason: str
    message: str
    started_at: Optional[str]
    finished_at: Optional[str]
    exit_code: Optional[int]
    signal: Optional[int]
    container_id: str


class ContainerReportBase(TypedDict):
    image: str  # the reference it is made from
    state: Literal["waiting", "running", "terminated"]
    reason: str
    message: str
    started_at: Optional[str]
    finished_at: Optional[str]
    exit_code: Optional[int]
    signal: Optional[int]
    container_id: str  # crun://…
    restart_count: int
    started: bool
    ready: bool
    last: Optional[EndedRun]


class ContainerReport(ContainerReportBase, total=False):
    user: RunningUser  # once it ran


class PodReportBase(TypedDict):
    phase: Phase
    started_at: str
    exit_code: Optional[int]  # what the job will exit with
    problem: Optional[Problem]
    init_containers: Dict[str, ContainerReport]
    containers: Dict[str, ContainerReport]


class PodReport(PodReportBase, total=False):
    ephemeral_containers: Dict[str, ContainerReport]
    restarting_all: bool  # a restart rule is starting all containers again


class Space(TypedDict):
    """What a directory takes, and the file system it is on."""

    used_bytes: int
    inodes_used: int
    capacity_bytes: int
    available_bytes: int
    inodes: int
    inodes_free: int


class ContainerUsage(TypedDict):
    started_at: str
    cpu_s: float
    memory_bytes: int
    rss_bytes: int
    processes: int
    rootfs: Optional[Space]  # null unless asked for
    logs: Optional[Space]


class PodUsage(TypedDict):
    at: float  # seconds since 1970
    containers: Dict[str, ContainerUsage]  # those that run
    volumes: Dict[str, Optional[Space]]
