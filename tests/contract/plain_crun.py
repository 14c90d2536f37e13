# ruff: noqa: PTH103, PTH108, PTH110, PTH112, PTH114, PTH118, PTH119, PTH120, PTH123, PTH211
"""As much of crun as a runner asks for, where no crun is installed: `run`, `exec` and `delete`, detached.

A container is a mount namespace and a changed root. The programs in it are this machine's: its /usr is bound over that of
the image. No users, no capabilities, no system call filter.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import socket
import struct
import sys
import termios
from typing import Any, NoReturn

from slurmlet.linux import syscalls

_CLONE_NEWUTS = 0x04000000
_DEVICES = ("null", "zero", "full", "random", "urandom")
_WHOLE_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in (
        "root",
        "log",
        "log-format",
        "cgroup-manager",
        "bundle",
        "process",
        "pid-file",
        "console-socket",
    ):
        parser.add_argument(f"--{name}")
    for name in ("detach", "force"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("verb", choices=("run", "exec", "delete"))
    parser.add_argument("id")
    options = parser.parse_args(argv)
    known = os.path.join(options.root, options.id)
    if options.verb == "delete":
        os.unlink(known)
        return 0
    if options.verb == "run":
        with open(os.path.join(options.bundle, "config.json")) as file:
            config = json.load(file)
        pid, problem = _start(options, config["process"], lambda: _enter_new(config))
        if pid:
            with open(known, "w") as file:
                file.write(str(pid))
    else:
        with open(known) as file:
            root = f"/proc/{file.read()}/root"
        with open(options.process) as file:
            process = json.load(file)
        pid, problem = _start(options, process, lambda: os.chroot(root))
    if problem:
        with open(options.log, "w") as file:
            json.dump({"level": "error", "msg": problem}, file)
        return 1
    with open(options.pid_file, "w") as file:
        file.write(str(pid))
    return 0


def _start(options: Any, process: dict[str, Any], enter: Any) -> tuple[int, str]:
    """(pid, "") of a process that has become its program, or (0, why it did not)."""
    failed, failing = os.pipe2(os.O_CLOEXEC)
    console = socket.socket(socket.AF_UNIX) if options.console_socket else None
    if console is not None:
        # By a directory's descriptor: the path may be longer than a socket's name can be.
        directory = os.open(os.path.dirname(options.console_socket), os.O_PATH | os.O_CLOEXEC)
        console.connect(f"/proc/self/fd/{directory}/{os.path.basename(options.console_socket)}")
    pid = os.fork()
    if pid == 0:
        try:
            _become(process, enter, console)
        except OSError as error:
            os.write(failing, f"{process['args'][0]}: {error.strerror or error}".encode())
        finally:
            os._exit(127)
    os.close(failing)
    with os.fdopen(failed, "rb") as answer:
        problem = answer.read().decode()
    return (0, problem) if problem else (pid, "")


def _become(process: dict[str, Any], enter: Any, console: socket.socket | None) -> NoReturn:
    enter()
    os.setsid()
    if console is not None:
        _take_terminal(process, console)
    os.chdir(process["cwd"])
    os.execvpe(process["args"][0], process["args"], dict(each.split("=", 1) for each in process["env"]))


def _take_terminal(process: dict[str, Any], console: socket.socket) -> None:
    master, slave = os.openpty()
    size = process.get("consoleSize") or {"height": 24, "width": 80}
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size["height"], size["width"], 0, 0))
    socket.send_fds(console, [b"terminal"], [master])
    fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(slave, number)


def _enter_new(config: dict[str, Any]) -> None:
    root = config["root"]["path"]
    syscalls.unshare(syscalls.CLONE_NEWNS | _CLONE_NEWUTS)
    syscalls.mount("none", "/", "", syscalls.MS_REC | syscalls.MS_SLAVE)
    socket.sethostname(config["hostname"])
    for path in _WHOLE_SYSTEM:
        # Where /bin is a link to usr/bin here, it is one in the image too.
        if os.path.isdir(path) and not os.path.islink(path):
            _bind(path, root + path, [])
    for mount in config["mounts"]:
        _mount(mount, root + mount["destination"])
    if config["root"]["readonly"]:
        syscalls.mount(
            "none", root, "", syscalls.MS_REMOUNT | syscalls.MS_BIND | syscalls.MS_RDONLY | syscalls.MS_NODEV
        )
    os.chroot(root)


def _mount(mount: dict[str, Any], target: str) -> None:
    if mount["type"] == "devpts":
        os.makedirs(target)
        syscalls.mount("devpts", target, "devpts", 0, "newinstance,ptmxmode=0666,mode=0620")
    elif mount["destination"] == "/dev":
        os.makedirs(target, exist_ok=True)
        syscalls.mount("tmpfs", target, "tmpfs", syscalls.MS_NOSUID)
        for name in _DEVICES:
            _bind(f"/dev/{name}", f"{target}/{name}", [])
        os.symlink("pts/ptmx", f"{target}/ptmx")
        os.symlink("/proc/self/fd", f"{target}/fd")
    elif mount["type"] == "proc":
        # There is no PID namespace of the container's own, so the sandbox's is what it would see.
        _bind("/proc", target, [])
    else:
        _bind(mount["source"], target, mount["options"])


def _bind(source: str, target: str, options: list[str]) -> None:
    os.makedirs(target if os.path.isdir(source) else os.path.dirname(target), exist_ok=True)
    if not os.path.isdir(source) and not os.path.exists(target):
        open(target, "w").close()
    syscalls.bind(source, target, "ro" in options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
