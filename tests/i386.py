"""System calls as a 32-bit program makes them (`int 0x80`), from a 64-bit Python: no compiler, no second C library.

SOURCE is a program's beginning, for tests that run it elsewhere; `load()` is the same here.
"""

from __future__ import annotations

import os
import signal
from typing import Any

SOURCE = r'''
import ctypes, socket, struct

# push rbx; eax, ebx, ecx, edx, esi, edi from the six arguments of a C function; int 0x80; pop rbx; ret
_CODE = bytes.fromhex("53" "89f8" "89f3" "87ca" "4489c6" "4489cf" "cd80" "5b" "c3")
_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
# Private, anonymous, below 4 GiB: where a 32-bit pointer leads.
_low = _libc.mmap(None, 8192, 7, 0x62, -1, 0)
ctypes.memmove(_low, _CODE, len(_CODE))
_call = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint] * 6)(_low)
_next = 4096

BIND, CONNECT, LISTEN, ACCEPT4, SENDTO, IO_URING_SETUP, SOCKET, SOCKETCALL = 361, 362, 363, 364, 369, 425, 359, 102
SETSOCKOPT = 366
FASTOPEN = 0x20000000

def put(data):
    """Where it lies now, for a pointer."""
    global _next
    at = _low + _next
    _next += len(data) + 15 & ~15
    ctypes.memmove(at, data, len(data))
    return at

def call(number, *arguments):
    """What the kernel said: a result, or minus an errno."""
    return _call(number, *[each & 0xffffffff for each in arguments], *[0] * (5 - len(arguments)))

def socketcall(number, *arguments):
    return call(SOCKETCALL, number, put(struct.pack(f"={len(arguments)}I", *[each & 0xffffffff for each in arguments])))

def address(host, port):
    return put(struct.pack("=H", socket.AF_INET) + port.to_bytes(2, "big") + socket.inet_aton(host) + bytes(8))
'''


def load() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    return names


def missing() -> str:
    """Why this machine has no such calls, or ""."""
    if os.uname().machine != "x86_64":
        return "i386 calls are x86_64's"
    pid = os.fork()
    if pid == 0:
        # A kernel without them answers with SIGSEGV.
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os._exit(load()["call"](20) != os.getpid())
    return "" if os.waitpid(pid, 0)[1] == 0 else "this kernel takes no calls of i386 programs"
