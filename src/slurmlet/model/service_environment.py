"""Service variables of a container's environment: {NAME}_SERVICE_HOST and its kind, as the kubelet writes them.

They hold cluster IPs. For a pod of the host's network, where those lead nowhere, the variables of the API server's own
Service name the address at which it really is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ServicePort:
    name: str
    port: int
    protocol: str


@dataclass(frozen=True)
class Service:
    """The part of a Service that variables are made from."""

    name: str
    address: str
    ports: tuple[ServicePort, ...]


def service_of(obj: Mapping[str, Any]) -> Service | None:
    """None for a Service without an address of its own (headless, ExternalName)."""
    spec = obj.get("spec") or {}
    address = spec.get("clusterIP") or ""
    ports = tuple(
        ServicePort(port.get("name") or "", int(port["port"]), port.get("protocol") or "TCP")
        for port in spec.get("ports") or ()
    )
    if address in ("", "None") or not ports:
        return None
    return Service(obj["metadata"]["name"], address, ports)


def api_service(address: str, port: int) -> Service:
    return Service("kubernetes", address, (ServicePort("https", port, "TCP"),))


def service_variables(services: Iterable[Service]) -> dict[str, str]:
    found: dict[str, str] = {}
    for service in services:
        found.update(_variables(service))
    return found


def _variables(service: Service) -> Iterator[tuple[str, str]]:
    prefix = _variable_name(service.name)
    yield f"{prefix}_SERVICE_HOST", service.address
    yield f"{prefix}_SERVICE_PORT", str(service.ports[0].port)
    for port in service.ports:
        if port.name:
            yield f"{prefix}_SERVICE_PORT_{_variable_name(port.name)}", str(port.port)
    # The form of Docker's container links, which some images still read.
    yield f"{prefix}_PORT", _url(service, service.ports[0])
    for port in service.ports:
        link = f"{prefix}_PORT_{port.port}_{port.protocol.upper()}"
        yield link, _url(service, port)
        yield f"{link}_PROTO", port.protocol.lower()
        yield f"{link}_PORT", str(port.port)
        yield f"{link}_ADDR", service.address


def _variable_name(text: str) -> str:
    return text.replace("-", "_").upper()


def _url(service: Service, port: ServicePort) -> str:
    host = f"[{service.address}]" if ":" in service.address else service.address
    return f"{port.protocol.lower()}://{host}:{port.port}"
