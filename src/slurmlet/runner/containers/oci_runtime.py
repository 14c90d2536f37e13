"""Containers through an OCI runtime: crun where the node has it, else a static runc that slurmlet brought along.

The runtime only makes and joins namespaces. It never waits for a container: it is told to detach, and the process it
leaves behind becomes ours (children.py), so the exit status is exact.
"""

from __future__ import annotations

import json
import os
import signal
import socket

from slurmlet.linux import syscalls
from slurmlet.linux.programs import find_program
from slurmlet.linux.record import Record
from slurmlet.runner.containers import container_user, oci_bundle
from slurmlet.runner.containers.container_runtime import CONFIG_ERROR, CREATE_ERROR, SECCOMP, SELINUX, USERS
from slurmlet.runner.containers.oom import score_above_own
from slurmlet.runner.containers.root_overlay import Roots
from slurmlet.runner.host.child_processes import Children
from slurmlet.runner.host.image_unpack import find_unpacked, remove_tree, unpack_once
from slurmlet.runner.host.sandbox import SINGLE, Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional

    from slurmlet.protocol.pod_plan import ContainerPlan
    from slurmlet.protocol.pod_report import RunningUser
    from slurmlet.runner.containers.container_runtime import OnCreated, Start
    from slurmlet.runner.volumes.pod_volumes import Mount


_NO_FILTER = (
    "this node has no crun, and the runtime brought along cannot filter calls; use type Unconfined, or ask for crun on "
    "the compute nodes"
)
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


class PodNamespaces(Record):
    """What the containers of a pod share, made before the first of them."""

    mapping: Mapping
    hostname: str
    # Where the pod's one /dev/shm and /dev/mqueue lie.
    ipc_dir: str = ""
    # /proc/<pid>/ns/pid of the pod's shared PID namespace, or "" for one of each container's own.
    pid: str = ""
    # Of the pod's own network namespace, or "" for the host's.
    sysfs: str = ""
    # Brings a process to where the runtime is to be: containers inherit its network.
    enter: Optional[Callable[[], None]] = None


class _Created:
    """One run of a container, from create to delete."""

    def __init__(self, plan: ContainerPlan, facts: oci_bundle.Facts, run_dir: str) -> None:
        self.plan, self.facts, self.run_dir = plan, facts, run_dir
        self.started = False
        # Of the first process while it lives. We alone reap it, so nobody else can have the number.
        self.pid = 0


