"""Ports of the host that lead to pods: NodePorts, the pod's own hostPorts, and on the login host load balancers.

Every netd of a host would serve the NodePorts: whoever binds a port first does, the others try again each second, so the
port outlives any one pod. Never SO_REUSEPORT, and no SO_REUSEADDR for UDP: two clusters must not share a port.
A port without a backend is not bound, so that the kernel refuses the connection.
"""

from __future__ import annotations

import errno
import socket
from typing import Callable, Dict, NamedTuple, Optional, Union

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import HostPort, Setup
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.pod_dial import Dial, connect_host
from slurmlet.podnet.ports.host_udp import UdpFlows, UdpListener
from slurmlet.podnet.ports.socket_owners import owner_of
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint
from slurmlet.podnet.socket_relay import Relay, reset
from slurmlet.podnet.tables import HOST, POD, TCP, UDP, Route, Tables

AGAIN_S = 1.0
_BACKLOG = 1024
_ACCEPT_AT_ONCE = 32
NAMES = {TCP: "tcp", UDP: "udp"}


class HostListener(NamedTuple):
    protocol: int
    address: str
    port: int

    @property
    def name(self) -> str:
        return NAMES[self.protocol]


class Behind(NamedTuple):
    """What is behind a listener: where a client goes, and whether a backend it went to is still one."""

    route: Callable[[int], Route]
    holds: Callable[[int, int], bool]


Wanted = Dict[HostListener, Behind]


