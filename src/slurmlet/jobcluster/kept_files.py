"""After the work: what is worth keeping of a cluster that will be gone in a second, and a short word on failure."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slurmlet.base.console import say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import ClusterFiles
from slurmlet.base.processes import run
from slurmlet.protocol.log_files import LogOptions, NoLog, read_logs

_MOST_SHOWN = 5
Obj = dict[str, Any]


class Keeping:
    """`limit_s`: how long one question to the API server may take."""

    def __init__(self, files: ClusterFiles, environment: Mapping[str, str], limit_s: float) -> None:
        self._files, self._environment, self._limit_s = files, environment, limit_s

    def keep(self, directory: str, status: int) -> None:
        """Into `directory` if one was asked for; a summary on stderr when something failed."""
        target = private_dir(Path(directory).expanduser().absolute()) if directory else None
        try:
            pods: list[Obj] = json.loads(self._kubectl("get", "pods", "-A", "-o", "json"))["items"]
        except SlurmletError as error:
            say(f"slurmlet: the final state of the pods is unknown: {error.message}")
            return
        if target is not None:
            self._write_logs(target, pods)
            self._write_lists(target)
        if status:
            summarise(pods)

    def _write_logs(self, target: Path, pods: list[Obj]) -> None:
        for pod in pods:
            metadata = pod["metadata"]
            logs = self._files.pod(metadata["uid"]).logs
            for container in sorted(logs.iterdir()) if logs.is_dir() else ():
                place = private_dir(target / metadata["namespace"] / metadata["name"])
                with contextlib.suppress(NoLog):
                    text = b"".join(read_logs(str(container), LogOptions()))
                    write_private(place / f"{container.name}.log", text)

    def _write_lists(self, target: Path) -> None:
        write_private(target / "all.txt", self._kubectl("get", "all", "-A", "-o", "wide"))
        events = self._kubectl("get", "events", "-A", "--sort-by=.metadata.creationTimestamp")
        write_private(target / "events.txt", events)

    def _kubectl(self, *words: str) -> str:
        return run(["kubectl", *words], env=self._environment, timeout_s=self._limit_s).stdout


def summarise(pods: list[Obj]) -> None:
    failed = [pod for pod in pods if (pod.get("status") or {}).get("phase") == "Failed"]
    for pod in failed[:_MOST_SHOWN]:
        metadata, status = pod["metadata"], pod["status"]
        why = status.get("message") or status.get("reason") or exits(status)
        say(f"  pod {metadata['namespace']}/{metadata['name']} failed: {why}")
    if len(failed) > _MOST_SHOWN:
        say(f"  … and {len(failed) - _MOST_SHOWN} more")


def exits(status: Mapping[str, Any]) -> str:
    """Which containers ended how, where the pod itself has no reason to tell."""
    ended = [
        f"{one['name']} exited with {one['state']['terminated']['exitCode']}"
        for one in status.get("containerStatuses") or ()
        if ((one.get("state") or {}).get("terminated") or {}).get("exitCode")
    ]
    return ", ".join(ended) or "no reason told"
