"""Whether the kernel killed for want of memory: counters of our own cgroup, or of the node where there is none to see.

Slurm limits the memory of a job by a cgroup; the kernel counts there whom it killed. Opened once and kept open: where
the runtime must not see cgroups, they are hidden later.
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, List, Tuple


_NODE_COUNTER = "/proc/vmstat"


class KillCounter:
    def __init__(self, proc: str = "/proc") -> None:
        self._fd = -1
        for path in (*_own_counters(proc), _NODE_COUNTER):
            try:
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            if _oom_kills(self._fd) is not None:
                self.path = path
                return
            os.close(self._fd)
            self._fd = -1

    def count(self) -> int:
        """How often so far; 0 for ever on a kernel that does not tell."""
        return _oom_kills(self._fd) or 0 if self._fd >= 0 else 0


def _oom_kills(fd: int) -> int | None:
    try:
        text = os.pread(fd, 1 << 16, 0).decode("ascii", "replace")
    except OSError:
        return None
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == "oom_kill" and words[1].isdigit():
            return int(words[1])
    return None


def _own_counters(proc: str) -> Iterator[str]:
    """Files that may count for our cgroup, the nearest first."""
    mounts = list(_cgroup_mounts(os.path.join(proc, "self/mountinfo")))
    for line in _lines(os.path.join(proc, "self/cgroup")):
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            # Version 1 counts where the process is, and nowhere above.
            for point in _places(mounts, "cgroup", path):
                yield os.path.join(point, "memory.oom_control")
        elif not controllers:
            for point in _places(mounts, "cgroup2", path):
                yield os.path.join(point, "memory.events")
                # Its controller may be enabled further up only; counts there include ours.
                yield os.path.join(os.path.dirname(point), "memory.events")


def _places(mounts: List[Tuple[str, str, str]], kind: str, path: str) -> Iterator[str]:
    for root, point, found in mounts:
        if found == kind and (path + "/").startswith(root.rstrip("/") + "/"):
            yield os.path.normpath(os.path.join(point, os.path.relpath(path, root)))


def _cgroup_mounts(mountinfo: str) -> Iterator[Tuple[str, str, str]]:
    """(root, mount point, kind) of cgroup2 and of the memory controller of version 1."""
    for line in _lines(mountinfo):
        before, _, after = line.partition(" - ")
        fields, tail = before.split(), after.split()
        if len(fields) < 5 or len(tail) < 3:
            continue
        if tail[0] == "cgroup2" or (tail[0] == "cgroup" and "memory" in tail[2].split(",")):
            yield fields[3], fields[4], tail[0]


def _lines(path: str) -> List[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except OSError:
        return []


def score_above_own() -> int | None:
    """oom_score_adj for containers: the runner, who tells what happened, is the last the kernel should choose."""
    try:
        with open("/proc/self/oom_score_adj", encoding="ascii") as file:
            return min(1000, int(file.read()) + 200)
    except (OSError, ValueError):
        return None
