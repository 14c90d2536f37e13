"""The first process of a PID namespace that a pod's containers share (shareProcessNamespace): waits, reaps, no more.

Containers can look into it through /proc/1, so it must have nothing to show: an empty root, no open files, no working
directory of the host, and (sandbox.forbid_inspection is inherited by the fork) no readable memory.
"""

from __future__ import annotations

import os
import signal

from slurmlet.linux import syscalls
from slurmlet.runner.host.child_processes import Children


def start_pause(children: Children, empty_dir: str, name: str) -> str:
    """Start it and return a path of its PID namespace: `name`, a file that the namespace is bound to.

    Not /proc/<pid>/ns/pid: nobody may look into the pause, the runtime no more than a container.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    children.begin_start()
    middle = os.fork()
    if middle == 0:
        _become_parent_of_pause(empty_dir, name, writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        said = answer.read()
    children.adopt(middle, lambda _code, _signal: None)
    children.end_start()
    if said != b"ready":
        raise OSError(f"no shared PID namespace: {said.decode(errors='replace') or 'no answer'}")
    return name


def _become_parent_of_pause(empty_dir: str, name: str, writer: int) -> None:
    """unshare(CLONE_NEWPID) is for children to come, so a process in between is needed; the pause goes to PID 1."""
    try:
        signal.set_wakeup_fd(-1)
        syscalls.unshare(syscalls.CLONE_NEWPID)
        ready, done = os.pipe2(os.O_CLOEXEC)
        pid = os.fork()
        if pid == 0:
            _pause(empty_dir, done)
        os.close(done)
        problem = os.read(ready, 4096)
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        syscalls.bind("/proc/self/ns/pid_for_children", name)
        os.write(writer, problem or b"ready")
    except OSError as error:
        os.write(writer, str(error).encode())
    finally:
        os._exit(0)


def _pause(empty_dir: str, done: int) -> None:
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        # The kernel reaps for a process that ignores SIGCHLD.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        syscalls.unshare(syscalls.CLONE_NEWNS)
        syscalls.mount(
            "tmpfs", empty_dir, "tmpfs", syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
        )
        os.chdir(empty_dir)
        syscalls.pivot_root(".", ".")
        syscalls.unmount(".")
        os.chdir("/")
        os.closerange(0, done)
        os.closerange(done + 1, 4096)
    except OSError as error:
        os.write(done, str(error).encode())
        os._exit(1)
    os.close(done)
    while True:
        signal.pause()
