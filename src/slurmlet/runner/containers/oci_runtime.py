"""Containers through an OCI runtime: crun where the node has it, else a static runc that slurmlet brought along.

The runtime only makes and joins namespaces. It never waits for a container: it is told to detach, and the process it
leaves behind becomes ours (children.py), so the exit status is exact.
"""

from __future__ import annotations

import json
import os
import socket

from slurmlet.linux import syscalls
from slurmlet.linux.programs import find_program
from slurmlet.linux.record import Record
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.image_unpack import remove_tree
from slurmlet.runner.host.sandbox import SINGLE, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Protocol, Tuple

    from slurmlet.runner.host.child_processes import OnExit

    OnStarted = Callable[[int, int, str], None]

    class Runtime(Protocol):
        name: str

        def run(self, container_id: str, config: Dict[str, Any], start: Start) -> None: ...

        def execute(self, container_id: str, process: Dict[str, Any], start: Start) -> None: ...

        def delete(self, container_id: str) -> None: ...


# (pid, pty master or -1, "") or (0, -1, what went wrong)


class Start(Record):
    """How a process is to be started: its descriptors, or a terminal (then stdio is not used)."""

    stdio: Tuple[int, int, int]
    tty: bool
    on_started: OnStarted
    on_exit: OnExit


_RUNC_NEEDS_ROOT = (
    "runc cannot run a container as a user other than root where you have a single uid; "
    "ask for crun on the compute nodes, or for subordinate uids (/etc/subuid)"
)


class NoRuntime(Exception):
    """The node has neither crun nor a runc of ours."""


def find_runtime(cluster_dir: str) -> str:
    # Ours before the node's: it is known to work.
    for path in (find_program("crun"), os.path.join(cluster_dir, "bin", "runc"), find_program("runc")):
        if path and os.path.isabs(path) and os.access(path, os.X_OK):
            return path
    raise NoRuntime("no container runtime on this node: neither crun nor a runc that `slurmlet up` provided")


class OciRuntime:
    def __init__(
        self,
        children: Children,
        executable: str,
        state_dir: str,
        mapping: Mapping,
        enter: Optional[Callable[[], None]] = None,
    ) -> None:
        self._children = children
        # Where the runtime itself is to be: containers inherit its network.
        self._enter = enter
        self._executable = executable
        self._state_dir = state_dir
        self._count = 0
        self.name = "crun" if "crun" in os.path.basename(executable) else "runc"
        os.makedirs(os.path.join(state_dir, "root"), exist_ok=True)
        if self.name == "crun":
            _hide_hybrid_cgroups()
        elif mapping.kind == SINGLE:
            from slurmlet.runner.containers.fake_syscalls import fake_for_all_children

            fake_for_all_children()

    def run(self, container_id: str, config: Dict[str, Any], start: Start) -> None:
        bundle = os.path.join(self._state_dir, container_id)
        os.makedirs(bundle, exist_ok=True)
        if self.name == "runc":
            if "uidMappings" in config["linux"]:
                start.on_started(0, -1, _RUNC_NEEDS_ROOT)
                return
            # Built without seccomp; the filter on ourselves does it (pretending.py).
            config["linux"].pop("seccomp", None)
        _write_json(os.path.join(bundle, "config.json"), config)
        self._start(["run", "--detach", "--bundle", bundle], [container_id], start)

    def execute(self, container_id: str, process: Dict[str, Any], start: Start) -> None:
        path = self._fresh("process")
        _write_json(path, process)
        self._start(["exec", "--detach", "--process", path], [container_id], start, clean=[path])

    def delete(self, container_id: str) -> None:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        bundle = os.path.join(self._state_dir, container_id)
        argv = [*self._base(), "delete", "--force", container_id]
        self._children.spawn(argv, lambda _code, _signal: remove_tree(bundle), stdio=(null, null, null))
        os.close(null)

    def _base(self) -> List[str]:
        argv = [self._executable, "--root", os.path.join(self._state_dir, "root")]
        return [*argv, "--cgroup-manager=disabled"] if self.name == "crun" else argv

    def _fresh(self, what: str) -> str:
        self._count += 1
        return os.path.join(self._state_dir, f"{what}.{self._count}")

    def _start(
        self, verb: List[str], last: List[str], start: Start, clean: Optional[List[str]] = None
    ) -> None:
        log, pid_file = self._fresh("log"), self._fresh("pid")
        files = [log, pid_file, *(clean or [])]
        console = _Console(self._fresh("tty")) if start.tty else None
        argv = [*self._base(), "--log", log, "--log-format", "json", *verb, "--pid-file", pid_file]
        if console is not None:
            argv += ["--console-socket", console.path]

        def left(code: int, _signal: int) -> None:
            error, pid, master = "", 0, -1
            try:
                if code:
                    error = _explain(log, code)
                else:
                    with open(pid_file, encoding="utf-8") as file:
                        pid = int(file.read())
                    master = console.take() if console is not None else -1
            except (OSError, ValueError) as problem:
                error = error or f"{self.name}: {problem}"
            self._finish(start, pid, master, error, files, console)

        self._children.begin_start()
        try:
            self._children.spawn([*argv, *last], left, stdio=start.stdio, enter=self._enter)
        except OSError as problem:
            self._finish(start, 0, -1, str(problem), files, console)

    def _finish(
        self, start: Start, pid: int, master: int, error: str, files: List[str], console: Optional[_Console]
    ) -> None:
        if console is not None:
            console.close()
        for path in files:
            try:
                os.unlink(path)
            except FileNotFoundError:
                pass
        start.on_started(0 if error else pid, master, error)
        if pid:
            self._children.adopt(pid, start.on_exit)
        self._children.end_start()


def _hide_hybrid_cgroups() -> None:
    """crun refuses to start in the hybrid layout, even when told to leave cgroups alone."""
    if os.path.isdir("/sys/fs/cgroup/unified"):
        flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC | syscalls.MS_RDONLY
        syscalls.mount("none", "/sys/fs/cgroup", "tmpfs", flags)


class _Console:
    """The socket over which a runtime hands us the master of a container's terminal."""

    def __init__(self, path: str) -> None:
        self.path = path
        # Scratch paths can be longer than the 108 bytes of a socket's name; crun has a way around that of its own.
        directory = os.open(os.path.dirname(path), os.O_PATH | os.O_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"/proc/self/fd/{directory}/{os.path.basename(path)}")
        os.close(directory)
        self._socket.listen(1)
        self._socket.settimeout(5)

    def take(self) -> int:
        """The runtime has sent before it left, so this does not wait."""
        connection, _ = self._socket.accept()
        with connection:
            connection.settimeout(5)
            _, fds, _, _ = socket.recv_fds(connection, 4096, 1)
        if not fds:
            raise OSError("the runtime sent no terminal")
        os.set_inheritable(fds[0], False)
        os.set_blocking(fds[0], False)
        return int(fds[0])

    def close(self) -> None:
        self._socket.close()
        os.unlink(self.path)


def _explain(log: str, code: int) -> str:
    try:
        with open(log, encoding="utf-8", errors="replace") as file:
            lines = [line for line in file.read().splitlines() if line.strip()]
    except OSError:
        lines = []
    for line in reversed(lines):
        try:
            return str(json.loads(line)["msg"])
        except (ValueError, KeyError, TypeError):
            return line
    return f"the runtime ended with {code} and said nothing"


def _write_json(path: str, value: Dict[str, Any]) -> None:
    with open(path, "w", encoding="utf-8") as file:
        json.dump(value, file)
