"""Calls of 32-bit programs, as the kernel's "compat" layer takes them: i386 on x86_64, AArch32 on aarch64.

They make their sockets in the pod's network namespace, and what they do with those is the kernel's business. A socket of the
host is another matter: a 64-bit process may have left it open or sent it over a Unix socket, and what the kernel would do
with it there (connect to the host's loopback, take connections that nobody announced) is past netd and every
policy. So such calls on such sockets are refused; reading from and writing to a connection is not.
"""

from __future__ import annotations

import errno
import os
import struct
from typing import Dict, Optional

from slurmlet.podnet.fast import seccomp_filter
from slurmlet.podnet.fast.host_sockets import HostSockets
from slurmlet.podnet.fast.seccomp_notify import Call, Processes

# Harmless once a connection is made: only before that can they make one (fast open).
_OF_CONNECTIONS = ("sendto", "sendmsg", "sendmmsg", "setsockopt")
_word = struct.Struct("=I")


class CompatCalls:
    def __init__(self, kernel: HostSockets, processes: Processes, counts: Dict[str, int]) -> None:
        self._kernel, self._processes, self._counts = kernel, processes, counts
        compat = seccomp_filter.machine().compat
        self._names = {number: name for name, number in compat.numbers.items()}
        self._socketcalls = {number: name for name, number in seccomp_filter.SOCKETCALLS.items()}

    def serve(self, call: Call) -> None:
        name = self._names.get(call.nr, "")
        number: Optional[int] = call.a0
        if name == seccomp_filter.SOCKETCALL:
            name = self._socketcalls.get(call.a0 & 0xFFFFFFFF, "")
            raw = self._processes.read(call.pid, call.a1, _word.size)
            number = None if raw is None else _word.unpack(raw)[0]
        fd = -errno.EFAULT if number is None else self._processes.descriptor(call.pid, number)
        if fd < 0:
            call.answer(-fd)
            return
        if self._allows(name, fd):
            self._counts["not ours"] += 1
            call.proceed()
        else:
            self._counts["compat refused"] += 1
            call.answer(errno.EOPNOTSUPP)
        os.close(fd)

    def _allows(self, name: str, fd: int) -> bool:
        if not self._kernel.is_host_stream(fd):
            return True
        return name in _OF_CONNECTIONS and bool(self._kernel.raw_peer(fd))
