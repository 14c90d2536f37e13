"""The seccomp filter of a pod: which calls netd is asked about, and the few that are refused outright.

It must never ask about a call of the data path (read, write, send, recv, epoll, close): those stay the kernel's own.
A 32-bit program's own sockets are in the pod's network namespace and go the slow path. But it may hold a socket of the host,
which a 64-bit process left or sent to it, so netd is asked about its calls too (compat_calls.py). Programs of x32, which
nobody has, get no network.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List, Optional, Tuple


SOCKET, BIND, LISTEN, CONNECT, ACCEPT, ACCEPT4 = "socket", "bind", "listen", "connect", "accept", "accept4"
GETSOCKNAME, GETPEERNAME, SOCKETCALL = "getsockname", "getpeername", "socketcall"
# Asked about whatever their arguments are: a filter sees numbers, not what kind of socket a descriptor is.
_ALWAYS = (CONNECT, ACCEPT4, ACCEPT, GETSOCKNAME, GETPEERNAME, BIND, LISTEN)
# Refused with some arguments, free with others.
_BY_ARGUMENTS = ("sendto", "sendmsg", "sendmmsg", "setsockopt")

# socketcall()'s first argument; the others lie in memory, where a filter cannot look. Those that make or take a connection,
# or could make one (fast open), are asked about.
SOCKETCALLS = {
    **{BIND: 2, CONNECT: 3, LISTEN: 4, ACCEPT: 5, "sendto": 11, "setsockopt": 14, "sendmsg": 16, ACCEPT4: 18},
    "sendmmsg": 20,
}

_ALLOW, _NOTIFY, _ERRNO = 0x7FFF0000, 0x7FC00000, 0x00050000
_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_MSG_FASTOPEN, _TCP_FASTOPEN_CONNECT, _IPPROTO_MPTCP = 0x20000000, 30, 262
_SOCK_TYPE_MASK, _SO_NETNS_COOKIE = 0xF, 71
_X32_BIT = 0x40000000

# BPF: load a word of seccomp_data, mask, jump if equal / greater or equal / any bit set, return.
_LD, _AND, _JEQ, _JGE, _JSET, _RET = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_NR, _ARCH = 0, 4


class Compat(Record):
    """The numbers of 32-bit programs on the same machine; SOCKETCALL where there is one number for them all, besides."""

    audit_arch: int
    numbers: Dict[str, int]


class Machine(Record):
    audit_arch: int
    seccomp: int
    numbers: Dict[str, int]
    compat: Compat
    # Of all that x32 programs can do with a socket; empty where there is no x32.
    x32: Tuple[int, ...] = ()


_MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        317,
        {
            **{SOCKET: 41, CONNECT: 42, ACCEPT: 43, "sendto": 44, "sendmsg": 46, BIND: 49, LISTEN: 50},
            **{GETSOCKNAME: 51, GETPEERNAME: 52, "setsockopt": 54, ACCEPT4: 288, "sendmmsg": 307},
            "io_uring_setup": 425,
        },
        Compat(
            0x40000003,
            {
                **{SOCKETCALL: 102, "sendmmsg": 345, BIND: 361, CONNECT: 362, LISTEN: 363},
                **{ACCEPT4: 364, "setsockopt": 366, "sendto": 369, "sendmsg": 370, "io_uring_setup": 425},
            },
        ),
        # socket() to getsockopt(), accept4(), recvmmsg(), sendmmsg(), io_uring_setup(); those that differ from x86_64's.
        (*range(41, 56), 288, 299, 307, 425, *(517, 518, 519, 537, 538, 541, 542)),
    ),
    "aarch64": Machine(
        0xC00000B7,
        277,
        {
            **{SOCKET: 198, CONNECT: 203, ACCEPT: 202, "sendto": 206, "sendmsg": 211, BIND: 200, LISTEN: 201},
            **{GETSOCKNAME: 204, GETPEERNAME: 205, "setsockopt": 208, ACCEPT4: 242, "sendmmsg": 269},
            "io_uring_setup": 425,
        },
        Compat(
            0x40000028,
            {
                **{BIND: 282, CONNECT: 283, LISTEN: 284, ACCEPT: 285, "sendto": 290},
                **{"setsockopt": 294, "sendmsg": 296, ACCEPT4: 366, "sendmmsg": 374, "io_uring_setup": 425},
            },
        ),
    ),
}


def machine(name: Optional[str] = None) -> Machine:
    """Raises OSError where nobody has written down the numbers: such a pod goes the slow path."""
    found = _MACHINES.get(name or os.uname().machine)
    if found is None:
        raise OSError(errno.ENOTSUP, f"{name or os.uname().machine} programs are not supported")
    return found


def missing() -> str:
    """What this node lacks for the fast path, or "". Tries it, in a fork, with the caller's own privileges."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        try:
            # As old as the way to hand out a socket as the answer to a call: Linux 5.14.
            sock.getsockopt(socket.SOL_SOCKET, _SO_NETNS_COOKIE, 8)
        except OSError:
            return f"the fast path needs Linux 5.14 or newer, this is {os.uname().release}"
    pid = os.fork()
    if pid == 0:
        code = 255
        try:
            install()
            code = 0
        except OSError as error:
            code = min(error.errno or 255, 255)
        finally:
            os._exit(code)
    code = os.WEXITSTATUS(os.waitpid(pid, 0)[1])
    return "" if code == 0 else f"seccomp notifications are not available here ({os.strerror(code)})"


