"""Datagrams and pings of a pod to addresses that are no pods: sockets of the host speak for it, one for each flow.

Connected sockets: only the one the pod spoke to can answer, and the host's kernel tells what became of a datagram. They must
never speak to what only the host itself may speak to, its loopback above all.
"""

from __future__ import annotations

import errno
import resource
import socket
from typing import Callable, Dict, Optional, Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.slow import packets
from slurmlet.podnet.slow.flows import Flow, Flows

_AT_ONCE = 64
_MAX_BYTES = 65535
_MAX_RELAYS = 2048
_IP_MTU_DISCOVER, _IP_PMTUDISC_DONT = 10, 0
# "This network", loopback, multicast, reserved and broadcast, by the first number of an address.
_NOT_FOR_PODS = (range(1), range(127, 128), range(224, 256))

OnData = Callable[[bytes], None]
# Gets a code of ICMP "unreachable".
OnError = Callable[[int], None]


def is_for_pods(ip: int) -> bool:
    return not any(ip >> 24 in each for each in _NOT_FOR_PODS)


def code_of(number: int) -> int:
    """What a router would have told the pod."""
    if number == errno.ECONNREFUSED:
        return packets.PORT
    if number in (errno.EPERM, errno.EACCES):
        return packets.PROHIBITED
    return packets.HOST


def _connected(protocol: int, ip: int, port: int) -> socket.socket:
    """For UDP it takes payloads, for ICMP whole messages, with an identifier of the kernel's own. PermissionError
    where the host lets its users send no ICMP (net.ipv4.ping_group_range)."""
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, protocol)
    try:
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_IP, _IP_MTU_DISCOVER, _IP_PMTUDISC_DONT)
        made.connect((addresses.text(ip), port))
    except OSError:
        made.close()
        raise
    return made


class HostRelay:
    def __init__(self, loop: Loop, sock: socket.socket, on_data: OnData, on_error: OnError) -> None:
        self._loop, self._socket = loop, sock
        self._on_data, self._on_error = on_data, on_error
        loop.reading(sock.fileno(), self._readable)

    def send(self, data: bytes) -> None:
        try:
            self._socket.send(data)
        except BlockingIOError:
            # Lost, as on any network that is busy.
            pass
        except OSError as error:
            # The kernel tells of an earlier datagram's fate once, here; this one has not been sent yet.
            self._on_error(code_of(error.errno or 0))

    def _readable(self) -> None:
        for _ in range(_AT_ONCE):
            if self._socket.fileno() < 0:
                return
            try:
                data = self._socket.recv(_MAX_BYTES)
            except BlockingIOError:
                return
            except OSError as error:
                self._on_error(code_of(error.errno or 0))
                return
            self._on_data(data)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            self._loop.forget(self._socket.fileno())
            self._socket.close()


class HostRelays:
    def __init__(
        self, loop: Loop, pod_ip: int, write: Callable[[bytes], None], counts: Dict[str, int]
    ) -> None:
        self._loop, self._pod_ip, self._write, self._counts = loop, pod_ip, write, counts
        # In the order they were made: where there are too many, the oldest goes.
        self._flows: Dict[Flow, Flows] = {}
        self._most = min(_MAX_RELAYS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    def open(self, flows: Flows, packet: bytes, head: packets.Head, to: Tuple[int, int]) -> Optional[Flow]:
        """A flow for this first packet of it; None where the pod has been told that there can be none."""
        if not is_for_pods(to[0]):
            self._counts["dropped_not_for_pods"] += 1
            return None
        is_echo = head.protocol == packets.ICMP and packet[head.start] == packets.ECHO
        if not is_echo and head.protocol != packets.UDP:
            self._tell(packet, packets.PROHIBITED, "protocol")
            return None
        flow = flows.to_host(head.source_port, head.destination, head.port, to)
        try:
            flow.relay = self._relay(flow, head.protocol)
        except OSError as error:
            flows.close(flow)
            self._tell(packet, code_of(error.errno or 0), "host_socket")
            return None
        self._flows[flow] = flows
        while len(self._flows) > self._most:
            oldest = next(iter(self._flows))
            self._flows.pop(oldest).close(oldest)
        return flow

    def sweep(self) -> None:
        self._flows = {flow: flows for flow, flows in self._flows.items() if flow.relay is not None}

    def _tell(self, packet: bytes, code: int, why: str) -> None:
        self._counts["dropped_" + why] += 1
        told = packets.unreachable(packet, code)
        if told is not None:
            self._write(told)

    def _relay(self, flow: Flow, protocol: int) -> HostRelay:
        if protocol == packets.UDP:
            asked = packets.udp(self._pod_ip, flow.pod_port, flow.ip, flow.port, b"")
            made, on_data = _connected(0, flow.far_ip, flow.far_port), self._datagram
        else:
            asked = packets.echo(self._pod_ip, flow.ip, flow.pod_port)
            made, on_data = _connected(socket.IPPROTO_ICMP, flow.far_ip, 0), self._echo
        return HostRelay(
            self._loop,
            made,
            lambda data: on_data(flow, data),
            lambda code: self._tell(asked, code, "host_error"),
        )

    def send(self, flow: Flow, packet: bytes) -> None:
        start = (packet[0] & 15) * 4
        data = packets.payload(packet, start) if packet[9] == packets.UDP else packet[start:]
        if data is None or flow.relay is None:
            self._counts["dropped_malformed"] += 1
            return
        self._counts["sent_to_hosts"] += 1
        flow.relay.send(data)

    def _datagram(self, flow: Flow, data: bytes) -> None:
        self._answered(flow, packets.udp(flow.ip, flow.port, self._pod_ip, flow.pod_port, data))

    def _echo(self, flow: Flow, data: bytes) -> None:
        if len(data) >= packets.ICMP_BYTES and data[0] == packets.ECHO_REPLY:
            rest = flow.pod_port.to_bytes(2, "big") + data[6:]
            self._answered(flow, packets.icmp(flow.ip, self._pod_ip, packets.ECHO_REPLY, 0, rest))

    def _answered(self, flow: Flow, packet: bytes) -> None:
        flow.used = flow.replied = True
        self._counts["received_from_hosts"] += 1
        self._write(packet)
