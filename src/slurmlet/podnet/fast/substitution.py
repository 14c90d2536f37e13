"""The fast path: a program's TCP socket is one of the host, and netd answers the calls that name it.

Everything is done on copies of the program's descriptors, so that nothing a program changes meanwhile (its memory, its
descriptors) makes netd do what it has not checked. All in one thread: no call here may wait; those that must are
remembered and answered later.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from typing import Any, Callable, Dict, List, Optional, Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from slurmlet.podnet.fast import seccomp_filter
from slurmlet.podnet.fast.accept_call import Accepting
from slurmlet.podnet.fast.compat_calls import CompatCalls
from slurmlet.podnet.fast.connect_call import Connecting, OnDialled
from slurmlet.podnet.fast.host_sockets import HostSockets
from slurmlet.podnet.fast.journal import Journal
from slurmlet.podnet.fast.native.fastpath import FastPath
from slurmlet.podnet.fast.native.fastpath import Parts as FastParts
from slurmlet.podnet.fast.pod_listeners import Claim, Ports
from slurmlet.podnet.fast.seccomp_notify import Call, Listener, Processes, decode
from slurmlet.podnet.fast.socket_names import CONNECTED, FRESH, LISTENING, Socket, Table
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import Overlay
from slurmlet.podnet.tables import Tables

_MAX_ADDRESS_BYTES = 128
# Sockets made before anybody asks, of each kind that is asked for.
_SPARE = 2
_word = struct.Struct("=i")
_size = struct.Struct("=I").pack
_COUNTED = (
    *("socket", "bind", "listen", "connect", "accept", "getsockname", "getpeername", "not ours"),
    *("connects pod", "connects inner", "connects host", "connects denied", "connects failed", "asked"),
    *("accepted", "announced late", "refused in", "strangers", "relayed", "compat refused", "failed"),
)


class Supervisor:
    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        tables: Tables,
        overlay: Overlay,
        pod_sockets: Any,
        on_listeners: Callable[[Dict[int, int]], None],
        journal_path: str,
        library: Any = None,
    ) -> None:
        self._loop, self._setup = loop, setup
        self.counts: Dict[str, int] = dict.fromkeys(_COUNTED, 0)
        self._kernel, self._processes = HostSockets(), Processes()
        self._ports = Ports(loop, setup, self._kernel, pod_sockets, on_listeners)
        self._table = Table(self._ports)
        self._accepting = Accepting(
            loop,
            setup,
            self._kernel,
            self._processes,
            self._table,
            self._ports,
            tables,
            overlay,
            self.counts,
        )
        self._connecting = Connecting(
            loop, setup, self._kernel, self._processes, self._ports, tables, overlay, self.counts
        )
        overlay.on_ask = self._ports.host_port
        self._ports.before_check = self._accepting.check
        self._ports.on_gone = self._accepting.gone
        self._ports.on_mirror = self._mirrored
        self._listeners: Dict[int, Listener] = {}
        self._spare: Dict[int, List[Socket]] = {}
        self._spare_fds: Dict[int, int] = {}
        self._handlers, self._arch = self._all_handlers(), seccomp_filter.machine().audit_arch
        self._compat = CompatCalls(self._kernel, self._processes, self.counts)
        self._journal = Journal(loop, journal_path, self._table, self._ports)
        self._connecting.on_named = self._accepting.on_named = self._journal.named
        self._connecting.on_waiting = self._accepting.on_waiting = self._journal.waits
        self._journal.waiting = [self._accepting.waiting, self._connecting.waiting]
        self._received = self._journal.received
        self._native: Optional[FastPath] = None
        if library is not None:
            mine = (self._table, self._ports, self._connecting, self._accepting, self.counts)
            calls = (self._journal.slots, self._serve, self._journal.named, self._journal.did)
            self._native = FastPath(library, FastParts(loop, setup, tables, overlay, *mine, *calls))
        self._journal.restore()

    def _all_handlers(self) -> Dict[int, Callable[[Call], None]]:
        numbers = seccomp_filter.machine().numbers
        handlers = {
            seccomp_filter.SOCKET: self._socket,
            seccomp_filter.CONNECT: self._connect,
            seccomp_filter.ACCEPT4: self._accept4,
            seccomp_filter.ACCEPT: self._accept,
            seccomp_filter.GETSOCKNAME: self._getsockname,
            seccomp_filter.GETPEERNAME: self._getpeername,
            seccomp_filter.BIND: self._bind,
            seccomp_filter.LISTEN: self._listen,
        }
        return {numbers[name]: handler for name, handler in handlers.items()}

    @property
    def listeners(self) -> Dict[int, int]:
        """Pod port to host port of all that other pods may reach."""
        return self._ports.published

    def dial(self, ip: int, port: int, source_ip: int, done: OnDialled) -> None:
        """Connect to a pod, this one or another, as source_ip; done(socket, 0) or done(None, errno)."""
        self._connecting.dial(ip, port, source_ip, done)

    def _mirrored(self, claim: Claim) -> None:
        """Somebody came through the pod's own namespace: a 32-bit program."""
        try:
            caller, name = claim.mirror.accept() if claim.mirror is not None else (None, ("", 0))
        except OSError:
            return
        if caller is None:
            return
        self.counts["relayed"] += 1
        target, source = (addresses.number(_four(each[0])) for each in (caller.getsockname(), name))

        def dialled(made: Optional[socket.socket], _code: int) -> None:
            from slurmlet.podnet.socket_relay import Relay
            from slurmlet.podnet.socket_relay import reset as refuse

            if made is None:
                refuse(caller)
            else:
                Relay(self._loop, caller, made)

        self._connecting.dial(target, claim.port, source, dialled)

    def close(self) -> None:
        """Give up what is held for the pod's programs; their sockets stay theirs."""
        mine = (self._ports, self._accepting, self._connecting, self._processes, self._journal)
        for part in (self._native, *mine):
            if part is not None:
                part.close()
        for listener in self._listeners.values():
            self._loop.forget(listener.fd)
            os.close(listener.fd)
        self._listeners.clear()
        for fd in self._spare_fds.values():
            os.close(fd)
        self._spare.clear()
        self._spare_fds.clear()

    # Notifications.

    def add_listener(self, notify_fd: int, on_gone: Callable[[], None]) -> None:
        """Serve a filter until the last process that has it is gone; the descriptor is ours from now on."""
        listener = Listener(notify_fd)
        for raw in self._journal.unanswered(listener):
            self._serve(decode(listener, raw))
        self._listeners[notify_fd] = listener
        if self._native is None or not self._native.watch(listener, lambda: self._ended(listener, on_gone)):
            self._loop.reading(notify_fd, lambda: self._notified(listener, on_gone))

    def _ended(self, listener: Listener, on_gone: Callable[[], None]) -> None:
        self._loop.forget(listener.fd)
        del self._listeners[listener.fd]
        os.close(listener.fd)
        on_gone()

    def _notified(self, listener: Listener, on_gone: Callable[[], None]) -> None:
        if not self._loop.events & select.EPOLLIN:
            self._ended(listener, on_gone)
            return
        raw = listener.receive()
        if raw is not None:
            self._received(raw)
            self._serve(decode(listener, raw))

    def _serve(self, call: Call) -> None:
        try:
            if call.arch == self._arch:
                self._handlers[call.nr](call)
            else:
                self._compat.serve(call)
        except Exception as error:
            # One call must not end the network of a pod, and the next netd would only meet it again.
            import traceback

            traceback.print_exc()
            self.counts["failed"] += 1
            call.answer((error.errno if isinstance(error, OSError) else 0) or errno.EIO)

    def _subject(self, call: Call, counted: str) -> Tuple[int, Any]:
        """A copy of the socket that a call is about, and what is known of it; -1 and None where the call is answered."""
        fd = self._copy(call)
        sock = self._known(call, fd) if fd >= 0 else None
        if sock is None:
            return -1, None
        self.counts[counted] += 1
        return fd, sock

    def _copy(self, call: Call) -> int:
        fd = self._processes.descriptor(call.pid, call.a0)
        if fd < 0:
            call.answer(-fd)
        return fd

    def _known(self, call: Call, fd: int) -> Any:
        """The host socket behind a copy; lets the kernel go on (and closes the copy) where it is another kind of thing."""
        cookie = self._kernel.cookie(fd)
        if self._native is not None:
            self._native.forget(cookie)
        sock = self._table.get(cookie)
        if sock is not None:
            return sock
        family = self._kernel.tcp_family(fd) if cookie else 0
        if not family:
            self.counts["not ours"] += 1
            call.proceed()
            os.close(fd)
            return None
        sock = Socket(cookie, family)
        if self._kernel.raw_peer(fd):
            sock.phase = CONNECTED
        self._table.add(sock)
        return sock

    # socket().

    def _socket(self, call: Call) -> None:
        self.counts["socket"] += 1
        kind = call.a0 << 16 | (call.a1 & socket.SOCK_NONBLOCK)
        spare = self._spare.get(kind)
        try:
            sock = spare.pop() if spare else self._make(kind)
        except OSError as error:
            call.answer(error.errno or errno.EAFNOSUPPORT)
            return
        fd = self._spare_fds.pop(sock.cookie)
        error_number = call.give(fd, call.a1 & socket.SOCK_CLOEXEC)
        if error_number:
            call.answer(error_number)
        else:
            self._table.add(sock)
        os.close(fd)
        if not spare:
            self._loop.soon(lambda: self._prepare(kind))

    def _make(self, kind: int) -> Socket:
        family, flag = kind >> 16, kind & socket.SOCK_NONBLOCK
        made = socket.socket(family, socket.SOCK_STREAM | flag, socket.IPPROTO_TCP)
        made.setblocking(not flag)
        fd = made.detach()
        sock = Socket(self._kernel.cookie(fd), family)
        self._spare_fds[sock.cookie] = fd
        return sock

    def _prepare(self, kind: int) -> None:
        spare = self._spare.setdefault(kind, [])
        try:
            while len(spare) < _SPARE:
                spare.append(self._make(kind))
        except OSError:
            # Out of descriptors: the next socket() will say so.
            pass

    # bind(), listen().

    def _bind(self, call: Call) -> None:
        fd, sock = self._subject(call, "bind")
        if sock is not None:
            error = self._bound(call, fd, sock)
            sock.undelivered = not call.answer(error) and not error
            os.close(fd)

    def _bound(self, call: Call, fd: int, sock: Socket) -> int:
        if not 2 <= call.a2 <= _MAX_ADDRESS_BYTES:
            return errno.EINVAL
        raw = self._processes.read(call.pid, call.a1, call.a2)
        if raw is None:
            return errno.EFAULT
        address = addresses.decode(raw)
        if address is None:
            return errno.EINVAL
        if address.family != sock.family:
            return errno.EAFNOSUPPORT if sock.family == socket.AF_INET else errno.EINVAL
        if sock.claim is not None or sock.phase != FRESH:
            delivered, sock.undelivered = sock.undelivered, False
            return 0 if delivered and sock.phase == FRESH else errno.EINVAL
        sock.claim, error = self._ports.claim(fd, sock.cookie, sock.family, address)
        return error

    def _listen(self, call: Call) -> None:
        fd, sock = self._subject(call, "listen")
        if sock is not None:
            call.answer(self._listening(fd, sock, _word.unpack(struct.pack("=I", call.a1 & 0xFFFFFFFF))[0]))
            os.close(fd)

    def _listening(self, fd: int, sock: Socket, backlog: int) -> int:
        if sock.phase == LISTENING:
            return self._kernel.listen(fd, backlog)
        if sock.phase != FRESH:
            return errno.EINVAL
        if sock.claim is None:
            anywhere = addresses.SockAddr(
                sock.family, addresses.ANY, 0, bytes(16) if sock.family == socket.AF_INET6 else b""
            )
            sock.claim, error = self._ports.claim(fd, sock.cookie, sock.family, anywhere)
            if sock.claim is None:
                return error
        error = self._ports.open(fd, sock.claim, backlog)
        if not error:
            sock.phase = LISTENING
            self._journal.listens(sock.claim)
        return error

    # connect(), accept().

    def _connect(self, call: Call) -> None:
        fd, sock = self._subject(call, "connect")
        if sock is not None:
            self._connecting.connect(call, fd, sock)

    def _accept(self, call: Call) -> None:
        # The fourth argument is accept4's.
        self._accept4(call._replace(a3=0))

    def _accept4(self, call: Call) -> None:
        fd, sock = self._subject(call, "accept")
        if sock is not None:
            self._accepting.accept(call, fd, sock, call.a3)

    # Names.

    def _getsockname(self, call: Call) -> None:
        fd, sock = self._subject(call, "getsockname")
        if sock is not None:
            self._write(call, self._local(fd, sock))
            os.close(fd)

    def _local(self, fd: int, sock: Socket) -> bytes:
        if sock.port:
            return sock.local()
        if sock.claim is not None:
            return sock.claim.name()
        raw = self._kernel.raw_name(fd)
        address = addresses.decode(raw)
        # The host's addresses are not the pod's.
        if address is None or not address.ip or address.ip == addresses.ANY:
            return raw
        ip = address.ip if addresses.is_loopback(address.ip) else self._setup.ip
        return addresses.encode(sock.family, ip, address.port)

    def _getpeername(self, call: Call) -> None:
        fd, sock = self._subject(call, "getpeername")
        if sock is not None:
            raw = self._kernel.raw_peer(fd)
            if raw:
                self._write(call, sock.peer() if sock.peer_port else raw)
            else:
                call.answer(errno.ENOTCONN)
            os.close(fd)

    def _write(self, call: Call, name: bytes) -> None:
        """The answer of getsockname() and getpeername(): as much as the program has room for, and how much there was."""
        raw = self._processes.read(call.pid, call.a2, 4)
        room = -1 if raw is None else _word.unpack(raw)[0]
        if raw is None:
            call.answer(errno.EFAULT)
        elif room < 0:
            call.answer(errno.EINVAL)
        else:
            written = self._processes.write(call.pid, call.a1, name[:room], call.a2, _size(len(name)))
            call.answer(0 if written else errno.EFAULT)


def _four(host: str) -> str:
    """An address of the pod as IPv4: a mapped one, or ::1."""
    if ":" not in host:
        return host
    return host[7:] if host.startswith("::ffff:") else "127.0.0.1"
