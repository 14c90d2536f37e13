"""What the hub pushed: where pods are, what Services mean, what policy holds. Every connect asks here and nowhere else.

Kept small on purpose: every netd holds all of it. Nothing here does I/O.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Set, Tuple

from slurmlet.podnet import addresses, connection_policy
from slurmlet.podnet.netd_setup import Setup

if TYPE_CHECKING:
    from slurmlet.protocol.network_tables import NetworkUpdate
    from slurmlet.protocol.network_tables import Target as TargetEntry

TCP, UDP, ICMP = 6, 17, 1
_PROTOCOLS = {"tcp": TCP, "udp": UDP, "sctp": 132}
# What a route says: a pod of this cluster, any other address, nobody there, no way there, a policy's no.
POD, HOST, REFUSED, UNREACHABLE, DENIED = "pod", "host", "refused", "unreachable", "denied"
_MAX_AFFINITIES = 10_000


class Peer(NamedTuple):
    """Where a pod is: its host, its netd's UDP port, and the host ports behind its TCP listeners."""

    host_ip: int
    overlay_port: int
    listeners: Dict[int, int]


class Route(NamedTuple):
    kind: str
    ip: int = 0
    port: int = 0


class Target:
    """The backends behind one port of a Service."""

    __slots__ = ("affinity_s", "chosen", "local", "next", "to")

    def __init__(self, raw: TargetEntry, node: str) -> None:
        self.local = bool(raw.get("local"))
        self.affinity_s = int(raw.get("affinity_s") or 0)
        near = (raw.get("near") or {}).get(node)
        chosen = raw["to"] if near is None else [raw["to"][place] for place in near]
        self.to: List[Tuple[int, int]] = [
            (addresses.number(ip), int(port)) for ip, port, where in chosen if not self.local or where == node
        ]
        # In turn, from a random place: even from one client, and even over many clients' first connections.
        self.next = int.from_bytes(os.urandom(2), "big")
        self.chosen: Dict[int, Tuple[Tuple[int, int], float]] = {}

    def pick(self, client: int, now_s: float) -> Optional[Tuple[int, int]]:
        if not self.to:
            return None
        if self.affinity_s:
            known = self.chosen.get(client)
            if known is not None and known[1] > now_s and known[0] in self.to:
                self.chosen[client] = (known[0], now_s + self.affinity_s)
                return known[0]
        backend = self.to[self.next % len(self.to)]
        self.next += 1
        if self.affinity_s:
            if len(self.chosen) >= _MAX_AFFINITIES:
                self.chosen.clear()
            self.chosen[client] = (backend, now_s + self.affinity_s)
        return backend


def _key(protocol: int, ip: int, port: int) -> int:
    return protocol << 48 | ip << 16 | port


