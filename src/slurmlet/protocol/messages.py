"""Every control message, by direction: what hub, runner, agent, gateway and netd say to each other. Types only.

The tag is "type". A receiver ignores types and fields that it does not know, so that a newer peer may say more.
"""

from __future__ import annotations

from typing import Any, Dict, List, Literal, Optional, TypedDict, Union

from slurmlet.protocol.network_tables import Listeners, Network, NetworkMessage, PortsTaken
from slurmlet.protocol.pod_plan import ContainerPlan, FilesVolume, PodPlan
from slurmlet.protocol.pod_report import PodReport, PodUsage, Problem


class HelloVersion(TypedDict, total=False):
    minor: int  # of the protocol; absent in 1.0


class RunnerHello(HelloVersion):
    """The first message on a connection."""

    type: Literal["hello"]
    protocol: int  # its major version
    pod_uid: str
    job_id: str
    host: str
    host_ip: str
    version: str  # of slurmlet
    has_pod: bool
    report: Optional[PodReport]


class Report(TypedDict):
    """Always the whole report, so a lost one costs nothing."""

    type: Literal["report"]
    seq: int  # rising
    report: PodReport


class Bye(TypedDict):
    """The last report; the runner leaves when the hub acks it, or after a few seconds."""

    type: Literal["bye"]
    seq: int
    report: PodReport


class Event(TypedDict):
    type: Literal["event"]
    kind: str  # "Normal" or "Warning"
    reason: str
    message: str
    container: str  # its name, or ""


class Answer(TypedDict):
    type: Literal["answer"]
    id: int  # of the question
    usage: Optional[PodUsage]  # null before the pod has begun


PodNews = Union[Report, Bye, Event]
RunnerToHub = Union[RunnerHello, PodNews, Answer, NetworkMessage]


class PodMessage(TypedDict):
    """The answer to a hello without a pod."""

    type: Literal["pod"]
    pod: PodPlan


class Volumes(TypedDict):
    """Newer contents for a running pod."""

    type: Literal["volumes"]
    volumes: Dict[str, FilesVolume]


class Ephemeral(TypedDict):
    """Start an ephemeral container; one that is known already is left alone."""

    type: Literal["ephemeral"]
    container: ContainerPlan


class Redefine(TypedDict):
    """Another image for a container."""

    type: Literal["container"]
    container: ContainerPlan


class StopBase(TypedDict):
    type: Literal["stop"]
    grace_s: float
    reason: str


class Stop(StopBase, total=False):
    """End the pod as the kubelet would."""

    problem: Problem  # when that makes the pod Failed


class Ack(TypedDict):
    """This report is written down."""

    type: Literal["ack"]
    seq: int


class Ask(TypedDict):
    """Answered by "answer" with the same id."""

    type: Literal["ask"]
    id: int
    what: Literal["usage"]
    disk: bool  # file systems too


class OpenExec(TypedDict):
    type: Literal["open"]
    stream: int
    what: Literal["exec"]
    container: str
    command: List[str]
    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool


class OpenAttach(TypedDict):
    type: Literal["open"]
    stream: int
    what: Literal["attach"]
    container: str
    stdin: bool
    stdout: bool
    stderr: bool
    tty: bool


class OpenForward(TypedDict):
    """STDIN goes to the port, STDOUT comes from it, END closes either half, STATUS says why it failed."""

    type: Literal["open"]
    stream: int
    what: Literal["forward"]
    port: int


class OpenLogs(TypedDict):
    type: Literal["open"]
    stream: int
    what: Literal["logs"]
    container: str
    follow: bool
    previous: bool
    timestamps: bool
    since_s: Optional[float]
    since_time: Optional[str]  # RFC 3339
    tail_lines: Optional[int]
    limit_bytes: Optional[int]
    log_stream: str  # "All", "Stdout" or "Stderr"


Open = Union[OpenExec, OpenAttach, OpenForward, OpenLogs]


class Refused(TypedDict):
    """The hub does not take this connection; it says why and closes it. Since 1.1."""

    type: Literal["refused"]
    reason: str


PodOrder = Union[PodMessage, Volumes, Ephemeral, Redefine, Stop]
HubToRunner = Union[PodOrder, Ack, Ask, Open, Network, Refused]


class AllocationPart(TypedDict):
    """What Slurm says about a host's part of an allocation; 0 where it says nothing."""

    job_id: str
    partition: str
    host: str
    cpus: int
    memory_mb: int
    host_memory_mb: int
    gpus: int


class AgentHello(HelloVersion, AllocationPart):
    """The first message on a connection."""

    type: Literal["hello"]
    protocol: int  # its major version
    node: str
    version: str  # of slurmlet
    host_ip: str
    pods: List[str]  # UIDs of those that run
    ended: Dict[str, int]  # by UID: exit code of its runner


class PodEnded(TypedDict):
    """The pod's runner is gone."""

    type: Literal["pod-ended"]
    uid: str
    exit_code: int


AgentToHub = Union[AgentHello, PodEnded]


class StartPod(TypedDict):
    """Start the runner of pods/<uid>; one that runs or ran is left alone."""

    type: Literal["start-pod"]
    uid: str


class KillPod(TypedDict):
    """SIGKILL to the pod's runner."""

    type: Literal["kill-pod"]
    uid: str


class End(TypedDict):
    """End all pods, then leave."""

    type: Literal["end"]
    grace_s: float


HubToAgent = Union[StartPod, KillPod, End, Refused]


class GatewayHello(HelloVersion):
    """The first message on a connection."""

    type: Literal["hello"]
    protocol: int  # its major version
    gateway: Literal[True]
    host_ip: str


GatewayToHub = Union[GatewayHello, NetworkMessage]
HubToGateway = Union[Network, Refused]

RunnerToNetd = Network


class NetdReady(TypedDict):
    type: Literal["ready"]


class NetdCounts(TypedDict):
    type: Literal["counts"]
    counts: Dict[str, int]


class NetdGone(TypedDict):
    """The seccomp listener of this number is of no use any more."""

    type: Literal["gone"]
    number: int


NetdToRunner = Union[NetdReady, Listeners, NetdCounts, PortsTaken, NetdGone]

Hello = Union[RunnerHello, AgentHello, GatewayHello]
ToHub = Union[RunnerToHub, AgentToHub, GatewayToHub]
FromHub = Union[HubToRunner, HubToAgent, HubToGateway]
Message = Union[ToHub, FromHub, RunnerToNetd, NetdToRunner]
# As it came from the wire, before anybody looked at its tag.
AnyMessage = Dict[str, Any]
