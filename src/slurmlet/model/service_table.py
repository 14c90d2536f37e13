"""What Services mean to a pod's network: entries of the `services` and `node_ports` tables of docs/network.md. Pure.

The rules are kube-proxy's, with one table for all nodes in the place of one computed on each: whoever looks an entry up
knows its own node, and a `local` entry names the node of every backend.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from slurmlet.protocol.network_tables import Target

Obj = Mapping[str, Any]
_DEFAULT_AFFINITY_S = 10800
# Whoever sets one of these asks that no proxy of the cluster's own serve the Service.
_LEFT_ALONE = ("service.kubernetes.io/service-proxy-name", "service.kubernetes.io/headless")
SERVICE_NAME = "kubernetes.io/service-name"


class Endpoint(NamedTuple):
    ip: str
    port: int
    node: str
    ready: bool
    # Terminating, but still answering: used where there is nobody else.
    fallback: bool
    # Whose clients it is meant for (the Service's trafficDistribution, as the endpoint slice controller worked it out).
    for_nodes: tuple[str, ...] = ()
    for_zones: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entries:
    """Of one Service."""

    services: dict[str, Target] = field(default_factory=dict)
    node_ports: dict[str, Target] = field(default_factory=dict)


def service_key(slice_: Obj) -> tuple[str, str] | None:
    """(namespace, name) of the Service that an EndpointSlice is about."""
    name = (slice_["metadata"].get("labels") or {}).get(SERVICE_NAME)
    return (slice_["metadata"]["namespace"], name) if name else None


def entries(service: Obj, slices: Iterable[Obj], zones: Mapping[str, str] | None = None) -> Entries:
    """`zones`: of every node that has one."""
    found, zones = Entries(), zones or {}
    addresses = cluster_ips(service)
    if not addresses:
        return found
    spec = service["spec"]
    by_port = _endpoints(slices)
    outside = [*_ipv4(spec.get("externalIPs") or ()), *_balancer_ips(service)]
    for port in spec.get("ports") or ():
        protocol = (port.get("protocol") or "TCP").lower()
        backends = by_port.get((port.get("name") or "", protocol), [])
        anywhere = _target(service, backends, zones, local=False)
        # From inside the cluster an outside address is as good as the Service's own, wherever its backends are.
        for ip in outside:
            found.services[f"{ip} {protocol} {port['port']}"] = anywhere
        inside = _target(service, backends, zones, local=spec.get("internalTrafficPolicy") == "Local")
        for ip in addresses:
            found.services[f"{ip} {protocol} {port['port']}"] = inside
        if port.get("nodePort"):
            found.node_ports[f"{protocol} {port['nodePort']}"] = external_target(service, backends, zones)
    return found


def balancer_targets(service: Obj, slices: Iterable[Obj]) -> dict[tuple[str, int], Target]:
    """(protocol, port) → what the login host serves for a load balancer's port; all backends count as local to it."""
    by_port = _endpoints(slices)
    found = {}
    for port in service["spec"].get("ports") or ():
        protocol = (port.get("protocol") or "TCP").lower()
        backends = by_port.get((port.get("name") or "", protocol), [])
        found[protocol, int(port["port"])] = _target(service, backends, None, local=False)
    return found


def external_target(service: Obj, backends: list[Endpoint], zones: Mapping[str, str]) -> Target:
    return _target(service, backends, zones, local=service["spec"].get("externalTrafficPolicy") == "Local")


def asks_for(service: Obj, protocol: str, port: int) -> bool:
    """Whether this port of a host is one that the Service wants served."""
    spec = service.get("spec") or {}
    balanced = spec.get("type") == "LoadBalancer"
    return any(
        (one.get("protocol") or "TCP").lower() == protocol
        and (one.get("nodePort") == port or (balanced and one["port"] == port))
        for one in spec.get("ports") or ()
    )


def cluster_ips(service: Obj) -> list[str]:
    """The IPv4 addresses that are to be served; none for headless Services, ExternalName and those left to others."""
    spec, labels = service.get("spec") or {}, service["metadata"].get("labels") or {}
    if spec.get("type") == "ExternalName" or any(name in labels for name in _LEFT_ALONE):
        return []
    return _ipv4(spec.get("clusterIPs") or [spec.get("clusterIP") or ""])


