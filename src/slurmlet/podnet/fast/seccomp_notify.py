"""Seccomp's notifications: receiving them, answering them, and reaching into the process that waits for the answer.

Every trapped call comes through here, so buffers are made once and nothing is looked at twice. A process may be killed or
interrupted at any moment: then answers find nobody (`False`), and memory and descriptors cannot be had (`None`, an errno).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from collections import OrderedDict
from typing import Any, NamedTuple, Optional


def _ioctl(direction: int, number: int, size_bytes: int) -> int:
    return direction << 30 | size_bytes << 16 | 0x21 << 8 | number


_WRITE, _BOTH = 1, 3
_RECV, _SEND = _ioctl(_BOTH, 0, 80), _ioctl(_BOTH, 1, 24)
_ID_VALID, _ADDFD = _ioctl(_WRITE, 2, 8), _ioctl(_WRITE, 3, 24)
_SET_FLAGS, _SYNC_WAKE_UP = _ioctl(_WRITE, 4, 8), 1
_CONTINUE, _ADDFD_SEND = 1, 2
NOTIFICATION_BYTES = 80
_EMPTY = bytes(NOTIFICATION_BYTES)
_notification = struct.Struct("=QIIiIQQQQQQQ")
_unpack = _notification.unpack
_new: Any = tuple.__new__
_answer = struct.Struct("=QqiI").pack
_addfd = struct.Struct("=QIIII").pack
_number = struct.Struct("=Q").pack
_iovecs = struct.Struct("@PNPN")

_PIDFD_OPEN, _PIDFD_GETFD = 434, 438
_PIDFD_THREAD = os.O_EXCL
# Processes come and go; a pidfd is cheap, but descriptors are counted.
_MAX_PIDFDS = 256
_MAX_ADDRESS_BYTES = 128
_FEW_PROCESSORS = 4


def share_a_processor() -> bool:
    """Whether a program and netd are to take turns on one; where there are many, each has its own."""
    return len(os.sched_getaffinity(0)) <= _FEW_PROCESSORS


class Listener:
    """The other end of one filter."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd
        # Linux 6.6: program and netd wake each other on one processor. With few of them that saves waking up another
        # (1.5 times the connections per second on two); with 16 idle ones it cost several threads a third.
        if share_a_processor():
            with contextlib.suppress(OSError):
                fcntl.ioctl(fd, _SET_FLAGS, _SYNC_WAKE_UP)

    def receive(self) -> Optional[bytes]:
        """One notification; None when its process has gone since. Blocks unless the descriptor was found readable."""
        try:
            return fcntl.ioctl(self.fd, _RECV, _EMPTY)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                return None
            raise

    def valid(self, number: int) -> bool:
        """Whether the call still waits for our answer."""
        try:
            fcntl.ioctl(self.fd, _ID_VALID, _number(number))
        except OSError:
            return False
        return True


class Call(NamedTuple):
    """One call of a program, waiting. Exactly one answer must follow."""

    listener: Listener
    number: int
    pid: int
    flags: int
    nr: int
    arch: int
    instruction: int
    a0: int
    a1: int
    a2: int
    a3: int
    a4: int
    a5: int

    def answer(self, error: int = 0) -> bool:
        """Return 0, or fail with this errno; False when nobody waits any more."""
        try:
            fcntl.ioctl(self.listener.fd, _SEND, _answer(self.number, 0, -error, 0))
        except OSError:
            return False
        return True

    def proceed(self) -> bool:
        """Let the kernel do what the program asked."""
        try:
            fcntl.ioctl(self.listener.fd, _SEND, _answer(self.number, 0, 0, _CONTINUE))
        except OSError:
            return False
        return True

    def give(self, fd: int, cloexec: int) -> int:
        """Return a copy of our descriptor; 0, or the errno (ENOENT: nobody waits; EMFILE: the program has no room)."""
        try:
            fcntl.ioctl(
                self.listener.fd,
                _ADDFD,
                _addfd(self.number, _ADDFD_SEND, fd, 0, os.O_CLOEXEC if cloexec else 0),
            )
        except OSError as error:
            return error.errno or errno.EIO
        return 0

    @property
    def waits(self) -> bool:
        return self.listener.valid(self.number)


def decode(listener: Listener, raw: bytes) -> Call:
    # Not through Call's own constructor, which is three times as slow: this is done for every trapped call.
    call: Call = _new(Call, (listener, *_unpack(raw)))
    return call


