"""UDP at an address of the overlay that no kernel holds: the gateway's, and a host's own for its NodePorts.

Whoever uses it sees datagrams and never packets. It answers ICMP echo for its address; nothing else gets an answer.

    endpoint = UdpEndpoint(overlay, tables, setup, ip)        # from now on receives what the overlay brings for `ip`
    endpoint.on_datagram = lambda source_ip, source_port, port, payload: …
    endpoint.on_refused = lambda ip, ip_port, port: …         # nobody listens at ip:ip_port, where `port` of ours had sent
    endpoint.send(port, ip, ip_port, payload)                 # from our `port`; False when the table has no such pod

`ip` is setup.ip for the gateway, and setup.host_ip for what a host relays: a host may speak for itself. Policy on datagrams
to the endpoint is their sender's (egress), on those it sends the receiving pod's (ingress). A pod answers to the overlay
socket that brought it the question, so `ip` need not be in any table.
"""

from __future__ import annotations

from typing import Callable, Optional

from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_datagrams import MAX_PACKET_BYTES
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.slow import fragments, packets
from slurmlet.podnet.tables import Peer, Tables

OnDatagram = Callable[[int, int, int, bytes], None]
OnRefused = Callable[[int, int, int], None]


def _ignore(*_what: object) -> None:
    """What is nobody's is dropped."""


class UdpEndpoint:
    def __init__(self, overlay: Overlay, tables: Tables, setup: Setup, ip: int) -> None:
        self._overlay, self._tables, self._setup, self.ip = overlay, tables, setup, ip
        overlay.receivers[ip] = self._receive
        self._pieces = fragments.Reassembler()
        self._identification = 0
        self.on_datagram: OnDatagram = _ignore
        self.on_refused: OnRefused = _ignore
        self.dropped = 0

    def send(self, port: int, ip: int, ip_port: int, payload: bytes) -> bool:
        """One datagram from our `port` to a pod."""
        self._identification = self._identification % 0xFFFF + 1
        return self._send(ip, packets.udp(self.ip, port, ip, ip_port, payload, self._identification))

    def _send(self, ip: int, packet: bytes) -> bool:
        peer = self._peer(ip)
        if peer is None:
            return False
        for piece in fragments.split(packet, MAX_PACKET_BYTES):
            self._overlay.send_packet(peer, piece)
        return True

    def _peer(self, ip: int) -> Optional[Peer]:
        """The pod of this very netd may not be in the table yet; it is reached as all others are."""
        if ip == self._setup.ip:
            return Peer(self._setup.host_ip, self._overlay.port, {})
        return self._tables.peer(ip)

    def _receive(self, packet: bytes, host_ip: int, overlay_port: int) -> None:
        """A packet of the overlay; who may speak for an address is decided here: the host where the table has it."""
        head = packets.head(packet)
        if head is None or head.destination != self.ip or not self._plausible(head.source, host_ip):
            self.dropped += 1
            return
        if head.fragment:
            whole = self._pieces.add(packet)
            head = packets.head(whole) if whole is not None else None
            if whole is None or head is None:
                return
            packet = whole
        if head.protocol == packets.UDP:
            self._datagram(packet, head)
        elif head.protocol == packets.ICMP:
            self._icmp(packet, head, Peer(host_ip, overlay_port, {}))
        else:
            self.dropped += 1

    def _plausible(self, source: int, host_ip: int) -> bool:
        peer = self._peer(source)
        return peer is not None and peer.host_ip == host_ip

    def _datagram(self, packet: bytes, head: packets.Head) -> None:
        payload = packets.payload(packet, head.start)
        if payload is None:
            self.dropped += 1
            return
        self.on_datagram(head.source, head.source_port, head.port, payload)

    def _icmp(self, packet: bytes, head: packets.Head, peer: Peer) -> None:
        reply = packets.echo_reply(packet)
        if reply is not None:
            self._overlay.send_packet(peer, reply)
        elif packet[head.start] == packets.UNREACHABLE:
            about = packets.quoted(packet, head.start)
            if about is not None and about.protocol == packets.UDP and about.source == self.ip:
                self.on_refused(about.destination, about.port, about.source_port)
