"""Ports of the login host that only it serves: those of LoadBalancer Services, and externalIPs that are its addresses.

The hub names them; who is behind them is in the tables.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slurmlet.gateway.gateway_settings import Settings
from slurmlet.podnet import addresses
from slurmlet.podnet.ports.host_ports import NAMES, Behind, HostListener, Wanted
from slurmlet.podnet.tables import HOST, POD, REFUSED, Route, Tables, Target
from slurmlet.protocol.network_tables import NetworkUpdate
from slurmlet.protocol.network_tables import Target as TargetEntry

_NUMBERS = {name: number for number, name in NAMES.items()}
_EVERYWHERE = "0.0.0.0"


class Balancers:
    def __init__(self, settings: Settings, tables: Tables) -> None:
        self._settings, self._tables = settings, tables
        self._lowest_port = _lowest_port()
        self._balancers: dict[tuple[int, int], Target] = {}
        self._sources: dict[tuple[int, int], list[tuple[int, int]]] = {}
        # (protocol, address, port) of Services at addresses of this host.
        self._external: dict[tuple[int, str, int], Target] = {}
        self._old: set[tuple[int, str, int]] = set()

    def apply(self, message: NetworkUpdate) -> None:
        """A "network" message of the hub (docs/network.md), before the tables have it."""
        if message.get("reset"):
            # As the tables do: what is not told again goes when all has been told.
            self._old = set(self._external)
            if "complete" not in message:
                self._forget_old()
        if "load_balancers" in message:
            # Always the whole table, in a message of its own: a reset says nothing about it.
            self._balance(message["load_balancers"])
        for name, raw in (message.get("services") or {}).items():
            ip, protocol, port = name.split()
            if ip in self._settings.host_addresses and protocol in _NUMBERS:
                key = (_NUMBERS[protocol], ip, int(port))
                self._old.discard(key)
                self._set(self._external, key, raw)
        if message.get("complete"):
            self._forget_old()

    def _forget_old(self) -> None:
        for key in self._old:
            self._external.pop(key, None)
        self._old = set()

    def _balance(self, raw: Mapping[str, TargetEntry]) -> None:
        before, self._balancers = self._balancers, {}
        self._sources.clear()
        for name, target in raw.items():
            protocol, port = name.split()
            if protocol not in _NUMBERS:
                continue
            key = (_NUMBERS[protocol], int(port))
            self._set(self._balancers, key, target)
            if key in before:
                # Clients stay with the backend they had.
                self._balancers[key].chosen = before[key].chosen
            if target.get("sources"):
                self._sources[key] = [addresses.network(cidr) for cidr in target["sources"]]

    def _set(self, table: dict[Any, Target], key: Any, raw: Any) -> None:
        if raw is None:
            table.pop(key, None)
        else:
            table[key] = Target(raw, self._settings.setup.node)

    def listeners(self) -> Wanted:
        found = {
            HostListener(protocol, _EVERYWHERE, port): self._behind(lambda: self._balancers, (protocol, port))
            for (protocol, port), target in self._balancers.items()
            if target.to
        }
        for (protocol, ip, port), target in self._external.items():
            # Low ports are root's here. The hub says at a load balancer's Service which port serves it instead.
            if target.to and port >= self._lowest_port and (protocol, port) not in self._balancers:
                found[HostListener(protocol, ip, port)] = self._behind(
                    lambda: self._external, (protocol, ip, port)
                )
        return found

    def _behind(self, table: Callable[[], dict[Any, Target]], key: Any) -> Behind:
        """Looked up each time, so that a newer target counts at once."""

        def route(client: int) -> Route:
            target = table().get(key)
            if not self._admits(key, client):
                return Route(REFUSED)
            backend = target.pick(client, time.monotonic()) if target is not None else None
            if backend is None:
                return Route(REFUSED)
            kind = POD if self._settings.setup.in_pods(backend[0]) else HOST
            return Route(kind, *backend)

        def holds(ip: int, port: int) -> bool:
            target = table().get(key)
            return target is not None and (ip, port) in target.to

        return Behind(route, holds)

    def _admits(self, key: Any, client: int) -> bool:
        """Whether `loadBalancerSourceRanges` of the Service, where it has any, hold this client."""
        ranges = self._sources.get(key)
        return ranges is None or any(client & mask == base for base, mask in ranges)


def _lowest_port(path: Path = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 1024
