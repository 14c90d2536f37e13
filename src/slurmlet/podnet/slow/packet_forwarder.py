"""The slow path: packets of the pod's TUN device to other pods and to hosts, and packets of the overlay to the pod.

The pod is not believed: a packet with another source address than the pod's goes nowhere. Neither is the overlay: a pod's
packets come from the host that the table names for it. Everything that is dropped is counted under its reason.
"""

from __future__ import annotations

import collections
import os
from typing import Callable, Dict, Optional

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import tables
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_datagrams import MAX_PACKET_BYTES
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.slow import fragments, packets
from slurmlet.podnet.slow.flows import Flow, Flows, Via, key
from slurmlet.podnet.slow.host_relays import HostRelays
from slurmlet.podnet.tables import ICMP, TCP, UDP, Peer, Tables

_AT_ONCE = 64
_MAX_BYTES = 65535
_SWEEP_S = 10.0

OnTcp = Callable[[bytes, packets.Head], None]


class Forwarder:
    def __init__(self, loop: Loop, setup: Setup, known: Tables, overlay: Overlay, tun_fd: int) -> None:
        self._loop, self._setup, self._tables, self._overlay, self._tun = loop, setup, known, overlay, tun_fd
        self._flows: Dict[int, Flows] = {}
        self._udp = self._of(UDP)
        self._pieces_out, self._pieces_in = fragments.Reassembler(), fragments.Reassembler()
        self._generation = 0
        self.counts: Dict[str, int] = collections.Counter()
        self._hosts = HostRelays(loop, setup.ip, self.write, self.counts)
        # TCP of programs that the fast path does not serve: minitcp.py.
        self.on_tcp: Optional[OnTcp] = None
        overlay.receivers[setup.ip] = self._incoming
        known.on_change.append(self._tables_changed)
        loop.reading(tun_fd, self._drain)
        loop.later(_SWEEP_S, self._sweep)

    def _of(self, protocol: int) -> Flows:
        flows = self._flows.get(protocol)
        if flows is None:
            flows = self._flows[protocol] = Flows(self._setup.ip)
        return flows

    def _tables_changed(self) -> None:
        # Each flow is checked again when it next carries a packet.
        self._generation += 1

    def _sweep(self) -> None:
        for flows in self._flows.values():
            flows.sweep()
        self._hosts.sweep()
        self._loop.later(_SWEEP_S, self._sweep)

    def _drop(self, why: str) -> None:
        self.counts["dropped_" + why] += 1

    def write(self, packet: packets.Bytes) -> None:
        """To the pod."""
        try:
            os.write(self._tun, packet)
        except OSError:
            # The pod's own root may have taken the device down.
            self._drop("device")

    # From the pod.

    def _drain(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                packet = os.read(self._tun, _MAX_BYTES)
            except OSError:
                return
            self._outgoing(packet)

    def _outgoing(self, packet: bytes) -> None:
        # The common case first: UDP without options and fragments, of a flow that is known.
        if (
            len(packet) >= 28
            and packet[0] == 0x45
            and packet[9] == UDP
            and not packet[6] & 0x3F
            and not packet[7]
        ):
            flow = self._udp.out.get(packet[12:24])
            if flow is not None and flow.generation == self._generation:
                self._carry(flow, packet)
                return
        head = packets.head(packet)
        if head is None:
            self._drop("not_ipv4")
        elif head.source != self._setup.ip:
            self._drop("foreign_source")
        elif head.fragment:
            whole = self._pieces_out.add(packet)
            if whole is not None:
                self._outgoing(whole)
        elif head.protocol == TCP:
            if self.on_tcp is None:
                self._drop("tcp")
            else:
                self.on_tcp(packet, head)
        elif head.protocol == ICMP and packet[head.start] in packets.ERRORS:
            self._error_out(packet, head)
        else:
            self._first_or_known(packet, head)

    def _first_or_known(self, packet: bytes, head: packets.Head) -> None:
        flows = self._of(head.protocol)
        source_port, port = head.source_port, head.port
        found = flows.out.get(key(head.source, head.destination, source_port, port))
        if found is not None and not self._still_right(head.protocol, found):
            flows.close(found)
            found = None
        if found is None:
            found = self._open(flows, packet, head, source_port, port)
        if found is not None:
            self._carry(found, packet)

    def _still_right(self, protocol: int, flow: Flow) -> bool:
        """After a change of the tables."""
        if flow.generation == self._generation:
            return True
        if flow.own and flow.inbound:
            return True
        if flow.inbound:
            right = self._tables.admits(protocol, flow.ip, flow.pod_port)
        elif flow.translated and not self._tables.serves(
            protocol, flow.ip, flow.port, (flow.far_ip, flow.far_port)
        ):
            right = False
        else:
            route = self._tables.route_directly(protocol, flow.far_ip, flow.far_port)
            right = route.kind == (tables.HOST if flow.relay is not None else tables.POD)
        if right:
            flow.generation = self._generation
        return right

    def _open(
        self, flows: Flows, packet: bytes, head: packets.Head, source_port: int, port: int
    ) -> Optional[Flow]:
        route = self._tables.route(head.protocol, head.destination, port)
        flow: Optional[Flow] = None
        to = (route.ip, route.port)
        if route.kind == tables.POD:
            if head.protocol not in (UDP, ICMP) and to != (head.destination, port):
                self._drop("untranslatable")
            elif route.ip == self._setup.ip:
                flow = flows.to_own(source_port, head.destination, port, route.port)
            else:
                flow = flows.to_pod(source_port, head.destination, port, to)
        elif route.kind == tables.HOST:
            flow = self._hosts.open(flows, packet, head, (route.ip, route.port))
        elif route.kind == tables.REFUSED:
            self._tell(packet, packets.PORT, "refused")
        elif route.kind == tables.UNREACHABLE:
            self._tell(packet, packets.HOST, "unreachable")
        else:
            self._drop("egress_policy")
        if flow is not None:
            flow.generation = self._generation
            if flow.twin is not None:
                flow.twin.generation = self._generation
        return flow

    def _tell(self, packet: bytes, code: int, why: str) -> None:
        self._drop(why)
        told = packets.unreachable(packet, code)
        if told is not None:
            self.write(told)

    def _carry(self, flow: Flow, packet: bytes) -> None:
        flow.used = True
        if flow.inbound:
            flow.replied = True
        if flow.relay is not None:
            self._hosts.send(flow, packet)
            return
        if flow.forth is not None:
            changed = bytearray(packet)
            packets.rewrite(changed, *flow.forth)
            packet = bytes(changed)
        if flow.own:
            self.write(packet)
            return
        self._to_peer(flow, packet)

    def _to_peer(self, flow: Flow, packet: bytes) -> None:
        peer = self._tables.peer(flow.far_ip) if flow.via is None else Peer(*flow.via, {})
        if peer is None:
            self._drop("unreachable")
        elif len(packet) <= MAX_PACKET_BYTES:
            self._overlay.send_packet(peer, packet)
            self.counts["sent"] += 1
        else:
            for piece in fragments.split(packet, MAX_PACKET_BYTES):
                self._overlay.send_packet(peer, piece)
                self.counts["sent"] += 1

    def _error_out(self, packet: bytes, head: packets.Head) -> None:
        """The pod's kernel complains of a packet that it got: only where we brought one."""
        about = packets.quoted(packet, head.start)
        flows = None if about is None else self._flows.get(about.protocol)
        if about is None or flows is None or packet[head.start] in packets.STEERING:
            self._drop("unrelated_error")
            return
        flow = flows.out.get(key(about.destination, about.source, about.port, about.source_port))
        if flow is None or flow.relay is not None:
            self._drop("unrelated_error")
        elif flow.own and flow.forth is not None and flow.twin is not None:
            # The client of a Service whose backend is itself.
            changed = bytearray(packet)
            service, port, pod, pod_port = flow.forth
            packets.rewrite_quoted(changed, pod, pod_port, service, port)
            packets.rewrite(changed, source=service, destination=pod)
            self.write(changed)
        else:
            self._to_peer(flow, packet)

    # From the overlay.

    def _incoming(self, packet: bytes, host_ip: int, overlay_port: int) -> None:
        if (
            len(packet) >= 28
            and packet[0] == 0x45
            and packet[9] == UDP
            and not packet[6] & 0x3F
            and not packet[7]
        ):
            flow = self._udp.into.get(packet[12:24])
            if flow is not None and flow.generation == self._generation:
                self._deliver(flow, packet, host_ip, overlay_port)
                return
        head = packets.head(packet)
        if head is None or head.destination != self._setup.ip:
            self._drop("malformed")
        elif not self._plausible(head.source, host_ip):
            self._drop("implausible_source")
        elif head.fragment:
            whole = self._pieces_in.add(packet)
            if whole is not None:
                self._incoming(whole, host_ip, overlay_port)
        elif head.protocol == ICMP and packet[head.start] in packets.ERRORS:
            self._error_in(packet, head)
        elif head.protocol == TCP:
            self._drop("tcp")
        else:
            self._first_or_answer(packet, head, Via(host_ip, overlay_port))

    def _plausible(self, source: int, host_ip: int) -> bool:
        """A pod where the table has it, or a host speaking for itself."""
        if source == host_ip:
            return True
        peer = self._tables.peer(source)
        return peer is not None and peer.host_ip == host_ip

    def _first_or_answer(self, packet: bytes, head: packets.Head, via: Via) -> None:
        flows = self._of(head.protocol)
        source_port, port = head.source_port, head.port
        flow = flows.into.get(key(head.source, head.destination, source_port, port))
        if flow is not None and not self._still_right(head.protocol, flow):
            flows.close(flow)
            flow = None
        if flow is None:
            if not self._tables.admits(head.protocol, head.source, port):
                self._drop("ingress_policy")
                return
            is_pod = self._tables.peer(head.source) is not None
            flow = flows.from_far(head.source, source_port, port, None if is_pod else via)
            flow.generation = self._generation
        self._deliver(flow, packet, *via)

    def _deliver(self, flow: Flow, packet: bytes, host_ip: int, overlay_port: int) -> None:
        if flow.via is None:
            peer = self._tables.peer(flow.far_ip)
            if peer is None or peer.host_ip != host_ip:
                self._drop("implausible_source")
                return
        elif flow.far_ip != host_ip:
            self._drop("implausible_source")
            return
        elif flow.via.overlay_port != overlay_port:
            # Another netd of that host, or a new one in the old one's place.
            flow.via = Via(host_ip, overlay_port)
        flow.used = True
        if not flow.inbound:
            flow.replied = True
        self.counts["received"] += 1
        if flow.back is None:
            self.write(packet)
        else:
            changed = bytearray(packet)
            packets.rewrite(changed, *flow.back)
            self.write(changed)

    def _error_in(self, packet: bytes, head: packets.Head) -> None:
        """An error about a packet that the pod has sent; all others are nobody's."""
        about = packets.quoted(packet, head.start)
        flows = None if about is None else self._flows.get(about.protocol)
        if about is None or flows is None or packet[head.start] in packets.STEERING:
            self._drop("unrelated_error")
            return
        flow = flows.into.get(key(about.destination, about.source, about.port, about.source_port))
        if flow is None:
            self._drop("unrelated_error")
        elif flow.back is None:
            self.write(packet)
        else:
            changed = bytearray(packet)
            ip, port, _, pod_port = flow.back
            packets.rewrite_quoted(changed, source_port=pod_port, destination=ip, port=port)
            if head.source == flow.far_ip:
                packets.rewrite(changed, source=ip)
            self.write(changed)
