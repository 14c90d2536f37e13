"""The shared library made of netfast.c: whether it may be loaded, and its functions as ctypes sees them.

It runs inside netd, which holds the cluster's key: a file that anybody else could have written is never loaded. Whatever
is wrong with it (another machine's, an older libc here, a file system without exec), netd works in Python.
"""

from __future__ import annotations

import ctypes
import os
import platform
import stat
from typing import Any, Optional

NAME = f"netfast-{platform.machine()}.so"
# Version, sizes of struct event and struct record: what fastpath.py reads is what netfast.c writes.
ABI = 3 << 16 | 136 << 8 | 32
OFF = "SLURMLET_NO_NATIVE"

_number, _long, _int, _at = ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int, ctypes.c_void_p
_FUNCTIONS = {
    "netfast_new": (_at, [_number, _number, ctypes.c_char_p, _int, _int, _at, _number, _at, _int]),
    "netfast_free": (None, [_at]),
    "netfast_state": (_at, [_at]),
    "netfast_fd": (_int, [_at]),
    "netfast_run": (_int, [_at, _at, _int]),
    "netfast_watch": (_int, [_at, _int]),
    "netfast_outer": (_int, [_at, _int]),
    "netfast_check": (None, [_at]),
    "netfast_receive": (_int, [_at]),
    "netfast_sender": (_long, [_at]),
    "netfast_claim": (_int, [_at, *[_number] * 3, _at]),
    "netfast_expect": (None, [_at, *[_number] * 7]),
    "netfast_forget": (None, [_at, _long]),
    "netfast_listener": (_int, [_at, _long, _int, _number]),
    "netfast_busy": (None, [_at, _long, _int]),
    "netfast_holding": (None, [_at, _int]),
    "netfast_policy": (None, [_at, _int, _int]),
    "netfast_ranges": (None, [_at, *[_number] * 4]),
    "netfast_peer": (_int, [_at, _number, _number, _number, _number, _number]),
    "netfast_service": (_int, [_at, _number, _number, _number, _number, _at]),
}


def available(directory: str) -> str:
    """The library in this directory, or "" where there is none that may be loaded."""
    path = os.path.join(directory, NAME)
    try:
        found = os.stat(path)
    except OSError:
        return ""
    ours = found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode)
    return path if ours and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) else ""


def load(directory: str) -> Optional[Any]:
    path = "" if os.environ.get(OFF) or not directory else available(directory)
    if not path:
        return None
    try:
        library = ctypes.CDLL(path)
        if library.netfast_abi() != ABI:
            return None
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError):
        return None
    return library
