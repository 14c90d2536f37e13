"""accept(): a connection is handed to the program only once it is known whose it is and that policy lets it in.

The announcement of a connection is mostly there before the program asks, sometimes a moment later: the call waits a
moment for it. After that the connection is put aside and its host is asked; what nobody vouches for is reset, and the
program never sees it. Connections that were taken from the kernel but could not be handed over wait here too; a
connection of our own then wakes a program that sleeps in epoll, and the next accept() swallows it.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from typing import Callable, Deque, Dict, List, NamedTuple, Optional, Tuple

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.fast.host_sockets import HostSockets, reset
from slurmlet.podnet.fast.pod_listeners import OUTSIDE, Claim, Ports
from slurmlet.podnet.fast.seccomp_notify import Call, Processes
from slurmlet.podnet.fast.socket_names import CONNECTED, Socket, Table
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import Announcement, Inner, InnerSix, Key, Overlay
from slurmlet.podnet.tables import TCP, Tables

# An announcement travels beside the handshake: microseconds, a millisecond on a busy host.
_HOLD_S = 0.005
# Asking the host of the peer and hearing from it.
_ASIDE_S = 1.0
_MAX_ASIDE = 1024
_WAKE_S = 5.0
_CHECK_S = 0.5
_FLAGS = socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
_word = struct.Struct("=i")
_size = struct.Struct("=I").pack

Name = Tuple[int, int]


class _Arrived(NamedTuple):
    """A connection we hold for the program."""

    fd: int
    what: Announcement


class _Queue:
    """What waits at one listener: programs for connections, or connections for a program."""

    __slots__ = ("copy", "ready", "sock", "waiters")

    def __init__(self, sock: Socket) -> None:
        self.sock = sock
        self.ready: Deque[_Arrived] = deque()
        self.waiters: Deque[Call] = deque()
        # Our descriptor of the listener while somebody waits, else -1.
        self.copy = -1


class _Held:
    """A connection whose announcement has not come yet; `call` waits for it, or (None) it is put aside."""

    __slots__ = ("call", "copy", "fd", "sock", "timer")

    def __init__(self, sock: Socket, fd: int, call: Call, copy: int) -> None:
        self.sock, self.fd, self.copy = sock, fd, copy
        self.call: Optional[Call] = call
        self.timer: Optional[Timer] = None


class Accepting:
    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        kernel: HostSockets,
        processes: Processes,
        table: Table,
        ports: Ports,
        tables: Tables,
        overlay: Overlay,
        counts: Dict[str, int],
    ) -> None:
        self._loop, self._setup, self._kernel = loop, setup, kernel
        self._processes, self._counts = processes, counts
        self._table, self._ports, self._tables, self._overlay = table, ports, tables, overlay
        self._queues: Dict[int, _Queue] = {}
        self._held: Dict[Key, _Held] = {}
        self._wakes: Dict[Name, socket.socket] = {}
        self._checking: Optional[Timer] = None
        self.on_named: Callable[[Socket], None] = lambda _sock: None
        self.on_waiting: Callable[[Call], None] = lambda _call: None
        # For whoever takes connections from listeners too: ours are first; announcements are waited for.
        self.on_busy: Callable[[int, bool], None] = lambda _cookie, _busy: None
        self.on_holding: Callable[[bool], None] = lambda _holding: None
        overlay.on_announced = self._announced

    # The call.

    def accept(self, call: Call, fd: int, sock: Socket, flags: int) -> None:
        """Takes over `fd`, a copy of the listener."""
        if sock.claim is None or not sock.claim.host_port or flags & ~_FLAGS:
            call.answer(errno.EINVAL)
            os.close(fd)
            return
        queue = self._queues.get(sock.cookie)
        if queue is not None and queue.ready:
            self._deliver(call, sock, queue.ready.popleft(), flags, known=False)
        elif not self._take(call, fd, sock, flags):
            self._wait(call, fd, sock)
            return
        os.close(fd)

    def _take(self, call: Call, fd: int, sock: Socket, flags: int) -> bool:
        """Answer from the kernel's queue; False when the call has to wait."""
        blocking = os.get_blocking(fd)
        while True:
            if blocking and not self._kernel.ready(fd, select.POLLIN):
                return False
            made, ip, port = self._kernel.accept(fd, flags | socket.SOCK_CLOEXEC)
            if made < 0:
                call.answer(-made)
                return True
            if self._settled(call, fd, sock, made, (ip, port)):
                return True

    def _settled(self, call: Call, fd: int, sock: Socket, made: int, peer: Name) -> bool:
        """Whether this connection answers the call, now or in a moment."""
        if peer in self._wakes:
            self._swallow(made, peer)
            return False
        if not self._kernel.raw_peer(made):
            # Reset by its client. What it sent may be a stranger's, who had this port before the pod that is announced.
            self._refuse(made)
            return False
        key = (*peer, sock.claim.port if sock.claim is not None else 0)
        what = self._overlay.claim(*key)
        if what is None:
            self._hold(_Held(sock, made, call, os.dup(fd)), key)
            return True
        if self._admitted(sock, what):
            self._deliver(call, sock, _Arrived(made, what), flags_of(call), known=True)
            return True
        self._refuse(made)
        return False

    def adopt(self, call: Call, fd: int, sock: Socket, made: int) -> None:
        """Go on where somebody else has taken a connection from the kernel and knows no more."""
        if self._settled(call, fd, sock, made, self._kernel.peer(made)):
            os.close(fd)
        else:
            self.accept(call, fd, sock, flags_of(call))

    def _admitted(self, sock: Socket, what: Announcement) -> bool:
        claim = sock.claim
        if claim is None or what.port != claim.port:
            return False
        if isinstance(what, Inner):
            return True
        if claim.place != OUTSIDE:
            # Nobody else is led to a listener on the pod's loopback.
            return False
        if what.ip != self._setup.ip or addresses.is_loopback(what.source_ip):
            return False
        return self._tables.admits(TCP, what.source_ip, what.port)

    def _refuse(self, fd: int) -> None:
        self._counts["refused in"] += 1
        reset(fd)

    def _deliver(self, call: Call, sock: Socket, arrived: _Arrived, flags: int, known: bool) -> None:
        fd, what = arrived
        if not known:
            os.set_blocking(fd, not flags & socket.SOCK_NONBLOCK)
        made = Socket(self._kernel.cookie(fd), sock.family)
        made.named(what.ip, what.port, what.source_ip, what.source_port, isinstance(what, InnerSix))
        made.phase = CONNECTED
        error = self._tell(call, made) if call.a1 else 0
        if error:
            # As the kernel: the connection is lost to a program that gave no room for its name.
            call.answer(error)
            reset(fd)
            return
        error = call.give(fd, flags & socket.SOCK_CLOEXEC)
        if error:
            # Interrupted, or out of descriptors.
            call.answer(error)
            self._keep(sock, arrived)
            return
        self._counts["accepted"] += 1
        self._table.add(made)
        self.on_named(made)
        os.close(fd)

    def _tell(self, call: Call, made: Socket) -> int:
        """Write the peer's name where the program wants it; 0 or an errno."""
        raw = self._processes.read(call.pid, call.a2, 4)
        if raw is None:
            return errno.EFAULT
        room = _word.unpack(raw)[0]
        if room < 0:
            return errno.EINVAL
        name = made.peer()
        written = self._processes.write(call.pid, call.a1, name[:room], call.a2, _size(len(name)))
        return 0 if written else errno.EFAULT

    # Calls that wait.

    def _wait(self, call: Call, fd: int, sock: Socket) -> None:
        queue = self._queue(sock)
        queue.waiters.append(call)
        self.on_waiting(call)
        if queue.copy < 0:
            queue.copy = fd
            self._loop.reading(fd, lambda: self._arrived(queue))
        else:
            os.close(fd)
        patience_s = self._kernel.patience_s(queue.copy, socket.SO_RCVTIMEO)
        if patience_s is not None:
            self._loop.later(patience_s, lambda: self._give_up(queue, call))
        self._check_later()

    def _queue(self, sock: Socket) -> _Queue:
        queue = self._queues.get(sock.cookie)
        if queue is None:
            queue = self._queues[sock.cookie] = _Queue(sock)
            self.on_busy(sock.cookie, True)
        return queue

    def _arrived(self, queue: _Queue) -> None:
        call = self._next_waiter(queue)
        if call is not None and not self._take(call, queue.copy, queue.sock, flags_of(call)):
            queue.waiters.appendleft(call)
        self._rest(queue)

    def _next_waiter(self, queue: _Queue) -> Optional[Call]:
        while queue.waiters:
            call = queue.waiters.popleft()
            if call.waits:
                return call
        return None

    def _rest(self, queue: _Queue) -> None:
        """A listener is only kept open by us while somebody waits at it."""
        if not queue.waiters and queue.copy >= 0:
            self._loop.forget(queue.copy)
            os.close(queue.copy)
            queue.copy = -1
        if not queue.waiters and not queue.ready:
            self._queues.pop(queue.sock.cookie, None)
            self.on_busy(queue.sock.cookie, False)

    def _give_up(self, queue: _Queue, call: Call) -> None:
        if call in queue.waiters:
            queue.waiters.remove(call)
            call.answer(errno.EAGAIN)
            self._rest(queue)

    def waiting(self) -> List[Call]:
        held = [each.call for each in self._held.values() if each.call is not None]
        return held + [call for queue in self._queues.values() for call in queue.waiters]

    def check(self) -> None:
        """Interrupted calls are not notified, and our copy of their listener would keep it open."""
        for queue in list(self._queues.values()):
            queue.waiters = deque(call for call in queue.waiters if call.waits)
            self._rest(queue)

    def _check_later(self) -> None:
        if self._checking is None:
            self._checking = self._loop.later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._checking = None
        self.check()
        if any(queue.waiters for queue in self._queues.values()):
            self._check_later()

    def gone(self, claim: Claim) -> None:
        """A listener was closed: what waited at it is reset, as the kernel does."""
        queue = self._queues.pop(claim.cookie, None)
        if queue is not None:
            for arrived in queue.ready:
                reset(arrived.fd)
            queue.ready.clear()
            for call in queue.waiters:
                call.answer(errno.EINVAL)
            queue.waiters.clear()
            self._rest(queue)
        self._table.drop(claim.cookie)

    # Connections that nobody has announced yet.

    def _hold(self, held: _Held, key: Key) -> None:
        self._counts["announced late"] += 1
        if key in self._held:
            # Reset by its client, who came again from the same port.
            self._drop(key)
        self._held[key] = held
        self.on_holding(True)
        if held.call is not None:
            self.on_waiting(held.call)
        held.timer = self._loop.later(_HOLD_S, lambda: self._put_aside(key))

    def _put_aside(self, key: Key) -> None:
        held = self._held[key]
        name = self._kernel.name(held.fd)
        self._overlay.whois(key[0], key[1], name[1])
        if len(self._held) > _MAX_ASIDE:
            self._unknown(key)
        else:
            held.timer = self._loop.later(_ASIDE_S, lambda: self._unknown(key))
        self._go_on(held)

    def _unknown(self, key: Key) -> None:
        self._counts["strangers"] += 1
        self._drop(key)
        self.on_holding(bool(self._held))

    def _drop(self, key: Key) -> None:
        held = self._held.pop(key)
        if held.timer is not None:
            held.timer.cancel()
        self._refuse(held.fd)
        self._go_on(held)

    def _go_on(self, held: _Held) -> None:
        """The call that found this connection looks for another one."""
        call, held.call = held.call, None
        if call is not None:
            if call.waits:
                self.accept(call, held.copy, held.sock, flags_of(call))
            else:
                os.close(held.copy)

    def _announced(self, key: Key, what: Announcement) -> None:
        held = self._held.get(key)
        if held is None or not self._kernel.raw_peer(held.fd):
            # What was reset is not what is announced: that one is about to come from the same port.
            return
        del self._held[key]
        self.on_holding(bool(self._held))
        self._overlay.used(key)
        if held.timer is not None:
            held.timer.cancel()
        if not self._admitted(held.sock, what):
            self._refuse(held.fd)
            self._go_on(held)
        elif held.call is not None:
            call, held.call = held.call, None
            self._deliver(call, held.sock, _Arrived(held.fd, what), flags_of(call), known=True)
            os.close(held.copy)
        else:
            self._keep(held.sock, _Arrived(held.fd, what))

    # Connections that wait for a program.

    def _keep(self, sock: Socket, arrived: _Arrived) -> None:
        if sock.claim is None or not sock.claim.host_port:
            reset(arrived.fd)
            return
        queue = self._queue(sock)
        call = self._next_waiter(queue)
        if call is not None:
            self._deliver(call, sock, arrived, flags_of(call), known=False)
            self._rest(queue)
            return
        queue.ready.append(arrived)
        self._wake(sock.claim)

    def _wake(self, claim: Claim) -> None:
        family = socket.AF_INET6 if claim.place == "six" else socket.AF_INET
        caller = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._kernel.connect(caller.fileno(), self._ports.address(claim, family, claim.host_port))
        key = self._kernel.name(caller.fileno())
        self._wakes[key] = caller
        self._loop.later(_WAKE_S, lambda: self._awake(key, caller))

    def _swallow(self, fd: int, key: Name) -> None:
        os.close(fd)
        self._awake(key, self._wakes[key])

    def _awake(self, key: Name, caller: socket.socket) -> None:
        if self._wakes.get(key) is caller:
            del self._wakes[key]
            caller.close()

    def close(self) -> None:
        for key, caller in list(self._wakes.items()):
            self._awake(key, caller)


def flags_of(call: Call) -> int:
    """accept() leaves its fourth argument undefined; the dispatcher has cleared it."""
    return call.a3
