"""What the pod's containers use: CPU time and memory from /proc, room on disk from a walk. Asked for by the hub.

A job's containers have no cgroup of their own, so their processes are added up: a process belongs to the container
whose mount namespace it is in, or to that of its parent. The look is taken in a fork: a memory map of many gigabytes or
a tree of many files must not hold up the loop. Imported only when somebody asks.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.pod.pod_lifecycle import Lifecycle

if TYPE_CHECKING:
    from slurmlet.protocol.pod_report import ContainerUsage, PodUsage, Space

# A walk that takes longer tells nothing rather than something wrong.
_WALK_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Running(NamedTuple):
    """One running container, as far as a look at it needs it."""

    name: str
    pid: int
    started_at: str
    upper: str
    logs: str


class Usage:
    def __init__(self, context: PodContext, lifecycle: Lifecycle) -> None:
        self._context, self._lifecycle = context, lifecycle
        # The most a run has been seen to use. What an ended `exec` used goes to us, not to the container's first
        # process, so the sum over the living can fall; a counter must not.
        self._most: Dict[Tuple[str, str], float] = {}

    def ask(self, disk: bool, on_answer: Callable[[Optional[PodUsage]], None]) -> None:
        running = self._running()
        volumes = self._empty_dirs() if disk else {}

        def done(answer: Optional[PodUsage], error: str) -> None:
            on_answer(None if error or answer is None else self._never_less(answer))

        self._context.children.call(lambda: look(running, volumes, disk=disk), done)

    def _running(self) -> List[Running]:
        scratch = self._context.scratch
        return [
            Running(
                each.name,
                each.root_pid,
                str(each.report["started_at"]),
                os.path.join(scratch.pod, "containers", each.name, str(each.run), "upper"),
                each.log_dir,
            )
            for each in self._lifecycle.all_containers()
            if each.running
        ]

    def _empty_dirs(self) -> Dict[str, str]:
        volumes = self._context.plan.get("volumes") or {}
        return {
            name: os.path.join(self._context.scratch.pod, "volumes", name)
            for name, plan in volumes.items()
            if plan.get("kind") == "empty"
        }

    def _never_less(self, answer: PodUsage) -> PodUsage:
        most = {}
        for name, told in answer["containers"].items():
            run = (name, told["started_at"])
            told["cpu_s"] = most[run] = max(told["cpu_s"], self._most.get(run, 0.0))
        self._most = most
        return answer


def look(running: List[Running], volumes: Dict[str, str], *, disk: bool, proc: str = "/proc") -> PodUsage:
    members = processes_of({each.name: each.pid for each in running}, proc)
    containers: Dict[str, ContainerUsage] = {}
    for each in running:
        pids = members[each.name]
        cpu_s = sum(_cpu_s(pid, proc) for pid in pids)
        memory = [_memory(pid, proc) for pid in pids]
        containers[each.name] = {
            "started_at": each.started_at,
            "cpu_s": round(cpu_s, 2),
            "memory_bytes": sum(whole for whole, _ in memory),
            "rss_bytes": sum(anonymous for _, anonymous in memory),
            "processes": len(pids),
            "rootfs": space(each.upper) if disk else None,
            "logs": space(each.logs) if disk else None,
        }
    spaces = {name: space(path) for name, path in volumes.items() if os.path.isdir(path)}
    return {"at": time.time(), "containers": containers, "volumes": spaces}


def processes_of(roots: Dict[str, int], proc: str = "/proc") -> Dict[str, List[int]]:
    """The processes of each container, by the pid of its first one."""
    namespaces = {}
    for name, pid in roots.items():
        namespace = _mount_namespace(pid, proc)
        if namespace:
            namespaces[namespace] = name
    parents = {int(entry): _parent(int(entry), proc) for entry in os.listdir(proc) if entry.isdigit()}
    owners: Dict[int, str] = {}
    found: Dict[str, List[int]] = {name: [] for name in roots}
    for pid in parents:
        owner = _owner(pid, parents, namespaces, owners, proc)
        if owner:
            found[owner].append(pid)
    return found


def _owner(
    pid: int, parents: Dict[int, int], namespaces: Dict[str, str], owners: Dict[int, str], proc: str
) -> str:
    """Up the line of parents to one that is in a container's mount namespace; "" when there is none."""
    line = []
    owner = ""
    while pid in parents and pid not in line:
        if pid in owners:
            owner = owners[pid]
            break
        line.append(pid)
        owner = namespaces.get(_mount_namespace(pid, proc), "")
        if owner:
            break
        pid = parents[pid]
    owners.update((each, owner) for each in line)
    return owner


