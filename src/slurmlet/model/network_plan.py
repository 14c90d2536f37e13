"""The cluster's pod network as the hub knows it, and the part of a PodPlan that is about it. Pure."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmlet.protocol.pod_plan import NetworkPlan, OverlayTls, Policy

Obj = Mapping[str, Any]
_DNS_PLACE = 10
API_PORT = 443


@dataclass(frozen=True)
class PodNetwork:
    """What one cluster decided, and its overlay key."""

    pod_range: str
    service_range: str
    # Hex; whoever has it can speak as any pod of the cluster.
    key: str = field(repr=False)
    # PEM texts of `ca`, `cert` and `key`, where encryption between hosts was asked for.
    tls: OverlayTls | None = field(default=None, repr=False)

    @property
    def gateway_ip(self) -> str:
        return gateway_ip(self.pod_range)

    @property
    def dns_ip(self) -> str:
        return dns_ip(self.service_range)

    @property
    def api_ip(self) -> str:
        """Of the Service default/kubernetes: the API server takes the first address of its range."""
        return str(ipaddress.IPv4Network(self.service_range)[1])

    def holds(self, ip: str) -> bool:
        """Whether this is a pod's address."""
        try:
            return ipaddress.IPv4Address(ip) in ipaddress.IPv4Network(self.pod_range)
        except ValueError:
            return False


def gateway_ip(pod_range: str) -> str:
    return str(ipaddress.IPv4Network(pod_range)[1])


def dns_ip(service_range: str) -> str:
    return str(ipaddress.IPv4Network(service_range)[_DNS_PLACE])


def uses_host_network(pod: Obj) -> bool:
    return bool(pod["spec"].get("hostNetwork"))


def joins_from_host(pod: Obj) -> bool:
    """On its host's network, but it asks for the cluster's names: then it also gets a way to what they name."""
    return uses_host_network(pod) and pod["spec"].get("dnsPolicy") == "ClusterFirstWithHostNet"


def network_plan(pod: Obj, network: PodNetwork, ip: str, policy: Policy | None) -> NetworkPlan:
    from_host = joins_from_host(pod)
    return {
        "ip": ip,
        "from_host": from_host,
        "pod_range": network.pod_range,
        "service_range": network.service_range,
        "key": network.key,
        "tls": network.tls,
        "node": pod["spec"].get("nodeName", ""),
        "gateway": network.gateway_ip,
        "host_ports": [] if from_host else host_ports(pod),
        "policy": policy,
    }


def host_ports(pod: Obj) -> list[tuple[str, str, int, int]]:
    spec = pod["spec"]
    # Init containers that stay (sidecars) may be served from the host too.
    every = (*spec["containers"], *(spec.get("initContainers") or ()))
    return [
        (
            (port.get("protocol") or "TCP").lower(),
            port.get("hostIP") or "",
            port["hostPort"],
            port["containerPort"],
        )
        for container in every
        for port in container.get("ports") or ()
        if port.get("hostPort")
    ]
