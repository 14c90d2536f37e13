"""netd: the process that is a pod's network. A fork of the runner, in the host's network namespace.

It holds nothing that cannot be had again: sockets, namespaces and tables are kept by the runner, names of connections in the
journal. So a netd that was killed is replaced by a new one, and the pod's connections go on meanwhile.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import resource
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, Callable, Dict, NamedTuple, Optional, Set

from slurmlet.linux import syscalls
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.channel import Channel
from slurmlet.podnet.namespace_sockets import PodSockets
from slurmlet.podnet.netd_setup import FROM_HOST, PACKETS, Setup
from slurmlet.podnet.network_namespace import PodNamespace
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.ports.host_ports import HostPorts, named
from slurmlet.podnet.tables import Tables

if TYPE_CHECKING:
    from slurmlet.podnet.encryption.sealer import Sealer
    from slurmlet.podnet.encryption.tls_contexts import Contexts
    from slurmlet.protocol.messages import RunnerToNetd

_COUNT_EVERY_S = 30.0
_COLLECT_AFTER = 20_000
NUMBER_BYTES = 8
_MAX_FILES = 4096


class Start(NamedTuple):
    """What the runner leaves to its fork. Everything else that is open is closed there."""

    setup: Setup
    mode: str
    # Messages; descriptors of new listeners, each with its number.
    control: socket.socket
    notify_socket: socket.socket
    overlay: socket.socket
    # Where the runner's own forks ask to be connected to the pod.
    dial: socket.socket
    space: Optional[PodNamespace]
    journal: str
    # Listeners of processes that run already, by number.
    listeners: Dict[int, int]
    # Where the native library may be; "": nowhere.
    libraries: str = ""
    # Where encryption was asked for.
    contexts: Optional[Contexts] = None


def run(start: Start) -> None:
    """In the fork. Does not come back."""
    code = 1
    try:
        _become_netd(start)
        # What is remembered of connections is many small objects without cycles: looking through them all costs, and
        # finds nothing.
        gc.freeze()
        gc.enable()
        gc.set_threshold(_COLLECT_AFTER, 10, 100)
        loop = Loop()
        _Daemon(loop, start)
        loop.run()
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _become_netd(start: Start) -> None:
    syscalls.set_name("slurmlet-netd")
    # Slurm may signal every process of the job; the pod's grace is not over then, and it needs its network.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    sockets = (start.control, start.notify_socket, start.overlay, start.dial)
    kept = {0, 1, 2, *(each.fileno() for each in sockets), *start.listeners.values()}
    if start.space is not None:
        kept |= {start.space.netns_fd, start.space.tun_fd}
    _close_others(kept)
    # Each call that waits, relay and pidfd is a descriptor; a soft limit is for programs that use select().
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _close_others(kept: Set[int]) -> None:
    """The link to the hub above all: it must end when the runner ends it, not when we do."""
    # Not by /proc/self/fd: nobody may look into a runner, itself included.
    edges = [-1, *sorted(kept), _MAX_FILES]
    for below, above in zip(edges, edges[1:]):
        # closerange(0, 0) closes everything: the kernel is told "up to -1".
        if above > below + 1:
            os.closerange(below + 1, above)


class _Daemon:
    def __init__(self, loop: Loop, start: Start) -> None:
        self._loop, self._start = loop, start
        setup = start.setup
        self._tables = Tables(setup)
        self._overlay = Overlay(loop, setup, self._tables, start.overlay)
        self._control = Channel(loop, start.control, self._told, self._orphaned)
        self._counted: Dict[str, Callable[[], Dict[str, int]]] = {}
        self._attach(start)
        loop.reading(start.dial.fileno(), self._asked)
        loop.later(_COUNT_EVERY_S, self._count)
        self._control.send({"type": "ready"})

    def _attach(self, start: Start) -> None:
        loop, setup, tables, overlay = self._loop, start.setup, self._tables, self._overlay
        if start.space is not None:
            from slurmlet.podnet.slow.packet_forwarder import Forwarder

            forwarder = Forwarder(loop, setup, tables, overlay, start.space.tun_fd)
            self._counted["forwarder"] = lambda: forwarder.counts
        sockets = PodSockets(start.space.netns_fd) if start.space is not None else None
        if start.mode == PACKETS:
            from slurmlet.podnet.slow.mini_tcp import MiniTcp

            self._dialler: Any = MiniTcp(
                *(loop, setup, tables, overlay, forwarder, self._listeners_changed, sockets),
                sealer=self._sealer(start),
            )
            self._counted["minitcp"] = lambda: self._dialler.counts
        else:
            self._dialler = supervisor = self._supervisor(start, sockets)
            self._counted["supervisor"] = lambda: supervisor.counts
            if start.space is not None:
                forwarder.on_tcp = lambda *first: self._stray(forwarder, *first)
            for number, fd in start.listeners.items():
                self._add_listener(number, fd)
            loop.reading(start.notify_socket.fileno(), self._notifier_came)
        self._host_ports = HostPorts(loop, setup, tables, overlay, self._dialler.dial)
        self._host_ports.on_taken = lambda taken: self._control.send(
            {"type": "ports-taken", "ports": named(taken)}
        )
        self._counted["host_ports"] = lambda: self._host_ports.counts
        if self._host_ports.taken:
            self._host_ports.on_taken(self._host_ports.taken)

    def _supervisor(self, start: Start, sockets: Optional[PodSockets]) -> Any:
        parts = (self._loop, start.setup, self._tables, self._overlay)
        if start.mode == FROM_HOST:
            from slurmlet.podnet.fast.host_client import HostSupervisor

            return HostSupervisor(*parts, start.journal)
        from slurmlet.podnet.fast.native import native_library
        from slurmlet.podnet.fast.substitution import Supervisor

        native = native_library.load(start.libraries)
        return Supervisor(*parts, sockets, self._listeners_changed, start.journal, native)

    def _sealer(self, start: Start) -> Optional[Sealer]:
        if start.contexts is None:
            return None
        from slurmlet.podnet.encryption.sealer import Sealer
        from slurmlet.podnet.slow.encrypted_links import Links

        made = Sealer(self._loop, start.contexts)
        links = Links(self._loop, start.setup, self._overlay, made)
        self._counted["links"] = lambda: links.counts
        self._counted["overlay"] = lambda: {"in_clear": self._overlay.in_clear}
        return made

    def _stray(self, forwarder: Any, packet: bytes, head: Any) -> None:
        """TCP of a 32-bit program, through the pod's own namespace: rare, so nothing is made for it before."""
        from slurmlet.podnet.slow.mini_tcp import MiniTcp

        setup, tables, overlay, dial = self._start.setup, self._tables, self._overlay, self._dialler.dial
        strays = MiniTcp(self._loop, setup, tables, overlay, forwarder, dial=dial)
        self._counted["minitcp"] = lambda: strays.counts
        strays.take(packet, head)

    # The runner.

    def _told(self, message: RunnerToNetd) -> None:
        if message["type"] == "network":
            self._tables.apply(message)

    def _orphaned(self) -> None:
        self._loop.stop()

    def _notifier_came(self) -> None:
        """The listener of a process that the runner has just started."""
        try:
            number, fds, _, _ = socket.recv_fds(self._start.notify_socket, NUMBER_BYTES, 1)
        except OSError:
            return
        if fds:
            self._add_listener(int.from_bytes(number, "big"), fds[0])

    def _add_listener(self, number: int, fd: int) -> None:
        self._dialler.add_listener(fd, lambda: self._control.send({"type": "gone", "number": number}))

    def _listeners_changed(self, listeners: Dict[int, int]) -> None:
        self._control.send(
            {"type": "listeners", "listeners": {str(port): at for port, at in listeners.items()}}
        )

    def _count(self) -> None:
        counts = {
            f"{part}_{name}": value for part, get in self._counted.items() for name, value in get().items()
        }
        self._control.send({"type": "counts", "counts": {**counts, "overlay_dropped": self._overlay.dropped}})
        self._loop.later(_COUNT_EVERY_S, self._count)

    # Connections for the runner: probes and port-forward.

    def _asked(self) -> None:
        try:
            connection, _ = self._start.dial.accept()
        except OSError:
            return
        connection.setblocking(False)
        self._loop.reading(connection.fileno(), lambda: self._dial(connection))

    def _dial(self, connection: socket.socket) -> None:
        self._loop.forget(connection.fileno())
        try:
            asked = json.loads(connection.recv(4096))
            ip, port = addresses.number(asked["ip"]), int(asked["port"])
        except (OSError, ValueError, KeyError):
            connection.close()
            return
        source = ip if addresses.is_loopback(ip) else self._start.setup.host_ip
        self._dialler.dial(ip, port, source, lambda made, code: _answer(connection, made, code))


def _answer(connection: socket.socket, made: Optional[socket.socket], code: int) -> None:
    with connection:
        try:
            if made is None:
                connection.send((code or errno.EIO).to_bytes(4, "big"))
                return
            with made:
                socket.send_fds(connection, [(0).to_bytes(4, "big")], [made.fileno()])
        except OSError:
            # Whoever asked has gone.
            pass