def _balancer_ips(service: Obj) -> list[str]:
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    # "Proxy": the balancer itself wants to see the connection.
    return _ipv4(one.get("ip") or "" for one in ingress if one.get("ipMode") != "Proxy")


def _ipv4(texts: Iterable[str]) -> list[str]:
    return [text for text in texts if _is_ipv4(text)]


def _is_ipv4(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 4
    except ValueError:
        return False


def _target(
    service: Obj, backends: list[Endpoint], zones: Mapping[str, str] | None, *, local: bool
) -> Target:
    usable = list(_usable_per_node(backends)) if local else _usable(backends)
    made: Target = {
        "to": [(one.ip, one.port, one.node) for one in usable],
        "affinity_s": _affinity_s(service["spec"]),
        "local": local,
    }
    near = {} if local or zones is None else _near(usable, zones)
    if near:
        made["near"] = near
    return made


def _near(usable: list[Endpoint], zones: Mapping[str, str]) -> dict[str, list[int]]:
    """Places in `usable` of those that clients on a node keep to, for each node that does not take all of them.

    Hints count only where every ready backend has one, and for a node (then its zone) that is named at all.
    """
    if not all(one.ready for one in usable):
        return {}
    near: dict[str, list[int]] = {}
    if all(one.for_zones for one in usable):
        by_zone = _places(one.for_zones for one in usable)
        near = {node: by_zone[zone] for node, zone in zones.items() if zone in by_zone}
    if all(one.for_nodes for one in usable):
        near |= _places(one.for_nodes for one in usable)
    return {node: places for node, places in near.items() if len(places) < len(usable)}


def _places(hints: Iterable[tuple[str, ...]]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = defaultdict(list)
    for place, names in enumerate(hints):
        for name in dict.fromkeys(names):
            found[name].append(place)
    return found


def _affinity_s(spec: Obj) -> int:
    if spec.get("sessionAffinity") != "ClientIP":
        return 0
    client_ip = (spec.get("sessionAffinityConfig") or {}).get("clientIP") or {}
    return int(client_ip.get("timeoutSeconds") or _DEFAULT_AFFINITY_S)


def _usable(backends: list[Endpoint]) -> list[Endpoint]:
    return [one for one in backends if one.ready] or [one for one in backends if one.fallback]


def _usable_per_node(backends: list[Endpoint]) -> Iterator[Endpoint]:
    """Each node falls back to its own terminating backends only when it has no other."""
    by_node: dict[str, list[Endpoint]] = defaultdict(list)
    for one in backends:
        by_node[one.node].append(one)
    chosen = {one for of_node in by_node.values() for one in _usable(of_node)}
    return (one for one in backends if one in chosen)


def _endpoints(slices: Iterable[Obj]) -> dict[tuple[str, str], list[Endpoint]]:
    """(port name, protocol) → backends in a stable order."""
    found: dict[tuple[str, str], dict[tuple[str, int], Endpoint]] = defaultdict(dict)
    for slice_ in slices:
        if slice_.get("addressType") != "IPv4":
            continue
        for port in slice_.get("ports") or ():
            if not port.get("port"):
                continue
            known = found[port.get("name") or "", (port.get("protocol") or "TCP").lower()]
            for endpoint in slice_.get("endpoints") or ():
                _add(known, endpoint, int(port["port"]))
    return {name: sorted(known.values()) for name, known in found.items()}


def _add(known: dict[tuple[str, int], Endpoint], raw: Obj, port: int) -> None:
    if not raw.get("addresses"):
        return
    conditions = raw.get("conditions") or {}
    terminating = bool(conditions.get("terminating"))
    hints = raw.get("hints") or {}
    made = Endpoint(
        raw["addresses"][0],
        port,
        raw.get("nodeName") or "",
        ready=conditions.get("ready") is not False,
        fallback=terminating and conditions.get("serving") is not False,
        for_nodes=tuple(one["name"] for one in hints.get("forNodes") or ()),
        for_zones=tuple(one["name"] for one in hints.get("forZones") or ()),
    )
    key = (made.ip, made.port)
    # A pod that moves between slices is in both for a moment, and so is one whose address was given anew: the one that
    # is not on its way out counts.
    if key not in known or not terminating:
        known[key] = made
