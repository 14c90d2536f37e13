"""What a netd that was killed leaves to the next one: listeners, names of connections, calls that still wait.

Existing connections need nothing of it (they are the kernel's), but a program that asks for a name, or a server that
sits in accept(), must not notice. A file on tmpfs that is only appended to, and written anew when most of it is old.
Losing the last names is harmless; a call that nobody answers would hang for ever, so those are written at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from typing import Callable, Dict, List, NamedTuple, Optional

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.fast import live_sockets
from slurmlet.podnet.fast.native import native_records as records
from slurmlet.podnet.fast.pod_listeners import Claim, Ports
from slurmlet.podnet.fast.seccomp_notify import NOTIFICATION_BYTES, Call, Listener, encode
from slurmlet.podnet.fast.socket_names import CONNECTED, CONNECTING, LISTENING, Socket, Table

_NAME, _LISTENER, _CALL, _RECORDS = b"n", b"l", b"c", b"r"
# How many records of the library follow.
_count = struct.Struct("=I")
# cookie, family, ::1, ip, port, peer's ip, peer's port
_name = struct.Struct("=QHBIHIH")
# cookie, inode, family, IPv4 address served (or that of none), port, host port, flags, address as written
_listener = struct.Struct("=QQHIHHB16s")
_NO_FOUR = 0xFFFFFFFF
_SIX, _REUSE_ADDRESS, _REUSE_PORT, _CHOSEN, _HAS_RAW = 1, 2, 4, 8, 16
_SIZES = {_NAME: _name.size, _LISTENER: _listener.size, _CALL: NOTIFICATION_BYTES}
_FLUSH_S = 0.05
_COMPACT_BYTES = 1 << 20
_number = struct.Struct("=Q").unpack_from


class _Found(NamedTuple):
    names: Dict[int, bytes]
    listeners: Dict[int, bytes]
    calls: List[bytes]


class Journal:
    def __init__(self, loop: Loop, path: str, table: Table, ports: Ports) -> None:
        self._loop, self._path, self._table, self._ports = loop, path, table, ports
        self._found = _read(path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._written_bytes = 0
        self._pending: List[bytes] = []
        self._unnamed: List[Socket] = []
        self._flushing: Optional[Timer] = None
        slot = os.open(path + ".now", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(slot, mmap.PAGESIZE)
        # The call being handled: memory, because it is written for each one. It outlives a killed process.
        self._now = mmap.mmap(slot, mmap.PAGESIZE)
        os.close(slot)
        for at in range(0, mmap.PAGESIZE - NOTIFICATION_BYTES, NOTIFICATION_BYTES):
            self._found.calls.append(bytes(self._now[at : at + NOTIFICATION_BYTES]))
        # The calls that wait, for a journal written anew.
        self.waiting: List[Callable[[], List[Call]]] = []
        table.on_swept = self._compact_if_old

    @property
    def slots(self) -> mmap.mmap:
        """First the call being handled, then calls that wait elsewhere than in Python."""
        return self._now

    def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        os.close(self._fd)
        with contextlib.suppress(BufferError):
            self._now.close()

    # Writing.

    def received(self, raw: bytes) -> None:
        self._now[:NOTIFICATION_BYTES] = raw

    def waits(self, call: Call) -> None:
        self._pending.append(_CALL + encode(call))
        self._flush()

    def named(self, sock: Socket) -> None:
        self._unnamed.append(sock)
        if self._flushing is None:
            self._flushing = self._loop.later(_FLUSH_S, self._flush_names)

    def did(self, records: bytes) -> None:
        """What the library did, as it wrote it."""
        self._pending.append(_block(records))
        if self._flushing is None:
            self._flushing = self._loop.later(_FLUSH_S, self._flush_names)

    def listens(self, claim: Claim) -> None:
        self._pending.append(_LISTENER + _packed_listener(claim))
        self._flush()

    def _flush_names(self) -> None:
        self._flushing = None
        self._pending += [_NAME + _packed_name(each) for each in self._unnamed if each.port]
        self._unnamed.clear()
        self._flush()

    def _flush(self) -> None:
        data = b"".join(self._pending)
        self._pending.clear()
        self._written_bytes += len(data)
        os.write(self._fd, data)

    def _compact_if_old(self) -> None:
        if self._written_bytes >= _COMPACT_BYTES:
            self._compact()

    def _compact(self) -> None:
        written = [_LISTENER + _packed_listener(each) for each in self._ports.listening()]
        written += [_NAME + _packed_name(each) for each in self._table.all() if each.port]
        written.append(_block(self._table.unread()))
        written += [_CALL + encode(call) for calls in self.waiting for call in calls()]
        fresh = os.open(
            self._path + ".new", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        os.write(fresh, b"".join(written))
        os.rename(self._path + ".new", self._path)
        os.close(self._fd)
        self._fd, self._written_bytes = fresh, 0
        self._pending.clear()

    # Reading.

    def restore(self) -> None:
        """Know again what an earlier netd knew; what is gone since is left out."""
        found = self._found
        if found.listeners:
            living = live_sockets.living(live_sockets.LISTENING)
            for cookie, raw in found.listeners.items():
                self._restore_listener(raw, cookie in living)
        if found.names:
            established = live_sockets.living(live_sockets.CONNECTED & ~live_sockets.SYN_SENT)
            under_way = live_sockets.living(live_sockets.SYN_SENT)
            for cookie, raw in found.names.items():
                if cookie in established or cookie in under_way:
                    self._restore_name(raw, CONNECTED if cookie in established else CONNECTING)
        self._compact()

    def unanswered(self, listener: Listener) -> List[bytes]:
        """Calls of this filter that an earlier netd took and never answered."""
        return [raw for raw in dict.fromkeys(self._found.calls) if listener.valid(_number(raw)[0])]

    def _restore_name(self, raw: bytes, phase: str) -> None:
        cookie, family, six, ip, port, peer_ip, peer_port = _name.unpack(raw)
        sock = Socket(cookie, family)
        sock.named(ip, port, peer_ip, peer_port, bool(six))
        sock.phase = phase
        # The kernel does not look at it while a connection is under way, but wants one.
        sock.target = addresses.encode(family, addresses.LOOPBACK, 1)
        self._table.add(sock)

    def _restore_listener(self, raw: bytes, alive: bool) -> None:
        cookie, inode, family, four, port, host_port, flags, written = _listener.unpack(raw)
        claim = Claim(cookie, family, None if four == _NO_FOUR else four, bool(flags & _SIX), port)
        claim.inode, claim.chosen = inode, bool(flags & _CHOSEN)
        claim.raw = written if flags & _HAS_RAW else b""
        claim.reuse_address, claim.reuse_port = bool(flags & _REUSE_ADDRESS), bool(flags & _REUSE_PORT)
        self._ports.restore(claim, host_port, alive)
        if alive:
            sock = Socket(cookie, family)
            sock.claim, sock.phase = claim, LISTENING
            self._table.add(sock)


def _packed_name(sock: Socket) -> bytes:
    return _name.pack(sock.cookie, sock.family, sock.six, sock.ip, sock.port, sock.peer_ip, sock.peer_port)


def _packed_listener(claim: Claim) -> bytes:
    flags = _SIX * claim.six | _REUSE_ADDRESS * claim.reuse_address | _REUSE_PORT * claim.reuse_port
    flags |= _CHOSEN * claim.chosen | _HAS_RAW * bool(claim.raw)
    four = _NO_FOUR if claim.four is None else claim.four
    head = (claim.cookie, claim.inode, claim.family, four, claim.port, claim.host_port)
    return _listener.pack(*head, flags, claim.raw)


def _block(raw: bytes) -> bytes:
    return _RECORDS + _count.pack(len(raw) // records.RECORD_BYTES) + raw


def _read_records(data: bytes, at: int, names: Dict[int, bytes]) -> int:
    """Where the next one begins; past the end for one that was being written."""
    if at + _count.size > len(data):
        return len(data)
    start = at + _count.size
    end = start + int(_count.unpack_from(data, at)[0]) * records.RECORD_BYTES
    if end <= len(data):
        for each in records.read(data[start:end]):
            if each.kind == records.FAILED:
                names.pop(each.cookie, None)
            else:
                ends = (each.ip, each.port, each.peer_ip, each.peer_port)
                names[each.cookie] = _name.pack(each.cookie, each.family, False, *ends)
    return end


def _read(path: str) -> _Found:
    found = _Found({}, {}, [])
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return found
    at = 0
    while at < len(data):
        kind = data[at : at + 1]
        if kind == _RECORDS:
            at = _read_records(data, at + 1, found.names)
            continue
        size = _SIZES.get(kind, 0)
        body = data[at + 1 : at + 1 + size]
        if not size or len(body) < size:
            # The last record of a process that was killed while it wrote.
            break
        if kind == _CALL:
            found.calls.append(body)
        else:
            (found.names if kind == _NAME else found.listeners)[_number(body)[0]] = body
        at += 1 + size
    return found
