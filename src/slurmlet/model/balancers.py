"""Load balancers: which ports of a Service the login host serves, and what its status says of that. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Obj = Mapping[str, Any]
Port = tuple[str, int]  # "tcp" or "udp", number
_LOWEST = 1024
_PROTOCOLS = ("tcp", "udp")


@dataclass(frozen=True)
class Balanced:
    protocol: str
    port: int
    node_port: int
    # Why the port itself is not served, as a CamelCase word; "" when it is.
    problem: str

    @property
    def at(self) -> int:
        """The port of the login host that leads to the Service; 0: none."""
        return self.node_port if self.problem else self.port


def is_balanced(service: Obj) -> bool:
    spec = service.get("spec") or {}
    return spec.get("type") == "LoadBalancer" and not spec.get("loadBalancerClass")


def served(service: Obj, address: str) -> set[Port]:
    """The ports that its status says are served at this address."""
    return {
        (one["protocol"].lower(), int(one["port"]))
        for ingress in _ingress(service)
        if ingress.get("ip") == address
        for one in ingress.get("ports") or ()
        if not one.get("error")
    }


def shows(service: Obj, address: str) -> bool:
    return any(ingress.get("ip") == address for ingress in _ingress(service))


def decide(
    service: Obj, kept: set[Port], taken: set[Port], is_free: Callable[[Port], bool]
) -> list[Balanced]:
    """`kept` are ports it had before, `taken` those of other Services."""
    return [
        Balanced(
            protocol,
            number,
            int(port.get("nodePort") or 0),
            _problem((protocol, number), kept, taken, is_free),
        )
        for port in service["spec"].get("ports") or ()
        for protocol, number in [((port.get("protocol") or "TCP").lower(), int(port["port"]))]
    ]


def _problem(port: Port, kept: set[Port], taken: set[Port], is_free: Callable[[Port], bool]) -> str:
    if port[0] not in _PROTOCOLS:
        return "ProtocolNotServed"
    if port[1] < _LOWEST:
        return "PortNeedsRoot"
    if port in taken:
        return "PortOfAnotherService"
    return "" if port in kept or is_free(port) else "PortInUse"


def status(ports: list[Balanced], address: str) -> dict[str, Any]:
    """`status.loadBalancer`."""
    told = []
    for one in ports:
        problem = {"error": one.problem} if one.problem else {}
        told.append({"port": one.port, "protocol": one.protocol.upper(), **problem})
    # VIP: pods need not come this way, their own network knows the backends. They must where somebody else may have the
    # port: this is a host, and not an address of the Service's own.
    mode = "Proxy" if any(one.problem for one in ports) else "VIP"
    return {"ingress": [{"ip": address, "ipMode": mode, "ports": told}]}


def told(one: Balanced, address: str) -> tuple[str, str]:
    """(kind of event, text)."""
    name = f"{one.port}/{one.protocol.upper()}"
    if not one.problem:
        return "Normal", f"port {name} is served at {address}:{one.port}"
    why = {
        "PortNeedsRoot": "only root may listen on ports below 1024",
        "PortOfAnotherService": "another Service uses it",
        "PortInUse": "another program listens there",
        "ProtocolNotServed": "only TCP and UDP are served",
    }[one.problem]
    if one.at:
        return (
            "Normal",
            f"port {name} is served at its nodePort, {address}:{one.at}, instead of port {one.port}: {why}",
        )
    return "Warning", f"port {name} is not served: {why}, and it has no nodePort"


def _ingress(service: Obj) -> list[Obj]:
    return ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or []
