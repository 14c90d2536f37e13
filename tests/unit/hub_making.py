"""What tests of the hub share: settings over a temporary directory, and jobs of its pods."""

from __future__ import annotations

from pathlib import Path

from slurmlet.base.clock import Clock
from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.hub_settings import Settings
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Job

CLUSTER_ID = "deadbeef"


def make_settings(root: Path, **changes: object) -> Settings:
    """Of a cluster whose keys lie in `root`/pki."""
    given: dict[str, object] = {
        "files": ClusterFiles(root), "cluster": "default", "cluster_id": CLUSTER_ID, "kubernetes_version": "v1.36.3",
        "api_address": "127.0.0.1", "api_port": 1, "partitions": None, "host": "login", "busy_poll_s": 0.02,
        "queued_poll_s": 0.02, "calm_poll_s": 0.02,
    }  # fmt: skip
    return Settings(**{**given, **changes})  # type: ignore[arg-type]


class TurnedClock(Clock):
    """Stands still until it is turned."""

    def __init__(self) -> None:
        self._now_s = 1000.0

    def turn(self, seconds: float) -> None:
        self._now_s += seconds

    def monotonic_s(self) -> float:
        return self._now_s

    def time_s(self) -> float:
        return 1_700_000_000.0 + self._now_s


def make_job(job_id: str, uid: str = "u-1", state: str = "RUNNING", reason: str = "") -> Job:
    return Job(
        JobId(job_id), state, reason, "c1", "batch", f"slurmlet:{CLUSTER_ID}:{uid} cluster=default pod=a/b"
    )