def install(from_host: bool = False) -> int:
    """Filter this process and all it will start; the descriptor that netd must serve from now on.

    For a forked child with CAP_SYS_ADMIN in its user namespace: so no_new_privs is not needed, and setuid programs of
    the image go on working. Without somebody serving the descriptor the next socket() waits for ever. The filter is the
    same for a pod without a network namespace: its UDP is the host's, and DNS goes by TCP there. `from_host`: for a pod
    that has the host's network and only wants to reach pods and Services.
    """
    known = machine()
    code = program_from_host(known) if from_host else program(known)
    memory = ctypes.create_string_buffer(code, len(code))
    # struct sock_fprog: how many, padding, where.
    prog = struct.pack("@HxxxxxxP", len(code) // 8, ctypes.addressof(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    fd = int(libc.syscall(known.seccomp, _SET_MODE_FILTER, _NEW_LISTENER, prog))
    if fd < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp filter with a listener: {os.strerror(number)}")
    return fd


def _argument(index: int) -> int:
    """Where the low word of an argument lies; both machines are little-endian."""
    return 16 + 8 * index


class _Assembler:
    """Instructions with jumps to names, which BPF itself does not have."""

    def __init__(self) -> None:
        self._lines: List[Tuple[int, int, str, str]] = []
        self._places: Dict[str, int] = {}

    def add(self, code: int, value: int, yes: str = "", no: str = "") -> None:
        self._lines.append((code, value, yes, no))

    def place(self, name: str) -> None:
        self._places[name] = len(self._lines)

    def assembled(self) -> bytes:
        return b"".join(
            struct.pack("=HBBI", code, self._distance(at, yes), self._distance(at, no), value)
            for at, (code, value, yes, no) in enumerate(self._lines)
        )

    def _distance(self, at: int, name: str) -> int:
        return self._places[name] - at - 1 if name else 0


def program_from_host(known: Machine) -> bytes:
    asm = _Assembler()
    asm.add(_LD, _ARCH)
    asm.add(_JEQ, known.audit_arch, "", "allow")
    asm.add(_LD, _NR)
    asm.add(_JEQ, known.numbers[CONNECT], "notify")
    asm.add(_JEQ, known.numbers[GETPEERNAME], "notify")
    asm.place("allow")
    asm.add(_RET, _ALLOW)
    asm.place("notify")
    asm.add(_RET, _NOTIFY)
    return asm.assembled()


def program(known: Machine) -> bytes:
    numbers, asm = known.numbers, _Assembler()
    asm.add(_LD, _ARCH)
    asm.add(_JEQ, known.audit_arch, "", "other machine")
    asm.add(_LD, _NR)
    asm.add(_JGE, _X32_BIT, "x32")
    for name in _ALWAYS:
        asm.add(_JEQ, numbers[name], "notify")
    for name in (SOCKET, *_BY_ARGUMENTS):
        asm.add(_JEQ, numbers[name], name)
    # It makes and uses sockets without any system call that a filter could see.
    asm.add(_JEQ, numbers["io_uring_setup"], "no such call", "allow")
    _compat_rules(asm, known)
    _socket_rules(asm)
    # Data with the first packet would connect a socket without connect().
    for name, argument in (("sendto", 3), ("sendmsg", 2), ("sendmmsg", 3)):
        asm.place(name)
        asm.add(_LD, _argument(argument))
        asm.add(_JSET, _MSG_FASTOPEN, "not supported", "allow")
    asm.place("setsockopt")
    asm.add(_LD, _argument(1))
    asm.add(_JEQ, socket.IPPROTO_TCP, "", "allow")
    asm.add(_LD, _argument(2))
    asm.add(_JEQ, _TCP_FASTOPEN_CONNECT, "no such option", "allow")
    endings = {
        "allow": _ALLOW,
        "notify": _NOTIFY,
        "no such call": _ERRNO | errno.ENOSYS,
        "not supported": _ERRNO | errno.EOPNOTSUPP,
        "no such option": _ERRNO | errno.ENOPROTOOPT,
        "no such protocol": _ERRNO | errno.EPROTONOSUPPORT,
    }
    for name, action in endings.items():
        asm.place(name)
        asm.add(_RET, action)
    return asm.assembled()


def _compat_rules(asm: _Assembler, known: Machine) -> None:
    numbers = known.compat.numbers
    asm.place("x32")
    asm.add(_AND, ~_X32_BIT & 0xFFFFFFFF)
    for number in known.x32:
        asm.add(_JEQ, number, "no such call")
    asm.add(_RET, _ALLOW)
    asm.place("other machine")
    asm.add(_JEQ, known.compat.audit_arch, "", "no such call")
    asm.add(_LD, _NR)
    for name in _ALWAYS:
        if name in numbers:
            asm.add(_JEQ, numbers[name], "notify")
    for name in _BY_ARGUMENTS:
        asm.add(_JEQ, numbers[name], name)
    asm.add(_JEQ, numbers["io_uring_setup"], "no such call")
    if SOCKETCALL in numbers:
        asm.add(_JEQ, numbers[SOCKETCALL], "", "allow")
        asm.add(_LD, _argument(0))
        for number in SOCKETCALLS.values():
            asm.add(_JEQ, number, "notify")
    asm.add(_RET, _ALLOW)


def _socket_rules(asm: _Assembler) -> None:
    asm.place(SOCKET)
    asm.add(_LD, _argument(0))
    asm.add(_JEQ, socket.AF_INET, "internet")
    asm.add(_JEQ, socket.AF_INET6, "internet", "allow")
    asm.place("internet")
    asm.add(_LD, _argument(1))
    asm.add(_AND, _SOCK_TYPE_MASK)
    asm.add(_JEQ, socket.SOCK_STREAM, "", "allow")
    asm.add(_LD, _argument(2))
    asm.add(_JEQ, 0, "notify")
    asm.add(_JEQ, socket.IPPROTO_TCP, "notify")
    # Go and others ask for MPTCP first and take TCP where there is none. The rest (SCTP) is the slow path's.
    asm.add(_JEQ, _IPPROTO_MPTCP, "no such protocol", "allow")
