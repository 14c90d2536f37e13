"""PodPlan: a pod with everything resolved, as the hub gives it to the pod's runner. Nothing is left to look up.

Types only. Runners import this for type checkers alone: a start must not pay for `typing`. docs/protocol.md is made from
these classes and their comments (`make protocol`); a field of a later minor version goes into a class with `total=False`.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Optional, Tuple, TypedDict, Union


class ExecAction(TypedDict):
    kind: Literal["exec"]
    argv: List[str]


class HttpAction(TypedDict):
    kind: Literal["http"]
    scheme: str  # "http" or "https"
    host: str  # "": the pod's own address, which only the runner knows
    port: int
    path: str
    headers: List[List[str]]  # [[name, value], …]


class TcpAction(TypedDict):
    kind: Literal["tcp"]
    host: str  # "": the pod's own address
    port: int


class GrpcAction(TypedDict):
    kind: Literal["grpc"]
    port: int
    service: str


class SleepAction(TypedDict):
    kind: Literal["sleep"]
    seconds: int


# What a probe or a lifecycle hook does. Named ports are resolved to numbers.
NetworkAction = Union[HttpAction, TcpAction, GrpcAction]
Action = Union[ExecAction, SleepAction, NetworkAction]


class Probe(TypedDict):
    action: Action
    initial_delay_s: int
    period_s: int
    timeout_s: int
    success: int  # how many successes in a row count as healthy
    failure: int  # how many failures in a row count as unhealthy
    grace_s: Optional[int]  # terminationGracePeriodSeconds of the probe; null: the pod's


class Probes(TypedDict, total=False):
    startup: Probe
    liveness: Probe
    readiness: Probe


class PlannedUserBase(TypedDict):
    uid: Optional[int]
    gid: Optional[int]
    groups: List[int]
    name: str  # the image's "User"; looked up in its /etc/passwd when uid is null


class PlannedUser(PlannedUserBase, total=False):
    strict: bool  # no groups of the image's own


class MountPlan(TypedDict):
    volume: str
    path: str
    read_only: bool
    recursive_read_only: str  # "", "IfPossible" or "Enabled"
    sub_path: str


class EnvironmentFile(TypedDict):
    """A variable that only a file of a volume tells (fileKeyRef).

    Number n of the list stands as U+FDD0 n U+FDD1 in env, argv and sub_path.
    """

    name: str
    volume: str
    path: str
    key: str
    optional: bool
    otherwise: Optional[str]  # what the variable would be without the file
    image: Optional[str]  # what the image says it is


class RestartRule(TypedDict):
    action: str  # "Restart" or "RestartAllContainers"
    operator: str  # "In" or "NotIn"
    values: List[int]  # exit codes


class ContainerSecurity(TypedDict):
    user: PlannedUser
    read_only_root: bool
    add_caps: List[str]
    drop_caps: List[str]
    no_new_privs: bool
    privileged: bool
    unmasked_proc: bool
    selinux: bool
    seccomp: str  # "Unconfined" or "RuntimeDefault"


class ContainerPlanBase(ContainerSecurity):
    name: str
    image: str  # the reference as written
    image_id: str  # repo@sha256:…
    image_dir: str  # its directory in the store
    argv: List[str]  # complete
    env: List[List[str]]  # [[name, value], …], complete, PATH included
    env_files: List[EnvironmentFile]
    cwd: str
    mounts: List[MountPlan]
    tty: bool
    stdin: bool
    stdin_once: bool
    termination_message_path: str
    termination_message_policy: str  # "File" or "FallbackToLogsOnError"
    stop_signal: str  # such as "SIGTERM"
    sidecar: bool
    restart_policy: str  # the container's own, or ""
    restart_rules: List[RestartRule]
    probes: Probes
    post_start: Optional[Action]
    pre_stop: Optional[Action]
    gpus: bool  # it sees the job's GPUs


class ContainerPlan(ContainerPlanBase, total=False):
    """One container, complete."""

    target: str  # ephemeral containers: the container whose processes they see, or ""
    target_pid: int  # put in by the runner: the first process of that container


class ProjectedFileBase(TypedDict):
    mode: int


class ProjectedFile(ProjectedFileBase, total=False):
    data: str  # base64
    keep: bool  # instead of data, in a refresh: leave what is there
    token: bool  # a service account's token


class FilesVolume(TypedDict):
    kind: Literal["files"]
    files: Dict[str, ProjectedFile]  # by relative path
    default_mode: int


class EmptyVolume(TypedDict):
    kind: Literal["empty"]
    medium: str  # "" or "Memory"
    size_bytes: Optional[int]
    limit: str  # the size as written


class HostVolumeBase(TypedDict):
    kind: Literal["host"]
    path: str
    type: str  # as in hostPath.type


class HostVolume(HostVolumeBase, total=False):
    read_only: bool
    owned: bool  # a persistent volume that slurmlet made


class ImageVolume(TypedDict):
    kind: Literal["image"]
    image: str
    image_dir: str


Volume = Union[FilesVolume, EmptyVolume, HostVolume, ImageVolume]


class StorageLimits(TypedDict):
    """Limits of local ephemeral storage."""

    containers: Dict[str, Tuple[int, str]]  # by name: [bytes, as written]
    pod: Optional[Tuple[int, str]]


class ResolverBase(TypedDict):
    nameservers: List[str]
    searches: List[str]
    options: List[str]
    host_searches: bool  # the host's own search domains follow


class ResolverPlan(TypedDict):
    """What /etc/resolv.conf is made from."""

    base: Optional[ResolverBase]  # null: the host's file
    nameservers: List[str]  # added by dnsConfig
    searches: List[str]
    options: List[List[Optional[str]]]  # [[name, value or null], …]


class PolicyRule(TypedDict):
    peers: Optional[List[Tuple[str, List[str]]]]  # [[cidr, [excepted cidr, …]], …]; null: anybody
    ports: Optional[List[Tuple[int, int, int]]]  # [[protocol number, first, last], …]; null: any


class Policy(TypedDict):
    """The NetworkPolicies of one pod, resolved."""

    ingress: Optional[List[PolicyRule]]  # null: not isolated
    egress: Optional[List[PolicyRule]]


class OverlayTls(TypedDict):
    """PEM texts."""

    ca: str
    cert: str
    key: str


class NetworkPlan(TypedDict):
    ip: str
    from_host: bool  # the pod has its host's network; ip is only how other netds know its netd
    pod_range: str  # such as 10.244.0.0/16
    service_range: str
    key: str  # hex of 32 bytes: the cluster's overlay key
    tls: Optional[OverlayTls]  # where encryption between hosts was asked for
    node: str  # the Node's name
    gateway: str  # the gateway's address
    host_ports: List[
        Tuple[str, str, int, int]
    ]  # [["tcp" or "udp", host ip or "", host port, container port], …]
    policy: Optional[Policy]  # what holds from the first packet on


class PodPlan(TypedDict):
    uid: str
    name: str
    namespace: str
    cluster: str
    hostname: str  # what the kernel says
    host_names: List[str]  # the names in the pod's own line of /etc/hosts
    host_network: bool
    host_ipc: bool
    sysctls: List[List[str]]  # [[name, value], …] of the pod's own IPC namespace
    restart_policy: str
    grace_s: int
    share_pid: bool
    hosts: List[List[str]]  # further lines of /etc/hosts: [[ip, name, …], …]
    init_containers: List[ContainerPlan]
    containers: List[ContainerPlan]
    volumes: Dict[str, Volume]
    storage_limits: StorageLimits
    fs_group: Optional[int]  # the group that owns the pod's volumes
    network: Optional[NetworkPlan]  # null: the host's
    resolv_conf: Optional[ResolverPlan]  # null: the host's
