"""From a name or an address to a connection: pods and Services through the overlay, anything else directly.

Never to the login host's own loopback: what listens there trusts whoever is on this host, and we speak for others.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slurmlet.gateway.dns_client import CLUSTER_DOMAIN, Resolver
from slurmlet.gateway.dns_messages import Malformed
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.pod_dial import Dialler
from slurmlet.podnet.tables import DENIED, HOST, POD, REFUSED, TCP, Tables


@dataclass(frozen=True)
class Destination:
    host: str
    port: int
    # Domains that are tried behind a short name.
    search: tuple[str, ...] = ()
    # Pods and Services only.
    only_cluster: bool = False


@dataclass(frozen=True)
class Refusal:
    """An HTTP status and why."""

    status: int
    why: str


OnReached = Callable[[socket.socket | None, Refusal | None], None]


class Reach:
    def __init__(self, setup: Setup, tables: Tables, dialler: Dialler, resolver: Resolver) -> None:
        self._setup, self._tables, self._dialler, self._resolver = setup, tables, dialler, resolver

    def reach(self, destination: Destination, done: OnReached) -> None:
        ip = literal(destination.host)
        if ip is not None:
            self._connect(destination, ip, done)
        elif ":" in destination.host:
            done(None, Refusal(502, f"{destination.host}: this cluster has IPv4 addresses only"))
        else:
            self._resolve(destination, candidates(destination), done)

    def _resolve(self, destination: Destination, names: Sequence[str], done: OnReached) -> None:
        def answered(found: list[int], told: bool) -> None:
            if found:
                self._connect(destination, found[0], done)
            elif len(names) > 1 and told:
                self._resolve(destination, names[1:], done)
            elif told:
                done(None, Refusal(404, f"{destination.host} does not exist in this cluster"))
            else:
                done(None, Refusal(503, "the cluster's DNS does not answer"))

        try:
            self._resolver.addresses(names[0], answered)
        except (Malformed, UnicodeError):
            done(None, Refusal(400, f"{destination.host!r} is not a valid name"))

    def _connect(self, destination: Destination, ip: int, done: OnReached) -> None:
        if addresses.is_loopback(ip) or ip == 0:
            done(
                None,
                Refusal(403, "loopback addresses of the login host cannot be reached through the cluster"),
            )
            return
        if destination.only_cluster and not self._in_cluster(ip, destination.port):
            done(None, Refusal(403, f"{destination.host} is neither a pod nor a Service of this cluster"))
            return
        route = self._tables.route(TCP, ip, destination.port)
        if route.kind not in (POD, HOST):
            done(None, _refusal(route.kind, destination))
            return

        def dialled(made: socket.socket | None, code: int) -> None:
            why = f"{destination.host}:{destination.port}: {os.strerror(code)}"
            done(made, None if made is not None else Refusal(504 if code == errno.ETIMEDOUT else 502, why))

        self._dialler.dial(route.ip, route.port, self._setup.ip, dialled)

    def _in_cluster(self, ip: int, port: int) -> bool:
        inside = self._setup.in_pods(ip) or self._setup.in_services(ip)
        return inside or self._tables.is_service(TCP, ip, port)


def _refusal(kind: str, destination: Destination) -> Refusal:
    said = {
        REFUSED: "it has no ready endpoint, or no such port",
        DENIED: "a NetworkPolicy denies it",
    }.get(kind, "no pod has this address")
    return Refusal(502, f"{destination.host}:{destination.port}: {said}")


def literal(host: str) -> int | None:
    """The address that `host` spells, in full; short forms like 10.1 are names."""
    if host.count(".") != 3:
        return None
    try:
        return int.from_bytes(socket.inet_pton(socket.AF_INET, host), "big")
    except OSError:
        return None


def candidates(destination: Destination) -> list[str]:
    """As a pod's resolver would try them: a name of the cluster as it is, a short one with each domain behind it."""
    name = destination.host.rstrip(".").lower()
    if destination.host.endswith(".") or name == CLUSTER_DOMAIN or name.endswith(f".{CLUSTER_DOMAIN}"):
        return [name]
    return [*(f"{name}.{domain}" for domain in destination.search), name]
