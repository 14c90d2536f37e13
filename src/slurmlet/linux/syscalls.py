"""The few Linux calls Python 3.9 does not have, through libc. Nothing here knows what a pod is."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from signal import SIGCHLD

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


CLONE_NEWNS = 0x00020000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_SLAVE = 32, 4096, 16384, 1 << 19
MNT_DETACH = 2

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    _check(_libc().unshare(flags), "unshare")


def fork_into(namespaces: int) -> int:
    """As os.fork(), but the child finds itself in new namespaces, as PID 1 where a PID namespace is among them."""
    # Like pivot_root below: a number of each machine's own.
    number = {"x86_64": 56, "aarch64": 220, "ppc64le": 120}.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"no clone known for {os.uname().machine}")
    # libc knows no fork with flags. Python does not mind, if it is told before and after as its own os.fork() tells it.
    python = ctypes.PyDLL(None, use_errno=True)
    python.PyOS_BeforeFork()
    pid = int(python.syscall(number, namespaces | SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        python.PyOS_AfterFork_Child()
        return 0
    python.PyOS_AfterFork_Parent()
    _check(min(pid, 0), "clone")
    return pid


def setns(fd: int, kind: int) -> None:
    _check(_libc().setns(fd, kind), "setns")


def mount(source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
    arguments = [os.fsencode(source), os.fsencode(target), os.fsencode(kind)]
    result = _libc().mount(*arguments, ctypes.c_ulong(flags), os.fsencode(options) if options else None)
    _check(result, f"mount {kind or source} on {target}")


def unmount(target: str, flags: int = MNT_DETACH) -> None:
    _check(_libc().umount2(os.fsencode(target), flags), f"umount {target}")


def unmount_below(directory: str) -> None:
    """Everything mounted below a directory, the last first; what refuses is left to the end of the namespace."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
        points = [_unescape(line.split()[4]) for line in file]
    for point in reversed(points):
        if point.startswith(directory + "/"):
            try:
                unmount(point)
            except OSError:
                pass


def _unescape(path: str) -> str:
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, char)
    return path


def bind(source: str, target: str, read_only: bool = False) -> None:
    mount(source, target, "", MS_BIND | MS_REC)
    if read_only:
        mount(source, target, "", MS_BIND | MS_REMOUNT | MS_RDONLY | _locked_flags(target))


def read_only_below(path: str) -> None:
    """This mount and every mount below it (Linux 5.12; ENOSYS on older ones)."""
    # struct mount_attr: attr_set = MOUNT_ATTR_RDONLY, the rest zero. The number is the same on every machine.
    attributes = (1).to_bytes(8, sys.byteorder) + bytes(24)
    result = _libc().syscall(
        _MOUNT_SETATTR,
        _AT_FDCWD,
        os.fsencode(path),
        _AT_RECURSIVE,
        attributes,
        ctypes.c_size_t(len(attributes)),
    )
    _check(result, f"mount_setattr of {path}")


def _locked_flags(path: str) -> int:
    """Flags of the file system below that a user namespace may not take away in a remount."""
    seen = os.statvfs(path).f_flag
    return seen & (MS_NOSUID | MS_NODEV | MS_NOEXEC | 1024 | 2048)


def pivot_root(new_root: str, put_old: str) -> None:
    # Not in every libc; the number of the system call differs by machine.
    number = {"x86_64": 155, "aarch64": 41, "ppc64le": 203}.get(os.uname().machine)
    if number is None:
        raise OSError(f"no pivot_root known for {os.uname().machine}")
    _check(_libc().syscall(number, os.fsencode(new_root), os.fsencode(put_old)), "pivot_root")


def die_with_parent(signal_number: int) -> None:
    _check(_libc().prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def forbid_inspection() -> None:
    """No process of the same user may read our memory or descriptors (the pod's key is in them)."""
    _check(_libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def last_capability() -> int:
    """The highest that this kernel knows; a runtime refuses names beyond it."""
    try:
        with open("/proc/sys/kernel/cap_last_cap", encoding="utf-8") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 37  # AUDIT_READ: every kernel with unprivileged user namespaces has it


def set_name(name: str) -> None:
    """What `ps` calls this process, 15 characters of it."""
    _check(_libc().prctl(_PR_SET_NAME, os.fsencode(name), 0, 0, 0), "prctl")
