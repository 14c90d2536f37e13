"""One worker per pod: brings it from bound to gone.

Level-triggered: `_step` looks at all that is known now (the object, Slurm's word, the runner's report) and does the next
thing. Whatever wakes it, in whatever order, after whatever crash, the same facts lead to the same act. Nothing is kept
here that a new hub could not learn again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.clock import parse_rfc3339, rfc3339
from slurmlet.base.errors import RefusedPod, SlurmletError
from slurmlet.base.files import read_json
from slurmlet.hub.gathering import gather
from slurmlet.hub.imaging import Backoff, ImageProblem, Images
from slurmlet.hub.links import LinkLost, RunnerLink
from slurmlet.hub.nodes import NodeKeeper
from slurmlet.hub.polling import SlurmWatch
from slurmlet.hub.settings import Settings
from slurmlet.hub.submitting import Submitter
from slurmlet.images.store import Image
from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.model import admission
from slurmlet.model.downward import Place
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.jobs import HOST_ANNOTATION, JOB_ID_ANNOTATION
from slurmlet.model.jobstates import Fate, Stage
from slurmlet.model.plan import PlannedImage, Setting, check_sources, pod_plan
from slurmlet.model.sources import MissingSource
from slurmlet.model.status import Facts, is_terminal, pod_status
from slurmlet.slurm.client import Scheduler

log = logging.getLogger(__name__)
Obj = dict[str, Any]

_RETRY_S = 2.0
_SOON_S = 0.3
# A runner that was told to stop may take its grace and this much more before its job is cancelled.
_STOP_SLACK_S = 5.0
# How long a new hub waits for the runner of a pod that is being deleted before it cancels the job.
_DIAL_IN_S = 6.0
# How long a signalled pod may wait for Slurm to say why.
_VERDICT_S = 20.0
# A finished runner leaves by itself; one that has not after this long is cancelled.
_LINGER_S = 60.0


@dataclass(frozen=True)
class Tools:
    """What all workers share."""

    settings: Settings
    client: ApiClient
    events: EventRecorder
    slurm: Scheduler
    watch: SlurmWatch
    images: Images
    submitter: Submitter
    nodes: NodeKeeper


class PodWorker:
    def __init__(self, tools: Tools, pod: Obj) -> None:
        self._tools = tools
        self.pod = pod
        self.uid = PodUid(pod["metadata"]["uid"])
        self.link: RunnerLink | None = None
        self.report: Mapping[str, Any] | None = None
        self.finished = False
        self._gone = False
        self._wake = asyncio.Event()
        self._linked = asyncio.Event()
        self._born_s = time.monotonic()
        self._job_id: JobId | None = None
        self._fate: Fate | None = None
        # Slurm's silence about a job counts only after a look that began later than the submission.
        self._mark = 0
        self._place: Place | None = None
        self._images: dict[str, Image] = {}
        self._backoff = Backoff()
        self._waiting: Mapping[str, tuple[str, str]] = {}
        self._refused: tuple[str, str] | None = None
        self._told: set[str] = set()
        self._stop_sent_grace_s: int | None = None
        self._cancelled = False
        self._verdict_asked_s: float | None = None
        self._done_since_s: float | None = None

    # What wakes the worker

    def update(self, pod: Obj, gone: bool) -> None:
        """A newer version of the object, or its end."""
        if gone:
            self._gone = True
        elif int(pod["metadata"]["resourceVersion"]) >= int(self.pod["metadata"]["resourceVersion"]):
            self.pod = pod
        self._wake.set()

    def attach(self, link: RunnerLink) -> None:
        hello = link.hello
        if self.link is not None:
            self.link.end()
        self.link = link
        partition = self._tools.nodes.partition_of(self._node)
        self._place = Place(
            host_ip=str(hello.get("host_ip") or ""),
            host=str(hello.get("host") or ""),
            node_cpus=partition.cpus_per_node if partition else 1,
            node_memory_bytes=(partition.memory_mb_per_node if partition else 0) << 20,
        )
        if hello.get("report"):
            self.report = hello["report"]
        if hello.get("job_id") and self._job_id is None:
            self._job_id = JobId(str(hello["job_id"]))
        self._stop_sent_grace_s = None
        self._linked.set()
        self._wake.set()

    async def heard(self, link: RunnerLink, message: Mapping[str, Any]) -> None:
        """A control message of the runner."""
        kind = message["type"]
        if kind in ("report", "bye"):
            self.report = message["report"]
            # On disk before it was sent, so it is written down already.
            await link.tell("ack", seq=message["seq"])
            self._wake.set()
        elif kind == "event":
            told = (str(message[key]) for key in ("kind", "reason", "message", "container"))
            self._tools.events.pod_event(self.pod, *told)

    def detach(self, link: RunnerLink) -> None:
        if self.link is link:
            self.link = None
            self._linked.clear()
            self._tools.watch.poke()
            self._wake.set()

    def nudge(self) -> None:
        """Slurm was looked at."""
        if self.watching or self._gone:
            self._wake.set()

    @property
    def watching(self) -> bool:
        """Whether this pod depends on Slurm's next word: a job that is not over, and no runner to tell."""
        open_job = self._job_id is not None and (self._fate is None or self._fate.stage is not Stage.ENDED)
        return open_job and (self.link is None or self._deleting or self._gone or self._runner_done)

    async def linked(self, timeout_s: float) -> RunnerLink | None:
        """The runner's link, waiting a moment for one that is about to dial in."""
        try:
            await asyncio.wait_for(self._linked.wait(), timeout_s)
        except TimeoutError:
            return None
        return self.link

    # The work

    async def run(self) -> None:
        while not self.finished:
            self._wake.clear()
            try:
                delay_s = await self._step()
            except ApiError as error:
                delay_s = None if error.status == 404 else _RETRY_S
                log.warning("pod %s: %s", self._name, error.message)
            except SlurmletError as error:
                log.warning("pod %s: %s", self._name, error.message)
                delay_s = _RETRY_S
            except LinkLost:
                delay_s = _SOON_S
            if not self.finished:
                await self._sleep(delay_s)

    async def _sleep(self, delay_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), delay_s)
        except TimeoutError:
            pass

    async def _step(self) -> float | None:
        """Do the next thing; seconds until another look is due, None to wait for news."""
        await self._learn()
        if self._gone:
            return await self._bury()
        if self._deleting:
            return await self._end()
        if is_terminal(self.pod.get("status") or {}):
            return await self._linger()
        if self._job_id is None:
            delay_s = await self._start()
            if self._job_id is None:
                await self._write_status()
                return delay_s
        if self.link is not None and not self.link.has_pod:
            delay_s = await self._send_plan(self.link)
            if delay_s is not None:
                await self._write_status()
                return delay_s
        return await self._tell_state()

    async def _learn(self) -> None:
        """Bring together what Slurm and the pod's directory know."""
        watch = self._tools.watch
        if self._job_id is None:
            self._job_id = self._tools.submitter.known_job(self.uid)
        if self._job_id is None or not watch.looked_since(self._mark):
            return
        if self._fate is None or self._fate.stage is not Stage.ENDED:
            self._fate = await watch.fate(self._job_id) or self._fate
        over = self._fate is not None and self._fate.stage is Stage.ENDED
        if over and not self._runner_done:
            written = await asyncio.to_thread(read_json, self._files.report)
            if written:
                self.report = written
        self._tell_pending()

    async def _start(self) -> float | None:
        """Everything up to a submitted job. Sets `_job_id` on success, else what the pod waits for."""
        pod, events = self.pod, self._tools.events
        if self._refused is not None:
            return None
        partition = self._tools.nodes.partition_of(self._node)
        if partition is None:
            return _RETRY_S
        try:
            admission.check(pod)
            request = self._tools.submitter.request(pod, partition.name)
            await self._check_sources()
            self._images = await self._tools.images.ensure(pod, self._backoff)
            self._waiting = {}
            if self._deleting or self._gone:
                return 0
            self._mark = self._tools.watch.mark
            self._job_id = await self._tools.submitter.submit(self.uid, request)
        except RefusedPod as error:
            self._refuse(error)
            return None
        except ImageProblem as problem:
            self._waiting = problem.waiting
            return problem.retry_s
        except MissingSource as missing:
            return self._missing(missing)
        self._tools.watch.poke()
        events.pod_event(
            pod, "Normal", "Submitted", f"Submitted as Slurm job {self._job_id} to partition {partition.name}"
        )
        for note in request.notes:
            events.pod_event(pod, "Warning", "AnnotationWithoutEffect", note)
        await self._annotate({JOB_ID_ANNOTATION: self._job_id})
        return None

    async def _check_sources(self) -> None:
        """A pod that waits for a config map or secret waits before it has a job, not inside one."""
        sources = await gather(self._tools.client, self.pod, with_tokens=False)
        check_sources(self.pod, sources)

    def _missing(self, missing: MissingSource) -> float:
        self._tell_once("Warning", "Failed", f"Error: {missing.message}")
        self._waiting = {"": (missing.reason, missing.message)}
        return _RETRY_S

    def _refuse(self, error: RefusedPod) -> None:
        text = f"{error.message}. {error.hint}".strip()
        self._refused = (error.reason, error.message)
        self._tools.events.pod_event(self.pod, "Warning", error.reason, text)

    async def _send_plan(self, link: RunnerLink) -> float | None:
        """Give the runner its pod; seconds to wait when something it needs is missing."""
        settings = self._tools.settings
        try:
            sources = await gather(self._tools.client, self.pod, with_tokens=True)
            if not self._images:
                self._images = await self._tools.images.stored(self.pod)
            images = {
                name: PlannedImage(image.repo_digest, str(image.directory), image.config.get("config") or {})
                for name, image in self._images.items()
            }
            services = {
                "KUBERNETES_SERVICE_HOST": settings.api_address,
                "KUBERNETES_SERVICE_PORT": str(settings.api_port),
                "KUBERNETES_SERVICE_PORT_HTTPS": str(settings.api_port),
            }
            place = self._place or Place()
            plan = pod_plan(self.pod, Setting(settings.cluster, images, sources, place, services))
        except MissingSource as missing:
            return self._missing(missing)
        except RefusedPod as error:
            self._refuse(error)
            await link.tell("stop", grace_s=0, reason=error.message)
            return _RETRY_S
        self._waiting = {}
        await link.tell("pod", pod=plan)
        link.has_pod = True
        if self._place is not None:
            await self._annotate({HOST_ANNOTATION: self._place.host})
        return None

    async def _tell_state(self) -> float | None:
        """Write what is; a pod whose job was signalled waits for Slurm to say why."""
        over = self._fate is not None and self._fate.stage is Stage.ENDED
        if self._runner_done and self._signalled and not over:
            self._verdict_asked_s = self._verdict_asked_s or time.monotonic()
            if time.monotonic() - self._verdict_asked_s < _VERDICT_S:
                self._tools.watch.poke()
                return _SOON_S
        await self._write_status()
        return None

    async def _linger(self) -> float | None:
        """The pod has ended; its job must end too."""
        if self._job_id is None or (self._fate is not None and self._fate.stage is Stage.ENDED):
            return None
        self._done_since_s = self._done_since_s or time.monotonic()
        if time.monotonic() - self._done_since_s > _LINGER_S:
            await self._cancel()
        return _LINGER_S

    async def _end(self) -> float | None:
        """The object is being deleted: stop the pod, see the job gone, then let the object go."""
        if await self._job_is_over():
            if not is_terminal(self.pod.get("status") or {}):
                await self._write_status()
            await self._delete_object()
            return _RETRY_S
        metadata = self.pod["metadata"]
        grace_s = int(metadata.get("deletionGracePeriodSeconds") or 0)
        if self.link is not None and self.link.alive:
            if self._stop_sent_grace_s != grace_s:
                self._stop_sent_grace_s = grace_s
                await self.link.tell("stop", grace_s=grace_s, reason="deleted")
            overdue_s = time.time() - parse_rfc3339(metadata["deletionTimestamp"]).timestamp()
            if overdue_s > _STOP_SLACK_S:
                await self._cancel()
        elif self._may_cancel_unlinked():
            await self._cancel()
        self._tools.watch.poke()
        return _SOON_S if self._runner_done or self._cancelled else 1.0

    def _may_cancel_unlinked(self) -> bool:
        queued = self._fate is not None and self._fate.stage is Stage.QUEUED
        return queued or time.monotonic() - self._born_s > _DIAL_IN_S

    async def _bury(self) -> float | None:
        """The object is gone: no job may outlive it, no file either."""
        if not await self._job_is_over():
            if self.link is not None and self.link.alive and not self._runner_done:
                await self.link.tell("stop", grace_s=0, reason="deleted by force")
            elif not self._runner_done:
                await self._cancel()
            if time.monotonic() - (self._done_since_s or time.monotonic()) > _STOP_SLACK_S:
                await self._cancel()
            self._done_since_s = self._done_since_s or time.monotonic()
            self._tools.watch.poke()
            return _SOON_S
        await asyncio.to_thread(shutil.rmtree, self._files.root, ignore_errors=True)
        if self._job_id is not None:
            self._tools.watch.forget(self._job_id)
        self.finished = True
        return None

    async def _job_is_over(self) -> bool:
        if self._job_id is not None:
            return self._fate is not None and self._fate.stage is Stage.ENDED
        if not self._files.job.exists():
            return True
        # An intent whose outcome is unknown: ask Slurm before the pod may go.
        await self._tools.watch.refresh()
        self._job_id = self._tools.submitter.known_job(self.uid)
        return self._job_id is None

    async def _cancel(self) -> None:
        assert self._job_id is not None
        if not self._cancelled:
            log.info("pod %s: cancelling Slurm job %s", self._name, self._job_id)
        self._cancelled = True
        await asyncio.to_thread(self._tools.slurm.cancel, [self._job_id])

    # Writing to the API server

    async def _write_status(self) -> None:
        status = pod_status(
            Facts(
                pod=self.pod,
                now=rfc3339(),
                report=self.report,
                fate=self._fate,
                job_id=self._job_id or "",
                waiting=self._waiting,
                refused=self._refused,
                place=self._place,
                image_ids={name: image.repo_digest for name, image in self._images.items()},
            )
        )
        if _same(status, self.pod.get("status") or {}):
            return
        change = {"metadata": {"uid": self.uid}, "status": status}
        self.update(await self._tools.client.patch(f"{self._path}/status", change, STRATEGIC), False)

    async def _annotate(self, annotations: Mapping[str, str]) -> None:
        change = {"metadata": {"uid": self.uid, "annotations": dict(annotations)}}
        try:
            self.update(await self._tools.client.patch(self._path, change), False)
        except ApiError as error:
            log.warning("pod %s: annotation not written: %s", self._name, error.message)

    async def _delete_object(self) -> None:
        options = {"gracePeriodSeconds": 0, "preconditions": {"uid": self.uid}}
        try:
            await self._tools.client.delete(self._path, options)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    def _tell_pending(self) -> None:
        fate = self._fate
        if fate is not None and fate.stage is Stage.QUEUED and fate.pending_reason:
            self._tell_once("Normal", "Queued", f"Slurm job {self._job_id} is pending: {fate.pending_reason}")

    def _tell_once(self, kind: str, reason: str, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            self._tools.events.pod_event(self.pod, kind, reason, message)

    # Short names

    @property
    def _name(self) -> str:
        return f"{self.pod['metadata']['namespace']}/{self.pod['metadata']['name']}"

    @property
    def _node(self) -> str:
        return str(self.pod["spec"].get("nodeName", ""))

    @property
    def _path(self) -> str:
        metadata = self.pod["metadata"]
        return f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"

    @property
    def _files(self) -> Any:
        return self._tools.settings.files.pod(self.uid)

    @property
    def _deleting(self) -> bool:
        return bool(self.pod["metadata"].get("deletionTimestamp"))

    @property
    def _runner_done(self) -> bool:
        return self.report is not None and self.report.get("phase") == "Done"

    @property
    def _signalled(self) -> bool:
        problem = (self.report or {}).get("problem") or {}
        return problem.get("reason") == "Terminated"


def _same(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a patch would change nothing: absent and None are the same, others' conditions are not ours."""
    for key, value in new.items():
        before = old.get(key)
        if key == "conditions":
            known = {one["type"]: one for one in before or ()}
            if any(not _same(one, known.get(one["type"], {})) for one in value):
                return False
        elif value != before and (value or before):
            return False
    return True