class HostPorts:
    """`address` is where NodePorts are bound; `extra` names further listeners (asked at each change of the tables)."""

    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        tables: Tables,
        overlay: Overlay,
        dial: Dial,
        *,
        endpoint: Optional[UdpEndpoint] = None,
        address: str = "",
        extra: Callable[[], Wanted] = dict,
    ) -> None:
        self._loop, self._setup, self._tables, self._dial = loop, setup, tables, dial
        self._address = address or addresses.text(setup.host_ip)
        self._extra = extra
        # A host speaks for itself; the gateway brings an endpoint of its own.
        self.endpoint = endpoint or UdpEndpoint(overlay, tables, setup, setup.host_ip)
        self.flows = UdpFlows(loop, self.endpoint)
        if endpoint is None:
            self.endpoint.on_datagram = self.flows.answered
        self._wanted: Wanted = {}
        self._open: Dict[HostListener, Union[_TcpListener, UdpListener]] = {}
        self._timer: Optional[Timer] = None
        # Listeners that a stranger's program holds, and why; on_taken is called with all of them when they change.
        self.taken: Dict[HostListener, str] = {}
        self.on_taken: Callable[[Dict[HostListener, str]], None] = lambda _taken: None
        self.counts: Dict[str, int] = {"connections": 0, "refused": 0}
        tables.on_change.append(self.refresh)
        self.refresh()

    def refresh(self) -> None:
        """Open what is wanted, close what is not. Connections that were made go on."""
        self._wanted = {**self._node_ports(), **self._host_ports(), **self._extra()}
        for listener in [listener for listener in self._open if listener not in self._wanted]:
            self._open.pop(listener).close()
        self.flows.refresh()
        self._try()

    def _node_ports(self) -> Wanted:
        return {
            HostListener(protocol, self._address, port): behind_target(self._tables, protocol, port)
            for (protocol, port), target in self._tables.node_ports.items()
            if target.to and protocol in NAMES
        }

    def _host_ports(self) -> Wanted:
        return {self._host_listener(each): self._own(each.port) for each in self._setup.host_ports}

    def _host_listener(self, port: HostPort) -> HostListener:
        anywhere = port.host_ip in ("", "0.0.0.0", "::")
        address = addresses.text(self._setup.host_ip) if anywhere else port.host_ip
        return HostListener(UDP if port.protocol == "udp" else TCP, address, port.host_port)

    def _own(self, port: int) -> Behind:
        own = self._setup.ip
        return Behind(lambda _client: Route(POD, own, port), lambda ip, at: (ip, at) == (own, port))

    # Binding.

    def _try(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        missing = [listener for listener in self._wanted if listener not in self._open]
        before, self.taken = self.taken, {}
        for listener in missing:
            self._bind(listener)
        if self.taken.keys() != before.keys():
            self.on_taken(self.taken)
        if any(listener not in self._open for listener in missing):
            self._timer = self._loop.later(AGAIN_S, self._try)

    def _bind(self, listener: HostListener) -> None:
        try:
            if listener.protocol == UDP:
                self._open[listener] = UdpListener(
                    self._loop, listener.address, listener.port, self._client_came(listener)
                )
            else:
                self._open[listener] = _TcpListener(self._loop, listener, self._accepted)
        except OSError as error:
            problem = self._why_not(listener, error)
            if problem:
                self.taken[listener] = problem

    def _why_not(self, listener: HostListener, error: OSError) -> str:
        """ "" when the port is held by a process of ours: another netd serves it, and we are next."""
        if error.errno != errno.EADDRINUSE:
            return f"{self._named(listener)} cannot be bound: {error.strerror}"
        if owner_of(listener.protocol == UDP, listener.port) == "ours":
            return ""
        return f"{self._named(listener)} is in use by another program"

    def _named(self, listener: HostListener) -> str:
        where = self._setup.host_ip if listener.address == "0.0.0.0" else addresses.number(listener.address)
        return f"{listener.name} port {listener.port} of host {addresses.text(where)}"

    # Clients.

    def _accepted(self, listener: HostListener, client: socket.socket, client_ip: int) -> None:
        behind = self._wanted.get(listener)
        route = behind.route(client_ip) if behind is not None else Route("refused")
        if route.kind not in (POD, HOST):
            self.counts["refused"] += 1
            reset(client)
            return

        def dialled(made: Optional[socket.socket], _code: int) -> None:
            if made is None:
                self.counts["refused"] += 1
                reset(client)
            else:
                self.counts["connections"] += 1
                Relay(self._loop, client, made)

        if route.kind == HOST:
            connect_host(self._loop, route.ip, route.port, dialled)
        else:
            self._dial(route.ip, route.port, self._as_seen(client_ip), dialled)

    def _as_seen(self, client_ip: int) -> int:
        """A program may trust its own loopback: a client of the host's is the host."""
        hidden = addresses.is_loopback(client_ip) or self._setup.in_pods(client_ip)
        return self._setup.host_ip if hidden else client_ip

    def _client_came(self, listener: HostListener) -> Callable[[UdpListener, bytes, str, int], None]:
        def came(opened: UdpListener, payload: bytes, host: str, port: int) -> None:
            behind = self._wanted.get(listener)
            if behind is not None:
                self.flows.take(opened, behind, payload, host, port)

        return came


def behind_target(tables: Tables, protocol: int, port: int) -> Behind:
    """A NodePort: asked of the tables each time, so that a newer target counts at once."""

    def holds(ip: int, at: int) -> bool:
        now = tables.node_ports.get((protocol, port))
        return now is not None and (ip, at) in now.to

    return Behind(lambda client: tables.route_node_port(protocol, port, client), holds)


class _TcpListener:
    def __init__(
        self, loop: Loop, listener: HostListener, accepted: Callable[[HostListener, socket.socket, int], None]
    ) -> None:
        self._loop, self._listener, self._accepted = loop, listener, accepted
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            # Only about connections of an earlier owner that still linger; two listeners stay impossible.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.setblocking(False)
            self._socket.bind((listener.address, listener.port))
            self._socket.listen(_BACKLOG)
        except OSError:
            self._socket.close()
            raise
        loop.reading(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        for _ in range(_ACCEPT_AT_ONCE):
            try:
                client, (host, _) = self._socket.accept()
            except OSError:
                return
            client.setblocking(False)
            self._accepted(self._listener, client, addresses.number(host))

    def close(self) -> None:
        self._loop.forget(self._socket.fileno())
        self._socket.close()


def named(taken: Dict[HostListener, str]) -> Dict[str, str]:
    """For the hub's "ports-taken"."""
    return {f"{listener.name} {listener.port}": why for listener, why in taken.items()}
