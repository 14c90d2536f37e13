"""The tables that the hub pushes to pods' networks and to the gateway, and what they tell the hub. Types only.

docs/network.md says what they mean.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Optional, Tuple, TypedDict, Union

from slurmlet.protocol.pod_plan import Policy

# [host's address, UDP port of its netd, {TCP port: host port behind it}]
PodEntry = Tuple[str, int, Dict[str, int]]


class TargetBase(TypedDict):
    to: List[Tuple[str, int, str]]  # [[ip, port, node name], …] in a stable order


class Target(TargetBase, total=False):
    """The backends behind one port of a Service."""

    affinity_s: int  # ClientIP affinity; 0: none
    local: bool  # only backends of the own node
    near: Dict[str, List[int]]  # by node name: places in `to` (trafficDistribution)
    sources: List[str]  # load balancers: the ranges that may connect; none: anybody


class NetworkUpdate(TypedDict, total=False):
    """At most 1,000 entries each; null as an entry: it is gone."""

    reset: bool  # everything is told anew
    complete: bool  # false in a reset; true when all was told: what was not told again is gone. Absent in a reset: at once
    pods: Dict[str, Optional[PodEntry]]  # by address
    services: Dict[
        str, Optional[Target]
    ]  # "10.96.0.10 udp 53": ClusterIPs, external IPs, load balancers' addresses
    node_ports: Dict[str, Optional[Target]]  # "tcp 30080"
    policy: Policy  # absent: unchanged
    load_balancers: Dict[str, Target]  # "tcp 8080"; only to the gateway, the whole table each time


class Network(NetworkUpdate):
    type: Literal["network"]


class Attached(TypedDict):
    """After the network is made, and again after each reconnect."""

    type: Literal["attached"]
    ip: str
    overlay_port: int
    mode: str  # "fast", "no-netns", "packets" or "host"
    why: str  # what is missing for a better mode, or ""
    listeners: Dict[str, int]


class Listeners(TypedDict):
    """All of them, whenever they change."""

    type: Literal["listeners"]
    listeners: Dict[str, int]  # TCP port of the pod: host port behind it


class NetworkCounts(TypedDict):
    """All that was counted since netd began, every 30 s."""

    type: Literal["network-counts"]
    counts: Dict[str, int]


class PortsTaken(TypedDict):
    """Ports of the host that somebody else holds."""

    type: Literal["ports-taken"]
    ports: Dict[str, str]  # "tcp 30080": why


# What runners and the gateway tell about the network.
NetworkMessage = Union[Attached, Listeners, NetworkCounts, PortsTaken]
