"""A pod's network as its containers and the runner see it: the host's here, one of its own in `network/attaching.py`."""

from __future__ import annotations

import errno
import os
import socket

from slurmlet.linux.event_loop import Loop
from slurmlet.runner.network.resolver_config import resolv_conf

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Optional, Protocol

    from slurmlet.protocol.pod_plan import PodPlan

    OnDialled = Callable[[Optional[socket.socket], int], None]
    Cancel = Callable[[], None]

    class Network(Protocol):
        # Where a sysfs of the pod's network namespace is mounted; "": containers see the host's.
        sysfs: str

        def address(self) -> str: ...

        def hostname(self) -> str: ...

        def resolv_conf(self) -> str: ...

        @property
        def enter(self) -> Optional[Callable[[], None]]:
            """For a forked child, just before it becomes the container runtime: goes where the pod's processes live."""
            ...

        def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
            """As a kubelet's probe connects. Blocks: for forks only."""
            ...

        def dial(self, loop: Loop, address: str, port: int, done: OnDialled) -> Cancel:
            """As `connect`, for the loop; from inside the pod when the address is its loopback."""
            ...


CONNECT_S = 30.0
# A connected, non-blocking socket and 0, or None and an errno.


class HostNetwork:
    """The host's own network namespace: the pod's address is the node's."""

    sysfs = ""
    enter = None

    def __init__(self, plan: PodPlan, address: str) -> None:
        self._plan, self._address = plan, address

    def address(self) -> str:
        return self._address

    def hostname(self) -> str:
        return str(self._plan.get("hostname") or socket.gethostname())

    def resolv_conf(self) -> str:
        return resolv_conf(self._plan.get("resolv_conf"))

    def connect(self, address: str, port: int, timeout_s: float) -> socket.socket:
        return socket.create_connection((address, port), timeout_s)

    def dial(self, loop: Loop, address: str, port: int, done: OnDialled) -> Cancel:
        return dial_host(loop, address, port, done)


def dial_host(loop: Loop, address: str, port: int, done: OnDialled) -> Cancel:
    return _Dialling(loop, done).start(address, port)


class _Dialling:
    def __init__(self, loop: Loop, done: OnDialled) -> None:
        self._loop, self._done = loop, done
        self._socket: Optional[socket.socket] = None
        self._timer = loop.later(CONNECT_S, lambda: self._failed(errno.ETIMEDOUT))

    def start(self, address: str, port: int) -> Cancel:
        try:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setblocking(False)
            code = self._socket.connect_ex((address, port))
        except OSError as error:
            code = error.errno or errno.EIO
        if code in (0, errno.EINPROGRESS) and self._socket is not None:
            self._loop.writing(self._socket.fileno(), self._answered)
        else:
            # In a turn of its own, as every other outcome.
            self._loop.soon(lambda: self._failed(code))
        return self.cancel

    def cancel(self) -> None:
        self._timer.cancel()
        self._done = lambda _socket, _code: None
        if self._socket is not None:
            self._loop.forget(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _answered(self) -> None:
        assert self._socket is not None
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._failed(code)
            return
        self._timer.cancel()
        self._loop.forget(self._socket.fileno())
        connected, self._socket = self._socket, None
        self._done(connected, 0)

    def _failed(self, code: int) -> None:
        done = self._done
        self.cancel()
        done(None, code)


def describe(code: int) -> str:
    return os.strerror(code).lower()
