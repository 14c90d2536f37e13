"""Limits of local ephemeral storage: writable layers, logs and emptyDirs of a pod, measured from time to time.

As with `evicting`: there is no quota to be had, so a pod that has outgrown its limits is ended, in the kubelet's words.
Loaded only by pods that have such limits.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Tuple

from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.pod.eviction import PERIOD_S, disk_usage_bytes
from slurmlet.runner.pod.pod_lifecycle import Lifecycle

if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import StorageLimits

_MOST_OF_THE_TIME = 10


class StorageWatch:
    def __init__(self, context: PodContext, lifecycle: Lifecycle, evict: Callable[[str], None]) -> None:
        self._context, self._lifecycle, self._evict = context, lifecycle, evict
        self._limits = context.plan["storage_limits"]

    def start(self) -> None:
        self._context.loop.later(PERIOD_S, self._look)

    def _look(self) -> None:
        containers = self._containers()
        volumes = self._context.volumes.on_disk()
        began_s = time.monotonic()

        def measured(used: Any, error: str) -> None:
            message = "" if error else too_much(self._limits, *used)
            if message:
                self._evict(message)
                return
            took_s = time.monotonic() - began_s
            self._context.loop.later(max(PERIOD_S, _MOST_OF_THE_TIME * took_s), self._look)

        self._context.children.call(lambda: measure(containers, volumes), measured)

    def _containers(self) -> Dict[str, List[str]]:
        """Of each container: its logs, and its writable layer while it runs."""
        return {each.name: [each.log_dir, *each.writable_dirs] for each in self._lifecycle.all_containers()}


def measure(containers: Dict[str, List[str]], volumes: List[str]) -> Tuple[Dict[str, int], int]:
    used = {name: sum(disk_usage_bytes(path) for path in paths) for name, paths in containers.items()}
    return used, sum(disk_usage_bytes(path) for path in volumes)


def too_much(limits: StorageLimits, used: Dict[str, int], volumes_bytes: int) -> str:
    """The kubelet's sentence, its trailing space included; "" while all is within bounds. The pod as a whole first."""
    whole = limits.get("pod")
    if whole is not None and sum(used.values()) + volumes_bytes > whole[0]:
        return f"Pod ephemeral local storage usage exceeds the total limit of containers {whole[1]}. "
    for name, (limit_bytes, written) in (limits.get("containers") or {}).items():
        if used.get(name, 0) > limit_bytes:
            return f'Container {name} exceeded its local ephemeral storage limit "{written}". '
    return ""
