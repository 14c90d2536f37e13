"""Faked success of calls that one mapped uid cannot do, for a runtime built without seccomp (our static runc).

crun gets the same rules in the bundle (seccomp.profile). runc is started by us, so a filter on our own process,
inherited by all we start, does the same; with a single mapping the runner itself never needs any of these calls.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import List, Tuple

_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
_ALLOW, _SUCCEED = 0x7FFF0000, 0x00050000  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with errno 0
_LOAD, _AND, _EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x06
_S_IFMT, _S_IFCHR, _S_IFBLK = 0o170000, 0o020000, 0o060000

# Machine -> (audit architecture, calls to fake, [(mknod call, index of its mode)]). The calls, in this order where they
# exist: chown fchown lchown fchownat setuid setgid setreuid setregid setgroups setresuid setresgid setfsuid setfsgid.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        (92, 93, 94, 260, 105, 106, 113, 114, 116, 117, 119, 122, 123),
        ((133, 1), (259, 2)),
    ),
    "aarch64": (0xC00000B7, (55, 54, 146, 144, 145, 143, 159, 147, 149, 151, 152), ((33, 2),)),
}
Instruction = Tuple[int, int, int, int]


def fake_for_all_children() -> bool:
    """False on a machine whose call numbers are not known here: then such calls fail as the kernel has it."""
    program = filter_for(os.uname().machine)
    if not program:
        return False
    code = b"".join(struct.pack("=HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.create_string_buffer(header, len(header)), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
    return True


def filter_for(machine: str) -> List[Instruction]:
    """Classic BPF over struct seccomp_data: number at 0, architecture at 4, arguments of 8 bytes from 16."""
    if machine not in _MACHINES:
        return []
    architecture, calls, mknods = _MACHINES[machine]
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    succeed: Instruction = (_RETURN, 0, 0, _SUCCEED)
    program: List[Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), allow, (_LOAD, 0, 0, 0)]
    for number in calls:
        program += [(_EQUAL, 0, 1, number), succeed]
    for number, argument in mknods:
        # Only devices: FIFOs and plain files are made as asked.
        program += [
            (_EQUAL, 0, 6, number),
            (_LOAD, 0, 0, 16 + 8 * argument),
            (_AND, 0, 0, _S_IFMT),
            (_EQUAL, 1, 0, _S_IFCHR),
            (_EQUAL, 0, 1, _S_IFBLK),
            succeed,
            allow,
        ]
    return [*program, allow]