def encode(call: Call) -> bytes:
    return _notification.pack(*call[1:])


class Processes:
    """Descriptors and memory of the pod's processes. Needs CAP_SYS_PTRACE in their user namespace, which netd has."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._syscall = libc.syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_long, ctypes.c_long]
        self._pidfds: OrderedDict[int, int] = OrderedDict()
        self._by_thread = True
        self._readv, self._writev = libc.process_vm_readv, libc.process_vm_writev
        for call in (self._readv, self._writev):
            call.restype = ctypes.c_ssize_t
            call.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong, ctypes.c_void_p]
            call.argtypes += [ctypes.c_ulong, ctypes.c_ulong]
        self._local, self._remote = (ctypes.create_string_buffer(_iovecs.size) for _ in range(2))
        self._local_at, self._remote_at = (ctypes.addressof(each) for each in (self._local, self._remote))
        self._bytes = bytearray(2 * _MAX_ADDRESS_BYTES)
        self._bytes_at = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))

    def close(self) -> None:
        while self._pidfds:
            os.close(self._pidfds.popitem()[1])

    def descriptor(self, pid: int, fd: int) -> int:
        """A copy of a thread's descriptor, or minus an errno."""
        pidfd = self._pidfds.get(pid)
        if pidfd is not None:
            copy = self._syscall(_PIDFD_GETFD, pidfd, fd, 0)
            if copy >= 0:
                return int(copy)
            if ctypes.get_errno() != errno.ESRCH:
                return -ctypes.get_errno()
            # Another process has this number by now.
            os.close(self._pidfds.pop(pid))
        pidfd = self._open(pid)
        if pidfd < 0:
            return pidfd
        copy = self._syscall(_PIDFD_GETFD, pidfd, fd, 0)
        return int(copy) if copy >= 0 else -ctypes.get_errno()

    def _open(self, pid: int) -> int:
        pidfd = self._syscall(_PIDFD_OPEN, pid, _PIDFD_THREAD, 0) if self._by_thread else -1
        if pidfd < 0 and (not self._by_thread or ctypes.get_errno() == errno.EINVAL):
            # Before Linux 6.9 there are pidfds of processes only.
            self._by_thread = False
            pidfd = self._syscall(_PIDFD_OPEN, process_of(pid), 0, 0)
        if pidfd < 0:
            return -ctypes.get_errno()
        if len(self._pidfds) >= _MAX_PIDFDS:
            os.close(self._pidfds.popitem(last=False)[1])
        self._pidfds[pid] = int(pidfd)
        return int(pidfd)

    def read(self, pid: int, address: int, size_bytes: int) -> Optional[bytes]:
        """Up to 128 bytes, or None where the process has no such memory."""
        _iovecs.pack_into(self._local, 0, self._bytes_at, size_bytes, 0, 0)
        _iovecs.pack_into(self._remote, 0, address, size_bytes, 0, 0)
        got = self._readv(pid, self._local_at, 1, self._remote_at, 1, 0)
        if got == size_bytes:
            return bytes(self._bytes[:size_bytes])
        if got < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
            return _read_file(pid, address, size_bytes)
        return None

    def write(self, pid: int, address: int, data: bytes, address2: int, data2: bytes) -> bool:
        """Two places at once."""
        first, second = len(data), len(data2)
        self._bytes[: first + second] = data + data2
        at = self._bytes_at
        _iovecs.pack_into(self._local, 0, at, first, at + first, second)
        _iovecs.pack_into(self._remote, 0, address, first, address2, second)
        done = self._writev(pid, self._local_at, 2, self._remote_at, 2, 0)
        if done < 0 and ctypes.get_errno() in (errno.ENOSYS, errno.EPERM):
            return _write_file(pid, address, data) and _write_file(pid, address2, data2)
        return bool(done == first + second)


def process_of(thread: int) -> int:
    """The process a thread belongs to; the thread's own number where that cannot be told."""
    try:
        with open(f"/proc/{thread}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("Tgid:"):
                    return int(line.split()[1])
    except OSError:
        pass
    return thread


# Kernels can be built without process_vm_readv.


def _read_file(pid: int, address: int, size_bytes: int) -> Optional[bytes]:
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            found = os.pread(file.fileno(), size_bytes, address)
    except (OSError, OverflowError):
        return None
    return found if len(found) == size_bytes else None


def _write_file(pid: int, address: int, data: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
            return os.pwrite(file.fileno(), data, address) == len(data)
    except (OSError, OverflowError):
        return False
