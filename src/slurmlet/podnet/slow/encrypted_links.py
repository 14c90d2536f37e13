"""Packets between netds of an encrypted cluster: one TLS connection from each netd that sends to each that receives.

In place of the overlay's datagrams, and no more reliable than those: what does not fit into a short queue is dropped, a
link that breaks takes with it what was in it, and the next packet makes another. Frames are those of sealing/piping.py;
the first one of a link is the sender's overlay port, all others are whole IPv4 packets.

Who connects needs no announcement: its certificate says that it is a netd of this cluster, and policy is asked about each
packet.
"""

from __future__ import annotations

import collections
import socket
import struct
import time
from typing import Callable, Deque, Dict, Optional, Set, Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.encryption.sealer import Sealer
from slurmlet.podnet.encryption.tls_connection import Sealed
from slurmlet.podnet.encryption.tls_pipe import HEAD
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_datagrams import MAX_PACKET_BYTES
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.pod_dial import connect_from
from slurmlet.podnet.socket_relay import reset
from slurmlet.podnet.tables import Peer

# What may wait for a link that is being made, and for one that is slow.
_QUEUE_BYTES = 1 << 20
_IDLE_S, _SWEEP_S = 60.0, 15.0
_PORT = struct.Struct(">H")
_BACKLOG = 256
# Strangers can connect too; those who never finish a handshake go after its time.
_MAX_UNKNOWN = 256
_AT_ONCE = 32

# (host, overlay port)
Key = Tuple[int, int]


class Links:
    def __init__(self, loop: Loop, setup: Setup, overlay: Overlay, sealer: Sealer) -> None:
        self._loop, self._setup, self._overlay, self._sealer = loop, setup, overlay, sealer
        self._out: Dict[Key, _Outgoing] = {}
        self._unknown: Set[Sealed] = set()
        self.counts: Dict[str, int] = collections.Counter()
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind((addresses.text(setup.host_ip), 0))
        self._listener.listen(_BACKLOG)
        self.port = int(self._listener.getsockname()[1])
        loop.reading(self._listener.fileno(), self._connections_came)
        loop.later(_SWEEP_S, self._sweep)
        overlay.links = self

    def close(self) -> None:
        self._loop.forget(self._listener.fileno())
        self._listener.close()
        for link in list(self._out.values()):
            link.end()
        for sealed in list(self._unknown):
            sealed.close()

    # Out.

    def send(self, peer: Peer, packet: bytes) -> None:
        key = (peer.host_ip, peer.overlay_port)
        if key == (self._setup.host_ip, self._overlay.port):
            self._loop.soon(lambda: self._overlay.deliver(packet, *key))
            return
        link = self._out.get(key)
        if link is None:
            link = self._out[key] = _Outgoing(self.counts, lambda: self._out.pop(key, None))
            self._make(link, peer)
        link.send(packet)

    def _make(self, link: _Outgoing, peer: Peer) -> None:
        def answered(port: Optional[int]) -> None:
            if port:
                connect_from(self._loop, self._setup.host_ip, peer.host_ip, port, connected)
            else:
                link.end()

        def connected(made: Optional[socket.socket], _code: int) -> None:
            if made is None:
                link.end()
            elif link.ended:
                made.close()
            else:
                link.begin(self._sealer, made, _PORT.pack(self._overlay.port))

        self.counts["made"] += 1
        self._overlay.ask(peer, 0, 0, answered)

    def _sweep(self) -> None:
        old_s = time.monotonic() - _IDLE_S
        for link in [each for each in self._out.values() if each.used_s < old_s]:
            link.end()
        self._loop.later(_SWEEP_S, self._sweep)

    # In.

    def _connections_came(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                made, (host, _) = self._listener.accept()
            except OSError:
                return
            if len(self._unknown) >= _MAX_UNKNOWN:
                reset(made)
            else:
                self._welcome(made, addresses.number(host))

    def _welcome(self, made: socket.socket, host_ip: int) -> None:
        def shaken(good: bool) -> None:
            self._unknown.discard(sealed)
            if good:
                _Incoming(sealed, host_ip, self._overlay.deliver)
            else:
                self.counts["strangers"] += 1

        sealed = self._sealer.bare(made, True, shaken)
        self._unknown.add(sealed)


class _Outgoing:
    def __init__(self, counts: Dict[str, int], gone: Callable[[], object]) -> None:
        self._counts, self._gone = counts, gone
        self._queue: Deque[bytes] = collections.deque()
        self._queued_bytes = 0
        self._sealed: Optional[Sealed] = None
        self._open = self.ended = False
        self.used_s = time.monotonic()

    def send(self, packet: bytes) -> None:
        self.used_s = time.monotonic()
        waiting = (
            self._sealed.waiting_bytes if self._open and self._sealed is not None else self._queued_bytes
        )
        if waiting + len(packet) > _QUEUE_BYTES:
            self._counts["dropped"] += 1
        elif self._open and self._sealed is not None:
            self._sealed.send(HEAD.pack(len(packet)) + packet)
        else:
            self._queue.append(packet)
            self._queued_bytes += len(packet)

    def begin(self, sealer: Sealer, made: socket.socket, hello: bytes) -> None:
        def shaken(good: bool) -> None:
            if not good:
                self.end()
                return
            self._open = True
            sealed.on_end = self.end
            # Nothing comes, but an end.
            sealed.read(True)
            for each in (hello, *self._queue):
                sealed.send(HEAD.pack(len(each)) + each)
            self._queue.clear()

        sealed = self._sealed = sealer.bare(made, False, shaken)

    def end(self) -> None:
        if self.ended:
            return
        self.ended = True
        if self._sealed is not None:
            self._sealed.close()
        self._counts["dropped"] += len(self._queue)
        self._queue.clear()
        self._gone()


class _Incoming:
    """Held by its connection's callbacks, until that ends."""

    def __init__(self, sealed: Sealed, host_ip: int, deliver: Callable[[bytes, int, int], None]) -> None:
        self._sealed, self._host_ip, self._deliver = sealed, host_ip, deliver
        self._port: Optional[int] = None
        self._received = bytearray()
        sealed.on_bytes = self._take
        sealed.read(True)

    def _take(self, view: memoryview) -> None:
        received = self._received
        received += view
        at = 0
        while len(received) - at >= HEAD.size:
            size = HEAD.unpack_from(received, at)[0]
            if size > MAX_PACKET_BYTES:
                self._sealed.close(broken=True)
                return
            end = at + HEAD.size + size
            if end > len(received):
                break
            self._frame(bytes(received[at + HEAD.size : end]))
            at = end
        del received[:at]

    def _frame(self, frame: bytes) -> None:
        if self._port is not None:
            self._deliver(frame, self._host_ip, self._port)
        elif len(frame) == _PORT.size:
            self._port = _PORT.unpack(frame)[0]
        else:
            self._sealed.close(broken=True)