class Tables:
    def __init__(self, setup: Setup, clock: Callable[[], float] = time.monotonic) -> None:
        self._setup, self._clock = setup, clock
        self._pods: Dict[int, Peer] = {}
        self._services: Dict[int, Target] = {}
        # (protocol, port) of every NodePort.
        self.node_ports: Dict[Tuple[int, int], Target] = {}
        # Entries of pods, services and node_ports that a reset has yet to tell again.
        self._old: List[Set[Any]] = [set(), set(), set()]
        self.ingress: connection_policy.Rules = None
        self.egress: connection_policy.Rules = None
        # Called after each message, with nothing: for whoever follows the NodePorts.
        self.on_change: List[Callable[[], None]] = []
        # The library's picture of all this.
        self._mirror: Any = None

    def follow(self, mirror: Any) -> None:
        """Tell `mirror` all that is here, and every change of it."""
        self._mirror = mirror
        if mirror is not None:
            mirror.policy(self.ingress is not None, self.egress is not None)
            for ip, peer in self._pods.items():
                mirror.pod(ip, None, peer)
            for key, target in self._services.items():
                mirror.service(key, target)

    # What the hub says.

    def apply(self, message: NetworkUpdate) -> None:
        if message.get("reset"):
            # What is not told again goes when all has been told: until then, old entries are better than none.
            self._old = [set(table) for table in self._all_tables()]
            if "complete" not in message:
                self._forget_old()
        for ip, where in (message.get("pods") or {}).items():
            self._set_pod(addresses.number(ip), where)
        for name, raw in (message.get("services") or {}).items():
            ip, protocol, port = name.split()
            self._set(self._services, _key(_PROTOCOLS[protocol], addresses.number(ip), int(port)), raw)
        for name, raw in (message.get("node_ports") or {}).items():
            protocol, port = name.split()
            self._set(self.node_ports, (_PROTOCOLS[protocol], int(port)), raw)
        if "policy" in message:
            self.ingress = connection_policy.parse(message["policy"]["ingress"])
            self.egress = connection_policy.parse(message["policy"]["egress"])
            if self._mirror is not None:
                self._mirror.policy(self.ingress is not None, self.egress is not None)
        if message.get("complete"):
            self._forget_old()
        for listener in self.on_change:
            listener()

    def _forget_old(self) -> None:
        pods, services, node_ports = self._old
        for ip in list(pods):
            self._set_pod(ip, None)
        for table, old in ((self._services, services), (self.node_ports, node_ports)):
            for key in list(old):
                self._set(table, key, None)
        self._old = [set(), set(), set()]

    def _all_tables(self) -> Tuple[Dict[Any, Any], ...]:
        return self._pods, self._services, self.node_ports

    def _set_pod(self, ip: int, where: Any) -> None:
        self._old[0].discard(ip)
        before, now = self._pods.pop(ip, None), None
        if where is not None:
            host_ip, overlay_port, listeners = where
            ports = {int(port): int(host_port) for port, host_port in listeners.items()}
            now = self._pods[ip] = Peer(addresses.number(host_ip), int(overlay_port), ports)
        if self._mirror is not None:
            self._mirror.pod(ip, before, now)

    def _set(self, table: Dict[Any, Target], key: Any, raw: Any) -> None:
        self._old[1 if table is self._services else 2].discard(key)
        before, target = table.pop(key, None), None
        if raw is not None:
            target = table[key] = Target(raw, self._setup.node)
            if before is not None and target.affinity_s:
                # Clients stay with a backend that is still there.
                target.chosen = before.chosen
        if self._mirror is not None and table is self._services:
            self._mirror.service(key, target)

    # What netd asks.

    def peer(self, ip: int) -> Optional[Peer]:
        return self._pods.get(ip)

    def peers_on(self, host_ip: int) -> Iterator[Peer]:
        return (peer for peer in list(self._pods.values()) if peer.host_ip == host_ip)

    def turn(self, ip: int, port: int, index: int) -> None:
        """Whose turn it is, as the mirror has counted."""
        target = self._services.get(_key(TCP, ip, port))
        if target is not None:
            target.next = index

    def is_service(self, protocol: int, ip: int, port: int) -> bool:
        return _key(protocol, ip, port) in self._services

    def route(self, protocol: int, ip: int, port: int, client: Optional[int] = None) -> Route:
        """Where a connection or a first datagram of this pod to ip:port goes. Loopback is the caller's own business."""
        target = self._services.get(_key(protocol, ip, port))
        if target is not None:
            backend = target.pick(self._setup.ip if client is None else client, self._clock())
            if backend is None:
                return Route(REFUSED)
            ip, port = backend
        elif self._setup.in_services(ip):
            return Route(REFUSED)
        return self.route_directly(protocol, ip, port)

    def serves(self, protocol: int, ip: int, port: int, backend: Tuple[int, int]) -> bool:
        """Whether ip:port is a Service that still has this backend."""
        target = self._services.get(_key(protocol, ip, port))
        return target is not None and backend in target.to

    def route_directly(self, protocol: int, ip: int, port: int) -> Route:
        """As `route`, for an address that is no Service's."""
        if not connection_policy.allows(self.egress, ip, protocol, port) and ip != self._setup.ip:
            return Route(DENIED)
        if self._setup.in_pods(ip):
            if ip == self._setup.ip or ip in self._pods:
                return Route(POD, ip, port)
            return Route(UNREACHABLE)
        return Route(HOST, ip, port)

    def route_node_port(self, protocol: int, port: int, client: int) -> Route:
        """Where a connection from `client`, anybody's address, to a NodePort of this host goes."""
        target = self.node_ports.get((protocol, port))
        backend = target.pick(client, self._clock()) if target is not None else None
        if backend is None:
            return Route(REFUSED)
        ip, port = backend
        if not self._setup.in_pods(ip):
            return Route(HOST, ip, port)
        return Route(POD, ip, port) if ip == self._setup.ip or ip in self._pods else Route(UNREACHABLE)

    def admits(self, protocol: int, source: int, port: int) -> bool:
        """Whether policy lets `source` in. The node's own probes are let in whatever a policy says, as kubelets' are."""
        return source in (self._setup.ip, self._setup.host_ip) or connection_policy.allows(
            self.ingress, source, protocol, port
        )