class OciRuntime:
    """A ContainerRuntime. `images` is where images lie unpacked on this node."""

    def __init__(
        self, children: Children, executable: str, state_dir: str, images: str, pod: PodNamespaces
    ) -> None:
        self._children, self._executable, self._state_dir = children, executable, state_dir
        self._images, self._pod = images, pod
        self._roots = Roots(children)
        self._created: Dict[str, _Created] = {}
        self._count = 0
        self.name = "crun" if "crun" in os.path.basename(executable) else "runc"
        self.lacks: Dict[str, str] = {}
        if os.path.exists("/sys/fs/selinux/enforce"):
            self.lacks[SELINUX] = "a user cannot choose SELinux labels; remove it"
        os.makedirs(os.path.join(state_dir, "root"), exist_ok=True)
        if self.name == "crun":
            _hide_hybrid_cgroups()
            return
        self.lacks[SECCOMP] = _NO_FILTER
        if pod.mapping.kind == SINGLE:
            from slurmlet.runner.containers.fake_syscalls import fake_for_all_children

            self.lacks[USERS] = _RUNC_NEEDS_ROOT
            fake_for_all_children()

    # From an image to a root.

    def create(self, container_id: str, plan: ContainerPlan, run_dir: str, on_created: OnCreated) -> None:
        def with_tree(tree: Any, error: str) -> None:
            if error:
                on_created(error, CREATE_ERROR)
            else:
                self._roots.make(tree, run_dir, with_root)

        def with_root(root: str, error: str) -> None:
            reason = CREATE_ERROR
            try:
                if not error:
                    self._created[container_id] = _Created(plan, self._find_facts(plan, root), run_dir)
            except (container_user.Unmapped, oci_bundle.NotHonoured) as problem:
                error, reason = str(problem), CONFIG_ERROR
            except (OSError, container_user.UnknownUser) as problem:
                error = str(problem)
            if error:
                self._roots.drop(run_dir)
            on_created(error, reason if error else "")

        mapping = self._pod.mapping
        tree = find_unpacked(plan["image_dir"], self._images, mapping)
        if tree:
            with_tree(tree, "")
        else:
            self._children.call(lambda: unpack_once(plan["image_dir"], self._images, mapping), with_tree)

    def _find_facts(self, plan: ContainerPlan, root: str) -> oci_bundle.Facts:
        pod = self._pod
        user = container_user.resolve(root, plan["user"])
        container_user.check_mapped(user, pod.mapping)
        if USERS in self.lacks and oci_bundle.nested(user):
            raise oci_bundle.NotHonoured(f"securityContext.runAsUser: {self.lacks[USERS]}")
        shared = oci_bundle.pid_namespace(plan, pod.pid)
        return oci_bundle.Facts(
            root, user, pod.mapping, pod.hostname, [], shared, pod.ipc_dir, score_above_own(), pod.sysfs
        )

    # Processes.

    def start(self, container_id: str, mounts: List[Mount], start: Start) -> None:
        created = self._created[container_id]
        created.started, created.facts = True, created.facts._replace(mounts=mounts)

        def started(pid: int, master: int, error: str) -> None:
            created.pid = pid
            start.on_started(pid, master, error)

        def exited(code: int, number: int) -> None:
            created.pid = 0
            start.on_exit(code, number)

        bundle = os.path.join(self._state_dir, container_id)
        os.makedirs(bundle, exist_ok=True)
        config = oci_bundle.make(created.plan, created.facts)
        if self.name == "runc":
            # Built without seccomp; the filter on ourselves does it (fake_syscalls.py).
            config["linux"].pop("seccomp", None)
        _write_json(os.path.join(bundle, "config.json"), config)
        watched = start._replace(on_started=started, on_exit=exited)
        self._start(["run", "--detach", "--bundle", bundle], [container_id], watched)

    def exec(self, container_id: str, argv: List[str], start: Start) -> None:
        created = self._created.get(container_id)
        if created is None:
            start.on_started(0, -1, "the container has ended")
            return
        process = oci_bundle.process(created.plan, created.facts, argv, start.tty)
        if start.size is not None:
            process["consoleSize"] = {"height": start.size[0], "width": start.size[1]}
        path = self._fresh("process")
        _write_json(path, process)
        self._start(["exec", "--detach", "--process", path], [container_id], start, clean=[path])

    def signal(self, container_id: str, number: int) -> None:
        created = self._created.get(container_id)
        if created is None or not created.pid:
            return
        if number == signal.SIGKILL and created.facts.pid_namespace:
            for other in _sharing_mounts(created.pid):
                _kill(other, number)
        _kill(created.pid, number)

    def user(self, container_id: str) -> RunningUser:
        return oci_bundle.identity(self._created[container_id].facts)

    def delete(self, container_id: str) -> None:
        created = self._created.pop(container_id, None)
        if created is None:
            return
        self._roots.drop(created.run_dir)
        if not created.started:
            return
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
            self._children.spawn([*argv, *last], left, stdio=start.stdio, enter=self._pod.enter)
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


def _kill(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def _sharing_mounts(pid: int) -> List[int]:
    """With a shared PID namespace the end of a container's first process does not end the others; they are found by
    their mount namespace, which is the container's own."""
    try:
        own = os.readlink(f"/proc/{pid}/ns/mnt")
    except OSError:
        return []
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != pid and os.readlink(f"/proc/{name}/ns/mnt") == own:
                found.append(int(name))
        except OSError:
            continue
    return found


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
