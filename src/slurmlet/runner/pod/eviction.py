"""Pods that outgrow an emptyDir's sizeLimit are ended, as a kubelet's eviction manager would do it.

A directory of a shared scratch has no quota, so its size is looked at from time to time. Only pods that have such a
limit pay for it (the module is not even loaded in others).
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable, Dict, Iterator, Tuple

from slurmlet.linux.event_loop import Loop
from slurmlet.runner.host.child_processes import Children

# The kubelet's housekeeping interval. Walking a big tree must not become the pod's main business, hence the share.
PERIOD_S = 10.0
_MOST_OF_THE_TIME = 10
# What an evicted pod gets to end itself, whatever its own grace says.
GRACE_S = 1.0
REASON = "Evicted"


class UsageWatch:
    """`directories` gives what is limited and exists: name → (path, limit in bytes, limit as written)."""

    def __init__(
        self,
        loop: Loop,
        children: Children,
        directories: Callable[[], Dict[str, Tuple[str, int, str]]],
        evict: Callable[[str], None],
    ) -> None:
        self._loop, self._children = loop, children
        self._directories, self._evict = directories, evict

    def start(self) -> None:
        self._loop.later(PERIOD_S, self._look)

    def _look(self) -> None:
        limited = self._directories()
        began_s = time.monotonic()

        def measured(used: Any, error: str) -> None:
            message = "" if error else too_much(limited, used)
            if message:
                self._evict(message)
                return
            took_s = time.monotonic() - began_s
            self._loop.later(max(PERIOD_S, _MOST_OF_THE_TIME * took_s), self._look)

        self._children.call(
            lambda: {name: disk_usage_bytes(path) for name, (path, _, _) in limited.items()}, measured
        )


def too_much(limited: Dict[str, Tuple[str, int, str]], used: Dict[str, int]) -> str:
    """The kubelet's sentence about the first volume over its limit, its trailing space included; "" for none."""
    for name, (_, limit_bytes, written) in limited.items():
        if used.get(name, 0) > limit_bytes:
            return f'Usage of EmptyDir volume "{name}" exceeds the limit "{written}". '
    return ""


def disk_usage_bytes(directory: str) -> int:
    """What the tree takes on disk; a file with several names counts once. What vanishes meanwhile counts nothing."""
    total, seen = 0, set()
    for path in _everything(directory):
        try:
            found = os.lstat(path)
        except OSError:
            continue
        key = (found.st_dev, found.st_ino)
        if key not in seen:
            total += found.st_blocks * 512
        if found.st_nlink > 1:
            seen.add(key)
    return total


def _everything(directory: str) -> Iterator[str]:
    yield directory
    for place, directories, files in os.walk(directory):
        for name in (*directories, *files):
            yield os.path.join(place, name)
