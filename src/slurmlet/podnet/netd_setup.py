"""What netd is told when it starts, from the plan and from the runner."""

from __future__ import annotations

from slurmlet.linux.record import Record
from slurmlet.podnet import addresses

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List, Optional, Tuple

    from slurmlet.protocol.pod_plan import NetworkPlan


# How the pod's programs are attached.
FAST, NO_NETNS, PACKETS = "fast", "no-netns", "packets"
# A pod of its host's network with a way to pods and Services.
FROM_HOST = "host"


class HostPort(Record):
    protocol: str  # "tcp" or "udp"
    host_ip: str
    host_port: int
    port: int


class Tls(Record):
    """PEM texts: the authority of the cluster's overlay, and the certificate that all its netds and the gateway share."""

    ca: str
    cert: str
    key: str


class Setup(Record):
    ip: int
    # (base, mask)
    pod_range: Tuple[int, int]
    service_range: Tuple[int, int]
    key: bytes
    node: str
    # The node's address, as the hub and other nodes reach it.
    host_ip: int
    host_ports: List[HostPort]
    # None: encryption between hosts was not asked for.
    tls: Optional[Tls] = None

    def in_pods(self, ip: int) -> bool:
        return ip & self.pod_range[1] == self.pod_range[0]

    def in_services(self, ip: int) -> bool:
        return ip & self.service_range[1] == self.service_range[0]


def from_plan(network: NetworkPlan, host_ip: str) -> Setup:
    tls = network.get("tls")
    return Setup(
        ip=addresses.number(network["ip"]),
        pod_range=addresses.network(network["pod_range"]),
        service_range=addresses.network(network["service_range"]),
        key=bytes.fromhex(network["key"]),
        node=str(network["node"]),
        host_ip=addresses.number(host_ip),
        host_ports=[
            HostPort(str(each[0]), str(each[1]), int(each[2]), int(each[3]))
            for each in network.get("host_ports") or []
        ],
        tls=Tls(**tls) if tls is not None else None,
    )