def _mount_namespace(pid: int, proc: str) -> str:
    try:
        return os.readlink(f"{proc}/{pid}/ns/mnt")
    except OSError:
        return ""


def _stat(pid: int, proc: str) -> List[str]:
    """The fields of stat from the third on: a command name may hold anything, so it is cut off at its last bracket."""
    try:
        with open(f"{proc}/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _parent(pid: int, proc: str) -> int:
    fields = _stat(pid, proc)
    return int(fields[1]) if fields else 0


def _cpu_s(pid: int, proc: str) -> float:
    """Its own time and that of the children it has waited for; those still alive are counted by themselves."""
    fields = _stat(pid, proc)
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS_PER_S if fields else 0.0


def _memory(pid: int, proc: str) -> Tuple[int, int]:
    """(resident bytes, of them anonymous). Shared pages count by share, so that a sum over processes is right."""
    try:
        with open(f"{proc}/{pid}/smaps_rollup", encoding="ascii") as file:
            rows = (line.split() for line in file)
            found = {row[0]: int(row[1]) << 10 for row in rows if len(row) == 3 and row[2] == "kB"}
        anonymous = found.get("Pss_Anon:", min(found["Pss:"], found.get("Anonymous:", 0)))
        return found["Pss:"], anonymous
    except (OSError, ValueError, KeyError):
        return _memory_of_old_kernel(pid, proc)


def _memory_of_old_kernel(pid: int, proc: str) -> Tuple[int, int]:
    try:
        with open(f"{proc}/{pid}/statm", encoding="ascii") as file:
            _, resident, shared = (int(field) for field in file.read().split()[:3])
        return resident * _PAGE_BYTES, max(0, resident - shared) * _PAGE_BYTES
    except (OSError, ValueError):
        return 0, 0


def space(path: str) -> Optional[Space]:
    """What a tree takes, and the file system it is on; None when it cannot be told in time."""
    try:
        whole = os.statvfs(path)
    except OSError:
        return None
    used = _walk(path, time.monotonic() + _WALK_S)
    if used is None:
        return None
    return {
        "used_bytes": used[0],
        "inodes_used": used[1],
        "capacity_bytes": whole.f_blocks * whole.f_frsize,
        "available_bytes": whole.f_bavail * whole.f_frsize,
        "inodes": whole.f_files,
        "inodes_free": whole.f_favail,
    }


def _walk(path: str, until_s: float) -> Optional[Tuple[int, int]]:
    """(bytes, inodes) like `du -x`: links counted once, other file systems left out."""
    used_bytes, inodes = 0, 0
    linked = set()
    device = os.lstat(path).st_dev
    left = [path]
    while left:
        if time.monotonic() > until_s:
            return None
        here = left.pop()
        for entry in (here, *_entries(here)):
            try:
                seen = os.lstat(entry)
            except OSError:
                continue
            is_directory = os.path.isdir(entry) and not os.path.islink(entry)
            if is_directory and entry != here:
                # Counted when its turn comes.
                if seen.st_dev == device:
                    left.append(entry)
                continue
            if seen.st_nlink > 1 and not is_directory:
                if seen.st_ino in linked:
                    continue
                linked.add(seen.st_ino)
            used_bytes += seen.st_blocks * 512
            inodes += 1
    return used_bytes, inodes


def _entries(path: str) -> Iterable[str]:
    try:
        return [os.path.join(path, name) for name in os.listdir(path)]
    except OSError:
        return []
