"""A pod becomes a Slurm job, once: the seam behind which other ways to start a job can come later.

The order makes a crash harmless at every point: intent on disk, sbatch, job id on disk. After a crash the job is found
by its comment; an intent without a job is submitted again; and should two jobs ever exist, the claim in the pod's
directory lets only one of them run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from slurmlet.base.clock import rfc3339
from slurmlet.base.errors import RefusedPod
from slurmlet.base.files import read_json, write_json
from slurmlet.base.layout import PodFiles
from slurmlet.base.processes import CommandError
from slurmlet.hub.credentials import RunnerAuthority
from slurmlet.hub.polling import SlurmWatch
from slurmlet.hub.settings import Settings
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.jobs import JobPlace, JobRequest, job_request
from slurmlet.slurm.client import Scheduler

log = logging.getLogger(__name__)


class Submitter:
    def __init__(
        self, settings: Settings, slurm: Scheduler, watch: SlurmWatch, authority: RunnerAuthority
    ) -> None:
        self._settings = settings
        self._slurm = slurm
        self._watch = watch
        self._authority = authority
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
        )
        return job_request(pod, place)

    def known_job(self, uid: PodUid) -> JobId | None:
        """The pod's job as far as Slurm's newest list or our own note tells."""
        job = self._watch.job(uid)
        if job is not None:
            return job.job_id
        note = read_json(self._settings.files.pod(uid).job) or {}
        return JobId(note["job_id"]) if note.get("job_id") else None

    async def submit(self, uid: PodUid, request: JobRequest) -> JobId:
        """Submit unless it is done already. Raises CommandError (transient: try again) or RefusedPod."""
        files = self._settings.files.pod(uid)
        if files.job.exists():
            # An attempt whose outcome nobody wrote down: Slurm knows.
            await self._watch.refresh()
            job = self._watch.job(uid)
            if job is not None:
                await asyncio.to_thread(self._note, files, job.job_id)
                return job.job_id
        await asyncio.to_thread(self._prepare, files, uid)
        try:
            async with self._slots:
                job_id = await asyncio.to_thread(self._slurm.submit, request.options, request.script)
        except CommandError as error:
            if error.transient:
                raise
            files.job.unlink(missing_ok=True)
            raise RefusedPod(_plain(error), reason="SlurmRefused", hint=_remedy(request)) from error
        await asyncio.to_thread(self._note, files, job_id)
        return job_id

    def _prepare(self, files: PodFiles, uid: PodUid) -> None:
        self._authority.equip(files, uid)
        write_json(files.job, {"intent_at": rfc3339()})

    def _note(self, files: PodFiles, job_id: JobId) -> None:
        write_json(files.job, {"job_id": job_id, "submitted_at": rfc3339()})


def _remedy(request: JobRequest) -> str:
    if request.asked_by:
        return f"Correct the pod's annotation {' or '.join(request.asked_by)}, then create the pod again."
    return "Ask for less, or for another partition (spec.nodeSelector), then create the pod again."


def _plain(error: CommandError) -> str:
    """sbatch's own sentence without its decoration."""
    lines = [
        line.removeprefix("sbatch: ").removeprefix("error: ").removeprefix("fatal: ")
        for line in error.stderr.splitlines()
    ]
    return "; ".join(line for line in lines if line) or error.message
