"""Boot one host: a program of its own (standard library only) that becomes the init of fresh namespaces.

Started by hosts.py with a JSON description on stdin; prints the pid of the host's init and ends. Every mount happens in
the new mount namespace, after propagation is cut, so nothing ever shows (or stays) on the machine.

    stdin: {name, root, binds: [[source, target, read_only]…], scratch_bytes, machine_proc, marker: [name, value]}
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_NEWNS, _NEWUTS, _NEWIPC, _NEWPID, _NEWNET = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT = 1, 2, 4, 8, 32
_BIND, _REC, _PRIVATE = 4096, 16384, 1 << 18
_DETACH = 2
_DEVICES = {
    "null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0),
    # Distributions give these two to everybody by udev rules.
    "net/tun": (10, 200), "fuse": (10, 229),
}  # fmt: skip
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "ptmx": "pts/ptmx"}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(
    source: str, target: str, kind: str | None = None, flags: int = 0, data: str | None = None
) -> None:
    encoded = [None if value is None else value.encode() for value in (source, target, kind, data)]
    _check(
        _libc.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3]),
        f"mount {kind or source} on {target}",
    )


def _bind(source: str, target: str, read_only: bool) -> None:
    _mount(source, target, None, _BIND | _REC)
    if read_only:
        _mount("none", target, None, _BIND | _REMOUNT | _RDONLY)


def _fill_dev(dev: str, gpus: int) -> None:
    _mount("dev", dev, "tmpfs", _NOSUID, "mode=755")
    for folder in ("net", "shm", "pts", "mqueue"):
        Path(dev, folder).mkdir()
    for name, (major, minor) in _DEVICES.items():
        os.mknod(f"{dev}/{name}", stat.S_IFCHR | 0o666, os.makedev(major, minor))
    for number in range(gpus):
        os.mknod(f"{dev}/nvidia{number}", stat.S_IFCHR | 0o666, os.makedev(*_DEVICES["null"]))
    for name, target in _LINKS.items():
        Path(dev, name).symlink_to(target)
    _mount("devpts", f"{dev}/pts", "devpts", _NOSUID | _NOEXEC, "newinstance,ptmxmode=0666,mode=620,gid=5")
    _mount("shm", f"{dev}/shm", "tmpfs", _NOSUID | _NODEV, "mode=1777")
    _mount("mqueue", f"{dev}/mqueue", "mqueue", _NOSUID | _NODEV | _NOEXEC)


def _fill_root(plan: dict[str, Any]) -> None:
    root = plan["root"]
    _mount("none", "/", None, _REC | _PRIVATE)
    _bind(root, root, True)
    _fill_dev(f"{root}/dev", plan["gpus"])
    _mount("tmp", f"{root}/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={plan['scratch_bytes']}")
    _mount("vartmp", f"{root}/var/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=1777,size={plan['scratch_bytes']}")
    _mount("run", f"{root}/run", "tmpfs", _NOSUID | _NODEV, "mode=755")
    _mount("root", f"{root}/root", "tmpfs", _NOSUID | _NODEV, "mode=700")
    Path(root, "run/old").mkdir()
    for source, target, read_only in plan["binds"]:
        _bind(source, root + target, read_only)
    _mount("sysfs", f"{root}/sys", "sysfs", _NOSUID | _NODEV | _NOEXEC)
    try:
        _mount("cgroup2", f"{root}/sys/fs/cgroup", "cgroup2", _NOSUID | _NODEV | _NOEXEC)
    except OSError:
        pass  # a machine without cgroup v2: Slurm here needs none
    if plan["machine_proc"]:
        _bind("/proc", f"{root}/proc", False)
    else:
        _mount("proc", f"{root}/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
        # Everybody may ping, as on any current distribution. Belongs to this network namespace alone.
        Path(root, "proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647")


def _enter_root(root: str) -> None:
    _check(_libc.pivot_root(root.encode(), f"{root}/run/old".encode()), "pivot_root")
    os.chdir("/")
    _check(_libc.umount2(b"/run/old", _DETACH), "umount of the machine's root")
    Path("/run/old").rmdir()


def _become_init(plan: dict[str, Any]) -> None:
    """Runs as pid 1 of the new namespaces."""
    os.setsid()
    os.umask(0)  # device nodes get the mode they are given
    socket.sethostname(plan["name"])
    _fill_root(plan)
    _enter_root(plan["root"])
    os.umask(0o022)
    null = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    name, value = plan["marker"]
    # tini reaps what daemons leave behind; sleep is only there to give it a child.
    os.execve(  # noqa: S606 - that there is no shell is the point
        "/usr/bin/tini",
        ["tini", "--", "sleep", "infinity"],
        {name: value, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
    )


def _forked(child: Callable[[], None]) -> int:
    """Fork; the pid once the child has become another program, or the error it met on the way."""
    reading, writing = os.pipe()  # closed by the exec: silence means success
    pid = os.fork()
    if pid == 0:
        try:
            child()
        except BaseException as error:
            os.write(writing, str(error).encode() or b"unknown error")
        os._exit(1)
    os.close(writing)
    problem = b""
    while part := os.read(reading, 4096):
        problem += part
    if problem:
        os.waitpid(pid, 0)
        raise SystemExit(problem.decode(errors="replace"))
    return pid


def main() -> None:
    plan = json.load(sys.stdin)
    _check(_libc.unshare(_NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET), "unshare")
    print(_forked(lambda: _become_init(plan)))


if __name__ == "__main__":
    main()
