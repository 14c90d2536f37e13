"""The pod's conversations in datagrams: who spoke first, how their addresses are translated, when they are over. Pure.

A flow is kept for the same reasons for which a kernel tracks connections: answers pass whatever a policy says, a Service's
client stays with one backend and hears its answers from the Service's address. Times are conntrack's. Bounded.

Flows are found by the twelve bytes that a packet itself carries: both addresses and both ports, as in an IPv4 header without
options followed by a UDP header. One `Flows` holds one protocol; for ICMP echo both ports are its identifier.
"""

from __future__ import annotations

import os
import struct
import time
from typing import Callable, Dict, NamedTuple, Optional, Protocol, Tuple

_KEY = struct.Struct(">IIHH")
_UNREPLIED_S, _STREAM_S = 30.0, 120.0
# A question and its answer are over soon; who still speaks after this is a stream.
_STREAM_AFTER_S = 2.0
_MAX_FLOWS = 16384
_FIRST_PORT, _LAST_PORT = 1024, 65535
_PORT_TRIES = 64

# How a packet is rewritten: source, source port, destination, port; None stays.
Rewrite = Tuple[Optional[int], Optional[int], Optional[int], Optional[int]]


class Relay(Protocol):
    """A socket of the host that speaks for a flow."""

    def send(self, data: bytes) -> None: ...

    def close(self) -> None: ...


class Via(NamedTuple):
    """The overlay socket that brought a flow."""

    host_ip: int
    overlay_port: int


class Flow:
    """The far end, as the pod names it (`ip`, `port`) and as the wire does (`far_ip`, `far_port`)."""

    __slots__ = (
        "back",
        "far_ip",
        "far_port",
        "forth",
        "generation",
        "inbound",
        "into_key",
        "ip",
        "made_s",
        "out_key",
        "own",
        "pod_port",
        "port",
        "relay",
        "replied",
        "twin",
        "used",
        "used_s",
        "via",
    )

    def __init__(self, out_key: bytes, pod_port: int, ip: int, port: int, now_s: float) -> None:
        self.out_key, self.into_key = out_key, b""
        self.pod_port, self.ip, self.port = pod_port, ip, port
        self.far_ip, self.far_port = ip, port
        self.forth: Optional[Rewrite] = None
        self.back: Optional[Rewrite] = None
        self.inbound = self.replied = self.own = False
        self.via: Optional[Via] = None
        self.relay: Optional[Relay] = None
        self.twin: Optional[Flow] = None
        # Of the tables that the flow was last checked against.
        self.generation = -1
        self.used = True
        self.made_s = self.used_s = now_s

    @property
    def translated(self) -> bool:
        return self.own or (self.far_ip, self.far_port) != (self.ip, self.port)


def key(source: int, destination: int, source_port: int, port: int) -> bytes:
    return _KEY.pack(source, destination, source_port, port)


class Flows:
    def __init__(self, pod_ip: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pod_ip, self._clock = pod_ip, clock
        # By what the pod sends, and by what comes for it.
        self.out: Dict[bytes, Flow] = {}
        self.into: Dict[bytes, Flow] = {}

    def to_pod(self, pod_port: int, ip: int, port: int, backend: Tuple[int, int]) -> Optional[Flow]:
        """The pod speaks first, to another pod: ip:port itself, or a backend of that Service. None: no port is left."""
        flow = self._new(pod_port, ip, port)
        flow.far_ip, flow.far_port = backend
        wire_port = self._free_port(flow)
        if wire_port is None:
            return None
        own_port = None if wire_port == pod_port else wire_port
        if flow.translated or own_port is not None:
            flow.forth = (None, own_port, *backend)
            flow.back = (ip, port, None, pod_port)
        flow.into_key = key(flow.far_ip, self._pod_ip, flow.far_port, wire_port)
        self._add(flow)
        return flow

    def _free_port(self, flow: Flow) -> Optional[int]:
        """Two Services with one backend, asked from one socket, would have the same answers: the second speaks from
        another port."""
        candidate = flow.pod_port
        for _ in range(_PORT_TRIES):
            if key(flow.far_ip, self._pod_ip, flow.far_port, candidate) not in self.into:
                return candidate
            candidate = _random_port()
        return None

    def to_own(self, pod_port: int, ip: int, port: int, target_port: int) -> Optional[Flow]:
        """The pod speaks to a Service whose backend is itself. The Service's address stands for the client, or the answers
        would not leave the pod and come from the wrong address."""
        flow = self._new(pod_port, ip, port)
        flow.own = True
        flow.far_ip, flow.far_port = self._pod_ip, target_port
        for wire_port in (pod_port, *(_random_port() for _ in range(_PORT_TRIES))):
            answer_key = key(self._pod_ip, ip, target_port, wire_port)
            if answer_key not in self.out and answer_key != flow.out_key:
                break
        else:
            return None
        answers = Flow(answer_key, target_port, ip, wire_port, self._clock())
        answers.own = answers.inbound = True
        flow.forth = (ip, wire_port, self._pod_ip, target_port)
        answers.forth = (ip, port, self._pod_ip, pod_port)
        flow.twin, answers.twin = answers, flow
        self._add(flow)
        self._add(answers)
        return flow

    def to_host(self, pod_port: int, ip: int, port: int, far: Tuple[int, int]) -> Flow:
        """The pod speaks to an address that is no pod's; the caller gives the flow its relay."""
        flow = self._new(pod_port, ip, port)
        flow.far_ip, flow.far_port = far
        self._add(flow)
        return flow

    def from_far(self, ip: int, port: int, pod_port: int, via: Optional[Via]) -> Flow:
        """Somebody speaks to the pod."""
        flow = self._new(pod_port, ip, port)
        flow.inbound, flow.via = True, via
        flow.into_key = key(ip, self._pod_ip, port, pod_port)
        old = self.out.get(flow.out_key)
        if old is not None:
            self.close(old)
        self._add(flow)
        return flow

    def _new(self, pod_port: int, ip: int, port: int) -> Flow:
        return Flow(key(self._pod_ip, ip, pod_port, port), pod_port, ip, port, self._clock())

    def _add(self, flow: Flow) -> None:
        while len(self.out) >= _MAX_FLOWS:
            self.close(next(iter(self.out.values())))
        self.out[flow.out_key] = flow
        if flow.into_key:
            self.into[flow.into_key] = flow

    def close(self, flow: Flow) -> None:
        if self.out.get(flow.out_key) is flow:
            del self.out[flow.out_key]
        if flow.into_key and self.into.get(flow.into_key) is flow:
            del self.into[flow.into_key]
        if flow.relay is not None:
            flow.relay.close()
            flow.relay = None
        twin, flow.twin = flow.twin, None
        if twin is not None:
            twin.twin = None
            self.close(twin)

    def sweep(self) -> None:
        """Called every few seconds; marks instead of times keep the packets' path short."""
        now_s = self._clock()
        for flow in list(self.out.values()):
            if flow.used or (flow.twin is not None and flow.twin.used):
                flow.used_s = now_s
        for flow in list(self.out.values()):
            flow.used = False
            stream = flow.replied and flow.used_s - flow.made_s > _STREAM_AFTER_S
            if now_s - flow.used_s >= (_STREAM_S if stream else _UNREPLIED_S):
                self.close(flow)


def _random_port() -> int:
    return _FIRST_PORT + int.from_bytes(os.urandom(2), "big") % (_LAST_PORT - _FIRST_PORT + 1)
