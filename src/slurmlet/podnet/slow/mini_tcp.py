"""TCP of a pod without the fast path: netd ends the pod's connections itself and carries them as TCP of the host.

For a kernel without what the fast path needs, for 32-bit programs, and where what goes between hosts must be encrypted.
Unless it is, nothing differs on the wire from the fast path: listeners behind host ports, announced connections. So fast
and slow pods speak to each other.
Towards the pod's kernel each connection is a `TcpEnd`; here is who may connect, where to, and the bytes in between.
"""

from __future__ import annotations

import collections
import errno
import os
import socket
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses, tables
from slurmlet.podnet.namespace_sockets import PodSockets
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.network_namespace import MTU
from slurmlet.podnet.overlay_socket import Announcement, Overlay
from slurmlet.podnet.pod_dial import Dialler, OnDialled, connect_host
from slurmlet.podnet.slow import packets, tcp_segments
from slurmlet.podnet.slow.host_relays import is_for_pods
from slurmlet.podnet.slow.packet_forwarder import Forwarder
from slurmlet.podnet.slow.tcp_carrier import Carried
from slurmlet.podnet.slow.tcp_endpoint import DIALLING, TcpEnd
from slurmlet.podnet.slow.tcp_listeners import TcpListeners
from slurmlet.podnet.slow.tcp_segments import ACK, RST, SYN, Segment
from slurmlet.podnet.socket_relay import reset
from slurmlet.podnet.tables import TCP, Tables

if TYPE_CHECKING:
    from slurmlet.podnet.encryption.sealer import Sealer

_MSS = MTU - packets.IP_BYTES - packets.TCP_BYTES
_MAX_CONNECTIONS = 8192
_CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 0.5
_FIRST_PORT, _PORTS = 1024, 64512

# The pod's port, and the other's address and port.
Key = Tuple[int, int, int]
# dial(ip, port, source_ip, done)
Dial = Callable[[int, int, int, OnDialled], None]


