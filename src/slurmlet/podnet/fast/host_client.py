"""The fast path's client half, for a pod on its host's network that asked for the cluster's names.

Its sockets are its own and so is everything it does with them (MPI and InfiniBand above all): only a connect() to a pod or
a Service is done in its place, and getpeername() then says what was asked for. It must never touch a connection to anybody
else.
"""

from __future__ import annotations

import os
from typing import Any, Callable, Dict

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.fast import seccomp_filter
from slurmlet.podnet.fast.seccomp_notify import Call
from slurmlet.podnet.fast.socket_names import FRESH
from slurmlet.podnet.fast.substitution import Supervisor
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.tables import TCP, Tables

_MAX_ADDRESS_BYTES = 128


class HostSupervisor(Supervisor):
    def __init__(self, loop: Loop, setup: Setup, tables: Tables, overlay: Overlay, journal_path: str) -> None:
        self._tables = tables
        super().__init__(loop, setup, tables, overlay, None, lambda _listeners: None, journal_path)

    def _all_handlers(self) -> Dict[int, Callable[[Call], None]]:
        numbers = seccomp_filter.machine().numbers
        return {
            numbers[seccomp_filter.CONNECT]: self._connect,
            numbers[seccomp_filter.GETPEERNAME]: self._getpeername,
        }

    def _connect(self, call: Call) -> None:
        fd = self._copy(call)
        if fd < 0:
            return
        known = self._table.get(self._kernel.cookie(fd))
        under_way = known is not None and known.phase != FRESH
        if under_way or (self._kernel.tcp_family(fd) and self._is_for_cluster(call)):
            self._connect_copy(call, fd)
        else:
            self._leave(call, fd)

    def _connect_copy(self, call: Call, fd: int) -> None:
        sock = self._known(call, fd)
        if sock is not None:
            self.counts["connect"] += 1
            self._connecting.connect(call, fd, sock)

    def _is_for_cluster(self, call: Call) -> bool:
        fits = 2 <= call.a2 <= _MAX_ADDRESS_BYTES
        raw = self._processes.read(call.pid, call.a1, call.a2) if fits else None
        address = addresses.decode(raw) if raw else None
        if address is None or address.ip is None:
            return False
        ip = address.ip
        return (
            self._setup.in_pods(ip)
            or self._setup.in_services(ip)
            or self._tables.is_service(TCP, ip, address.port)
        )

    def _getpeername(self, call: Call) -> None:
        fd = self._copy(call)
        if fd < 0:
            return
        sock: Any = self._table.get(self._kernel.cookie(fd))
        if sock is not None and sock.peer_port and self._kernel.raw_peer(fd):
            self.counts["getpeername"] += 1
            self._write(call, sock.peer())
            os.close(fd)
        else:
            self._leave(call, fd)

    def _leave(self, call: Call, fd: int) -> None:
        """It is the kernel's business."""
        self.counts["not ours"] += 1
        call.proceed()
        os.close(fd)
