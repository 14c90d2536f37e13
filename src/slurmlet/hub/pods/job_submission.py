"""A pod becomes a Slurm job, once: at once where resources are free now (hub/pods/immediate_launch), else through sbatch.

The order makes a crash harmless at every point: intent on disk, sbatch or srun, job id on disk. After a crash the job is
found by its comment, or by its name where the site rewrites comments; an intent without a job is submitted again; and
should two jobs ever exist, the claim in the pod's directory lets only one of them run. A job in which the pod could not
begin is noted as not the pod's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from slurmlet.base.clock import rfc3339
from slurmlet.base.errors import RefusedPod, SlurmError
from slurmlet.base.layout import PodFiles
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.jobs.submission_gate import SlurmLimited, SubmissionGate
from slurmlet.hub.pods.immediate_launch import LANE, Launcher
from slurmlet.hub.pods.job_file import read_job_file, write_job_file
from slurmlet.hub.runner_credentials import RunnerAuthority
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.launch_mode import IMMEDIATE
from slurmlet.model.pod_job import JobPlace, JobRequest, job_request
from slurmlet.model.submit_limits import breaks_it_alone
from slurmlet.protocol.cluster_files import JobFile
from slurmlet.slurm.immediate import LaunchFailed, NotNow
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)


class Submitted(NamedTuple):
    job_id: JobId
    at_once: bool = False
    why: str = ""  # not at once, though the pod asked for it


class Submitter:
    def __init__(
        self,
        settings: Settings,
        slurm: Slurm,
        watch: JobWatch,
        authority: RunnerAuthority,
        gate: SubmissionGate,
        launcher: Launcher | None = None,
    ) -> None:
        self._settings = settings
        self._slurm = slurm
        self._watch = watch
        self._authority = authority
        self._gate = gate
        self._launcher = launcher
        self._slots = asyncio.Semaphore(settings.sbatch_at_once)

    def request(self, pod: Mapping[str, Any], partition: str) -> JobRequest:
        """What would be submitted. Raises RefusedPod."""
        files = self._settings.files.pod(pod["metadata"]["uid"])
        place = JobPlace(
            cluster=self._settings.cluster,
            cluster_id=self._settings.cluster_id,
            partition=partition,
            runner=self._settings.files.runner,
            pod_dir=files.root,
            log=files.job_log,
            launch=self._settings.launch,
        )
        return job_request(pod, place)

    def wait_in_line(self, uid: PodUid) -> None:
        """Raises SlurmLimited while Slurm takes no more jobs and it is not this pod's turn to try."""
        self._gate.enter(uid)

    async def known_job(self, uid: PodUid) -> JobId | None:
        """The pod's job as far as Slurm's newest list or our own note tells."""
        note = await asyncio.to_thread(read_job_file, self._settings.files.pod(uid))
        job = self._watch.job(uid)
        if job is not None and job.job_id not in note.get("not", ()):
            return job.job_id
        return JobId(note["job_id"]) if note.get("job_id") else None

    async def disown(self, uid: PodUid, job_id: JobId) -> None:
        """The pod could not begin in this job, and is to have another."""
        await asyncio.to_thread(self._note_not_its, self._settings.files.pod(uid), job_id)

    def _note_not_its(self, files: PodFiles, job_id: JobId) -> None:
        if files.root.is_dir():
            note = read_job_file(files)
            others = [*note.get("not", ()), job_id]
            write_job_file(files, {"intent_at": rfc3339(), **_kept(note), "not": others})

    async def submit(self, uid: PodUid, request: JobRequest, looks_free: bool = False) -> Submitted:
        """Submit unless it is done already. Raises SlurmError (transient: try again) or RefusedPod."""
        files = self._settings.files.pod(uid)
        if await asyncio.to_thread(files.job.exists):
            # An attempt whose outcome nobody wrote down: Slurm knows.
            await self._watch.refresh()
            job_id = await self.known_job(uid)
            if job_id is not None:
                await asyncio.to_thread(self._note, files, job_id)
                return Submitted(job_id)
        at_once, why = False, ""
        if self._launcher is not None:
            at_once, why = self._launcher.chooses(request, looks_free)
        await asyncio.to_thread(self._prepare, files, uid, at_once)
        if at_once:
            job_id, why = await self._launch(files, uid, request)
            if job_id is not None:
                await asyncio.to_thread(self._note, files, job_id)
                return Submitted(job_id, at_once=True)
        return Submitted(await self._queue(files, uid, request), why=why)

    async def _launch(self, files: PodFiles, uid: PodUid, request: JobRequest) -> tuple[JobId | None, str]:
        """The job, or why it is for the queue. Raises a transient SlurmError."""
        assert self._launcher is not None
        try:
            return await self._launcher.launch(uid, request), ""
        except NotNow as error:
            why, failed = error.message, None
        except LaunchFailed as error:
            log.warning("%s", error.message)
            why, failed = error.message, error.job_id
        if failed is not None and await asyncio.to_thread(files.claim.exists):
            return failed, ""  # it had begun after all: what became of it is Slurm's to say
        if failed is not None:
            await self.disown(uid, failed)
        else:
            await asyncio.to_thread(self._intend, files, False)
        return None, why if request.launch == IMMEDIATE else ""

    async def _queue(self, files: PodFiles, uid: PodUid, request: JobRequest) -> JobId:
        try:
            async with self._slots:
                # Others of the same burst may have been refused meanwhile.
                self._gate.enter(uid)
                job_id = await self._slurm.submit(request.spec)
        except SlurmLimited:
            await asyncio.to_thread(files.job.unlink, missing_ok=True)
            raise
        except SlurmError as error:
            refused = error.reason == "SlurmLimited"
            if error.transient and not refused:
                raise
            # Slurm has answered: there is no job that could be found later.
            await asyncio.to_thread(files.job.unlink, missing_ok=True)
            if refused and not breaks_it_alone(error.said):
                raise self._gate.refused(uid, error.said) from error
            self._gate.gave_up(uid)
            raise RefusedPod(error.said, reason="SlurmRefused", hint=_remedy(request)) from error
        self._gate.accepted(uid)
        await asyncio.to_thread(self._note, files, job_id)
        return job_id

    def forget(self, uid: PodUid) -> None:
        """The pod is gone."""
        self._gate.gave_up(uid)

    def _prepare(self, files: PodFiles, uid: PodUid, at_once: bool) -> None:
        self._authority.equip(files, uid)
        self._intend(files, at_once)

    def _intend(self, files: PodFiles, at_once: bool) -> None:
        note = read_job_file(files)
        write_job_file(files, {"intent_at": rfc3339(), **_lane(at_once), **_kept(note)})

    def _note(self, files: PodFiles, job_id: JobId) -> None:
        note = read_job_file(files)
        lane = _lane(note.get("lane") == LANE)
        write_job_file(files, {"job_id": job_id, "submitted_at": rfc3339(), **lane, **_kept(note)})


def _lane(at_once: bool) -> JobFile:
    return {"lane": LANE} if at_once else {}


def _kept(note: JobFile) -> JobFile:
    """What every later note keeps of an earlier one: jobs in which the pod could not begin."""
    return {"not": note["not"]} if note.get("not") else {}


def _remedy(request: JobRequest) -> str:
    if request.asked_by:
        return f"Correct the pod's annotation {' or '.join(request.asked_by)}, then create the pod again."
    return "Request less, or another partition (spec.nodeSelector), then create the pod again."
