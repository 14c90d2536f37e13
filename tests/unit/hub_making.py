"""What tests of the hub share: settings over a temporary directory, and a scheduler that does as it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.hub_settings import Settings
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import EndedJob, Job, Partition

CLUSTER_ID = "deadbeef"


def make_settings(root: Path, **changes: object) -> Settings:
    """Of a cluster whose keys lie in `root`/pki."""
    given: dict[str, object] = {
        "files": ClusterFiles(root), "cluster": "default", "cluster_id": CLUSTER_ID, "kubernetes_version": "v1.36.3",
        "api_address": "127.0.0.1", "api_port": 1, "partitions": None, "host": "login", "busy_poll_s": 0.02,
        "calm_poll_s": 0.02,
    }  # fmt: skip
    return Settings(**{**given, **changes})  # type: ignore[arg-type]


def make_job(job_id: str, uid: str = "u-1", state: str = "RUNNING", reason: str = "") -> Job:
    return Job(
        JobId(job_id), state, reason, "c1", "batch", f"slurmlet:{CLUSTER_ID}:{uid} cluster=default pod=a/b"
    )


class FakeScheduler:
    """Holds jobs in lists; `on_*` run first, in the thread of the call, and may raise."""

    def __init__(self) -> None:
        self.queue: list[Job] = []
        self.accounts: dict[JobId, EndedJob] = {}
        self.submitted: list[tuple[tuple[str, ...], str]] = []
        self.cancelled: list[JobId] = []
        self.looks = 0
        self.on_submit: Callable[[], None] = lambda: None
        self.on_look: Callable[[], None] = lambda: None
        self.on_ended: Callable[[], None] = lambda: None
        self.listed_partitions: list[Partition] = []

    def submit(self, options: Sequence[str], script: str) -> JobId:
        self.submitted.append((tuple(options), script))
        self.on_submit()
        return JobId(str(100 + len(self.submitted)))

    def jobs(self) -> list[Job]:
        self.looks += 1
        seen = list(self.queue)
        self.on_look()
        return seen

    def ended(self, job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        self.on_ended()
        return {job_id: self.accounts[job_id] for job_id in job_ids if job_id in self.accounts}

    def cancel(self, job_ids: Sequence[JobId]) -> None:
        self.cancelled += job_ids

    def partitions(self) -> list[Partition]:
        return self.listed_partitions

    def version(self) -> str:
        return "24.11.5"
