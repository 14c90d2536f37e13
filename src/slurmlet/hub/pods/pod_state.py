"""All that the hub knows of one pod right now, and the questions asked of it. No I/O, no decisions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.base.clock import Clock, parse_rfc3339
from slurmlet.hub.pods.delivered_volumes import Record
from slurmlet.hub.pods.image_pulls import Backoff
from slurmlet.hub.runner_links import RunnerLink
from slurmlet.images.image_store import Image
from slurmlet.model.container_reports import containers_of
from slurmlet.model.downward_api import Place
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import Fate, Stage
from slurmlet.model.pod_sources import Sources
from slurmlet.model.pod_status import is_terminal
from slurmlet.protocol.pod_report import PodReport

Obj = dict[str, Any]


class PodState:
    """Changed by its worker alone, so nothing here needs a lock."""

    def __init__(self, pod: Obj, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self.pod = pod
        self.uid = PodUid(pod["metadata"]["uid"])
        self.gone = False
        self.created_s = self._clock.monotonic_s()
        # From the runner
        self.link: RunnerLink | None = None
        self.report: PodReport | None = None
        self.place: Place | None = None
        # From Slurm. Its silence about a job counts only after a look that began later than `mark`.
        self.job_id: JobId | None = None
        self.fate: Fate | None = None
        self.mark = 0
        # On the way to a job
        self.images: dict[str, Image] = {}
        self.backoff = Backoff()
        self.waiting: Mapping[str, tuple[str, str]] = {}
        self.refused: tuple[str, str] | None = None
        self.prepared: tuple[float, Sources] | None = None  # fetched while the job waits for its start
        self.missing_s = 0.0  # how long to wait before the next look for what is missing
        self._news_due_s = 0.0
        # While it runs
        self.delivered: Record | None = None  # what its runner has in volumes of files
        self.refused_ephemeral: dict[str, tuple[str, str]] = {}  # name → (reason, message)
        # On the way out
        self.stop_sent_grace_s: int | None = None
        self.stop_due_s = 0.0  # when a runner that was told to stop should have ended the pod
        self.cancelled = False
        self.done_since_s: float | None = None
        self.failed: tuple[str, str] | None = None  # (reason, message) of a pod the hub itself gave up

    @property
    def name(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def node(self) -> str:
        return str(self.pod["spec"].get("nodeName", ""))

    @property
    def path(self) -> str:
        """Of the object, in the API."""
        metadata = self.pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    @property
    def deleting(self) -> bool:
        return bool(self.pod["metadata"].get("deletionTimestamp"))

    @property
    def terminal(self) -> bool:
        return is_terminal(self.pod.get("status") or {})

    @property
    def job_over(self) -> bool:
        return self.fate is not None and self.fate.stage is Stage.ENDED

    @property
    def all_over(self) -> bool:
        """Nothing of the pod runs any more: its runner said so and left, and Slurm at most tidies up behind it.

        That takes 2 s in a job that was started at once: its step calls in vain for an srun that is gone.
        """
        tidied = self.fate is not None and self.fate.stage is Stage.ENDING
        return self.job_over or (self.runner_done and tidied)

    @property
    def queued(self) -> bool:
        return self.fate is not None and self.fate.stage is Stage.QUEUED

    @property
    def only_waits(self) -> bool:
        """It has a job, and nothing is heard of it yet but that Slurm has it."""
        return self.job_id is not None and not self.job_over and self.link is None and self.report is None

    def expect_news(self, within_s: float) -> None:
        """Somebody has been told to start it, and will tell how it goes."""
        self._news_due_s = self._clock.monotonic_s() + within_s

    @property
    def news_in_s(self) -> float:
        """How long it is better to wait for the next news of its start than to write what is known; 0: not at all.

        A start takes a tenth of a second. Two writes less on the way are that much less for everybody who watches pods.
        """
        if self._begun or self.job_over or self.waiting or self.refused or self.failed:
            return 0.0
        return max(0.0, self._news_due_s - self._clock.monotonic_s())

    @property
    def _begun(self) -> bool:
        if self.report is None:
            return False
        told = [*self.report["containers"].values(), *self.report["init_containers"].values()]
        return self.report["problem"] is not None or any(one["state"] != "waiting" for one in told)

    @property
    def ran(self) -> bool:
        """Some container of it was started."""
        return any(one["container_id"] for one in containers_of(self.report).values())

    @property
    def never_started(self) -> bool:
        """It ended before anything of it ran, for a reason that the next pod of its kind would meet too."""
        if self.report is None:
            return self.job_over
        return self.runner_done and self.report["problem"] is not None and not self.ran and not self.signalled

    @property
    def began_before(self) -> bool:
        """The object tells of containers that a hub before this one heard of: until the runner dials in, that holds."""
        status = self.pod.get("status") or {}
        told = [*(status.get("containerStatuses") or ()), *(status.get("initContainerStatuses") or ())]
        return not self.queued and any(one.get("containerID") for one in told)

    @property
    def runner_done(self) -> bool:
        return self.report is not None and self.report["phase"] == "Done"

    @property
    def signalled(self) -> bool:
        """Slurm ended the pod: why is for Slurm to say."""
        problem = self.report["problem"] if self.report is not None else None
        return problem is not None and problem["reason"] == "Terminated"

    @property
    def deadline_s(self) -> float | None:
        """Seconds until activeDeadlineSeconds is over (negative: since then); None without one."""
        limit_s = self.pod["spec"].get("activeDeadlineSeconds")
        started = (self.pod.get("status") or {}).get("startTime")
        if limit_s is None or not started:
            return None
        return parse_rfc3339(started).timestamp() + float(limit_s) - self._clock.time_s()

    @property
    def live_link(self) -> RunnerLink | None:
        return self.link if self.link is not None and self.link.alive else None

    @property
    def needs_slurm(self) -> bool:
        """Whether this pod depends on Slurm's next word: a job that is not over, and no runner to tell."""
        if self.job_id is None or self.job_over:
            return False
        return self.link is None or self.deleting or self.gone or self.runner_done

    def drop_prepared(self) -> None:
        self.prepared = None

    def take_newer(self, pod: Obj, same: bool = True) -> None:
        """Answers and watch events overtake each other; versions tell which is newer.

        `same`: take it also where the version is known already. The watch's copy is the smaller one to keep.
        """
        version, known = (int(one["metadata"]["resourceVersion"]) for one in (pod, self.pod))
        if version > known or (same and version == known):
            self.pod = pod