class MiniTcp:
    """With `dial` it only carries what the pod itself begins, for a pod whose listeners are somebody else's."""

    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        known: Tables,
        overlay: Overlay,
        forwarder: Forwarder,
        on_listeners: Callable[[Dict[int, int]], None] = lambda _listeners: None,
        sockets: Optional[PodSockets] = None,
        dial: Optional[Dial] = None,
        sealer: Optional[Sealer] = None,
    ) -> None:
        self._loop, self._setup, self._tables, self._forwarder = loop, setup, known, forwarder
        self._sockets, self._others, self._sealer = sockets, dial, sealer
        self._ends: Dict[Key, TcpEnd] = {}
        self._probing: Dict[int, List[Callable[[int], None]]] = {}
        self.counts: Dict[str, int] = collections.Counter()
        self._dialler = Dialler(loop, setup, known, overlay, sealer)
        if dial is None:
            overlay.on_whois = self._dialler.recall
            self._listeners = TcpListeners(
                loop, setup, known, overlay, self._came, on_listeners, self.counts, sealer
            )
            overlay.on_ask_later = self._asked
        forwarder.on_tcp = self.take

    # Segments of the pod.

    def take(self, packet: bytes, head: packets.Head) -> None:
        segment = tcp_segments.parse(packet, head.start)
        if segment is None:
            self.counts["malformed"] += 1
            return
        end = self._ends.get((head.source_port, head.destination, head.port))
        if end is not None:
            end.segment(segment)
        elif segment.flags & (SYN | ACK | RST) == SYN:
            self._pod_connects(packet, head, segment)
        elif not segment.flags & RST:
            self._forwarder.write(
                tcp_segments.reset_for(
                    segment, (head.destination, head.port), (head.source, head.source_port)
                )
            )

    def _pod_connects(self, packet: bytes, head: packets.Head, segment: Segment) -> None:
        route = self._tables.route(TCP, head.destination, head.port)
        if route.kind == tables.DENIED or len(self._ends) >= _MAX_CONNECTIONS:
            # As a dropped packet: the program waits, and the kernel tries again.
            self.counts["denied out"] += 1
            return
        if route.kind == tables.UNREACHABLE or (route.kind == tables.HOST and not is_for_pods(route.ip)):
            self._unreachable(packet)
            return
        carried = self._carried((head.source_port, head.destination, head.port))
        carried.end.take_syn(segment)
        if route.kind == tables.REFUSED:
            self.counts["refused out"] += 1
            carried.refuse()
            return

        def dialled(made: Optional[socket.socket], code: int) -> None:
            self._dialled(carried, packet, made, code)

        source = head.destination, head.source_port
        if route.kind == tables.HOST:
            connect_host(self._loop, route.ip, route.port, dialled)
        elif route.ip == self._setup.ip:
            # A Service of the pod itself: its address stands for the client.
            self._dial_own(route.port, source, _CONNECT_TIMEOUT_S, dialled)
        elif self._others is not None:
            self._others(route.ip, route.port, self._setup.ip, dialled)
        else:
            self._dialler.dial(route.ip, route.port, self._setup.ip, dialled, head.source_port)

    def _dialled(self, carried: Carried, packet: bytes, made: Optional[socket.socket], code: int) -> None:
        if carried.end.state != DIALLING:
            # The program did not wait.
            if made is not None:
                reset(made)
        elif made is not None:
            self.counts["connected"] += 1
            carried.begin(made)
            carried.end.accept()
        elif code in (errno.ECONNREFUSED, errno.ECONNRESET):
            self.counts["refused out"] += 1
            carried.refuse()
        else:
            carried.forget()
            if code != errno.ETIMEDOUT:
                self._unreachable(packet)

    def _unreachable(self, packet: bytes) -> None:
        self.counts["unreachable"] += 1
        told = packets.unreachable(packet, packets.HOST)
        if told is not None:
            self._forwarder.write(told)

    # Connections to the pod.

    def dial(self, ip: int, port: int, source_ip: int, done: OnDialled) -> None:
        """For probes, port-forward and NodePorts: a connected socket and 0, or None and an errno."""
        if addresses.is_loopback(ip):
            self._dial_loopback(port, done)
        elif ip == self._setup.ip:
            self._dial_own(port, (source_ip, 0), _CONNECT_TIMEOUT_S, done)
        else:
            self._dialler.dial(ip, port, source_ip, done)

    def _dial_loopback(self, port: int, done: OnDialled) -> None:
        """Nothing comes to a loopback from outside: a socket that is inside does it, and the kernel does the rest."""
        if self._sockets is None:
            self._dial_own(port, (self._setup.host_ip, 0), _CONNECT_TIMEOUT_S, done)
            return
        made = self._sockets.tcp(socket.AF_INET)
        made.setblocking(False)
        # Loopback answers while we are in the call, also where it refuses.
        code = made.connect_ex(("127.0.0.1", port))
        if code == errno.EINPROGRESS:
            code = made.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            made.close()
            self._loop.soon(lambda: done(None, code))
        else:
            self._loop.soon(lambda: done(made, 0))

    def _dial_own(self, port: int, source: Tuple[int, int], timeout_s: float, done: OnDialled) -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def ended(code: int) -> None:
            if code:
                theirs.close()
                ours.close()
                done(None, code)
            else:
                done(theirs, 0)

        self._connect(port, source, timeout_s, ours, ended)

    def _connect(
        self,
        port: int,
        source: Tuple[int, int],
        timeout_s: float,
        made: Optional[socket.socket],
        ended: Callable[[int], None],
    ) -> Carried:
        """From `source` to the pod's port; once open the bytes are `made`'s."""
        source_ip, source_port = source
        if addresses.is_loopback(source_ip):
            # A cluster of one host may know it as 127.0.0.1, from where a kernel takes nothing that comes from outside.
            source_ip = self._setup.pod_range[0] + 1
        key = self._free_key(port, source_ip, source_port)
        carried = self._carried(key)
        carried.on_opened = ended
        if made is not None:
            carried.hold(made)
        carried.timer = self._loop.later(timeout_s, carried.give_up)
        carried.end.connect()
        return carried

    def _free_key(self, port: int, source_ip: int, source_port: int) -> Key:
        while not source_port or (port, source_ip, source_port) in self._ends:
            source_port = _FIRST_PORT + int.from_bytes(os.urandom(3), "big") % _PORTS
        return port, source_ip, source_port

    def _asked(self, ip: int, port: int, answer: Callable[[int], None]) -> None:
        """Another netd wants to know behind which host port our `port` is: only if somebody listens there."""
        if ip != self._setup.ip:
            answer(0)
        elif port in self._probing:
            self._probing[port].append(answer)
        else:
            self._probing[port] = [answer]
            self._probe(port)

    def _probe(self, port: int) -> None:
        def ended(code: int) -> None:
            probe.drop()
            host_port = 0
            if code == errno.ECONNREFUSED:
                self._listeners.close(port)
            else:
                # Silence is a full queue: somebody listens.
                host_port = self._listeners.open(port)
            for answer in self._probing.pop(port):
                answer(host_port)

        # A handshake that is never completed: the program does not see it.
        probe = self._connect(port, (self._setup.host_ip, 0), _PROBE_TIMEOUT_S, None, ended)

    def _came(self, made: socket.socket, what: Announcement) -> None:
        """Somebody whom policy lets in."""

        def ended(code: int) -> None:
            if not code:
                self.counts["accepted"] += 1
                if self._sealer is not None:
                    self._sealer.opened(made)
                return
            reset(made)
            if code == errno.ECONNREFUSED:
                # The next who comes hears it from the host's kernel.
                self._listeners.close(what.port)

        self._connect(what.port, (what.source_ip, what.source_port), _CONNECT_TIMEOUT_S, made, ended)

    def _carried(self, key: Key) -> Carried:
        here, pod = (key[1], key[2]), (self._setup.ip, key[0])

        def forget(end: TcpEnd) -> None:
            if self._ends.get(key) is end:
                del self._ends[key]
                self.counts["sent again"] += end.sent_again

        made = Carried(
            self._loop,
            lambda events: TcpEnd(self._loop, self._forwarder.write, here, pod, _MSS, events),
            forget,
        )
        self._ends[key] = made.end
        return made
