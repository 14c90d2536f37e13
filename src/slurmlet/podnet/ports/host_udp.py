"""UDP through a port of the host to pods and back: one flow per client, forgotten when nothing comes any more.

Towards the pods a flow is a port of the endpoint (udpendpoint.py), towards other hosts a connected socket.
"""

from __future__ import annotations

import socket
import time
from typing import Callable, Dict, Optional, Protocol, Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.slow.udp_endpoint import UdpEndpoint
from slurmlet.podnet.tables import HOST, POD, Route

# As the kernel's own table of connections: longer once an answer came.
_UNANSWERED_S, _ANSWERED_S = 30.0, 120.0
_SWEEP_S = 10.0
_MAX_FLOWS = 4096
# Above what kernels choose themselves, so that a pod's own flows rarely meet ours.
_FIRST_PORT, _PORTS = 61000, 4536
_READ_BYTES = 65535
_READ_AT_ONCE = 64


class Behind(Protocol):
    @property
    def route(self) -> Callable[[int], Route]: ...

    @property
    def holds(self) -> Callable[[int, int], bool]: ...


class UdpListener:
    """A bound port of the host."""

    def __init__(
        self, loop: Loop, address: str, port: int, came: Callable[[UdpListener, bytes, str, int], None]
    ) -> None:
        self._loop, self._came = loop, came
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.setblocking(False)
            self._socket.bind((address, port))
        except OSError:
            self._socket.close()
            raise
        loop.reading(self._socket.fileno(), self._readable)

    @property
    def open(self) -> bool:
        return self._socket.fileno() >= 0

    def _readable(self) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                payload, (host, port) = self._socket.recvfrom(_READ_BYTES)
            except OSError:
                return
            self._came(self, payload, host, port)
            if not self.open:
                return

    def send(self, payload: bytes, client: Tuple[str, int]) -> None:
        try:
            self._socket.sendto(payload, client)
        except OSError:
            # As on any network: lost.
            pass

    def close(self) -> None:
        self._loop.forget(self._socket.fileno())
        self._socket.close()


class _Flow:
    __slots__ = ("behind", "client", "due_s", "listener", "port", "route", "socket")

    def __init__(self, listener: UdpListener, client: Tuple[str, int], behind: Behind, route: Route) -> None:
        self.listener, self.client, self.behind, self.route = listener, client, behind, route
        self.due_s = time.monotonic() + _UNANSWERED_S
        # One of the two: a port of the endpoint, or a socket towards another host.
        self.port = 0
        self.socket: Optional[socket.socket] = None


class UdpFlows:
    def __init__(self, loop: Loop, endpoint: UdpEndpoint) -> None:
        self._loop, self._endpoint = loop, endpoint
        self._by_client: Dict[Tuple[int, str, int], _Flow] = {}
        self._by_port: Dict[int, _Flow] = {}
        self._next = 0
        self._sweeping = False
        endpoint.on_refused = self._refused

    # From clients.

    def take(self, listener: UdpListener, behind: Behind, payload: bytes, host: str, port: int) -> None:
        key = (id(listener), host, port)
        flow = self._by_client.get(key)
        if flow is None:
            flow = self._begin(key, listener, behind, (host, port))
            if flow is None:
                return
        flow.due_s = max(flow.due_s, time.monotonic() + _UNANSWERED_S)
        if flow.socket is None:
            self._endpoint.send(flow.port, flow.route.ip, flow.route.port, payload)
            return
        try:
            flow.socket.send(payload)
        except OSError:
            # Refused or no room: as on any network.
            pass

    def _begin(
        self, key: Tuple[int, str, int], listener: UdpListener, behind: Behind, client: Tuple[str, int]
    ) -> Optional[_Flow]:
        route = behind.route(addresses.number(client[0]))
        if route.kind not in (POD, HOST) or len(self._by_client) >= _MAX_FLOWS:
            return None
        flow = _Flow(listener, client, behind, route)
        if route.kind == HOST:
            flow.socket = self._towards_host(flow)
            if flow.socket is None:
                return None
        else:
            flow.port = self._free_port()
            self._by_port[flow.port] = flow
        self._by_client[key] = flow
        self._sweep_later()
        return flow

    def _free_port(self) -> int:
        while True:
            self._next = (self._next + 1) % _PORTS
            port = _FIRST_PORT + self._next
            # There are more ports than flows may be.
            if port not in self._by_port:
                return port

    def _towards_host(self, flow: _Flow) -> Optional[socket.socket]:
        made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            made.setblocking(False)
            made.connect((addresses.text(flow.route.ip), flow.route.port))
        except OSError:
            made.close()
            return None
        self._loop.reading(made.fileno(), lambda: self._host_answered(flow, made))
        return made

    # From pods and hosts.

    def answered(self, ip: int, ip_port: int, port: int, payload: bytes) -> None:
        """For the endpoint's on_datagram."""
        flow = self._by_port.get(port)
        if flow is not None and (flow.route.ip, flow.route.port) == (ip, ip_port):
            flow.due_s = time.monotonic() + _ANSWERED_S
            flow.listener.send(payload, flow.client)

    def _host_answered(self, flow: _Flow, made: socket.socket) -> None:
        for _ in range(_READ_AT_ONCE):
            try:
                payload = made.recv(_READ_BYTES)
            except OSError:
                return
            flow.due_s = time.monotonic() + _ANSWERED_S
            flow.listener.send(payload, flow.client)

    def _refused(self, ip: int, ip_port: int, port: int) -> None:
        """Nobody listens there: the next datagram of the client tries another backend."""
        flow = self._by_port.get(port)
        if flow is not None and (flow.route.ip, flow.route.port) == (ip, ip_port):
            flow.due_s = 0.0
            self.refresh()

    # The end of flows.

    def refresh(self) -> None:
        """Forget flows that are over, and those whose backend or listener is gone."""
        now_s = time.monotonic()
        for key, flow in list(self._by_client.items()):
            if (
                flow.due_s > now_s
                and flow.listener.open
                and flow.behind.holds(flow.route.ip, flow.route.port)
            ):
                continue
            del self._by_client[key]
            self._by_port.pop(flow.port, None)
            if flow.socket is not None:
                self._loop.forget(flow.socket.fileno())
                flow.socket.close()

    def _sweep_later(self) -> None:
        if not self._sweeping:
            self._sweeping = True
            self._loop.later(_SWEEP_S, self._sweep)

    def _sweep(self) -> None:
        self._sweeping = False
        self.refresh()
        if self._by_client:
            self._sweep_later()
