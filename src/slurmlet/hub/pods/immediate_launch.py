"""The second way to a pod's own Slurm job: at once, where resources are free now (docs/decisions/0016).

`Launcher` decides and does it; what it cannot start at once goes to sbatch in the same breath. `LaunchKeeper` ends what
a start or an end that broke off left behind: an allocation without its step, a job whose step is over, an srun whose
hub died. It acts on what Slurm and the pod's directory say alone, so a hub that was started anew does the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json
from slurmlet.hub.hub_settings import Settings
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.pods.job_file import read_job_file
from slurmlet.model import job_states, launch_mode
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import Stage
from slurmlet.model.pod_job import JobRequest
from slurmlet.model.slurm_values import Job, JobSpec
from slurmlet.slurm import immediate
from slurmlet.slurm.environment import command_environment
from slurmlet.slurm.immediate import NotNow, Site
from slurmlet.slurm.interface import Slurm

log = logging.getLogger(__name__)
# Each is an srun with threads of its own: a burst of pods is cheaper, for this host and for Slurm, through sbatch.
_AT_ONCE = 2
_PAUSE_S, _LONGEST_PAUSE_S = 2.0, 30.0
_LOOK_S = 3.0
_LEFT_BEHIND_S = 60.0
# A runner takes its pod in the first moment of its life. An srun that was killed in the middle of its work can leave a step
# that Slurm counts as running and that no host has ever heard of.
_NEVER_BEGAN_S = 15.0

LANE = "immediate"
_UNKNOWN = Site(problem="it is not known yet whether this site supports it")
# The log's name is an argument, so that nothing is ever quoted. A site's token to Slurm is no business of the pod's.
_TASK = ("/bin/sh", "-c", 'unset SLURM_JWT; exec "$@" >>"$0" 2>&1')


class Launcher:
    """Starts pods at once. `site` is known after `find_out`; until then everything goes to sbatch."""

    def __init__(self, settings: Settings, slurm: Slurm, watch: JobWatch) -> None:
        self._settings, self._slurm, self._watch = settings, slurm, watch
        self._environment = command_environment()
        self._under_way = 0
        self._slots = asyncio.Semaphore(_AT_ONCE)
        self._pauses: dict[str, tuple[float, float]] = {}  # partition → (until, length)
        self._told_problem = False
        self.site = _UNKNOWN

    async def find_out(self) -> None:
        """Slurm that does not answer is asked again."""
        while self.site is _UNKNOWN:
            try:
                known = await self._slurm.capabilities()
                self.site = await asyncio.to_thread(immediate.look_at_site, known)
            except SlurmletError as error:
                log.warning("whether pods can start at once is not known yet: %s", error.message)
                await asyncio.sleep(_PAUSE_S)
        if self.site.problem:
            log.warning("no pod is started at once: %s", self.site.problem)

    def chooses(self, request: JobRequest, looks_free: bool) -> tuple[bool, str]:
        """Whether to try, and why not: where the pod asked for it, and once where the site has no way."""
        if request.launch == launch_mode.BATCH:
            return False, ""
        insists = request.launch == launch_mode.IMMEDIATE
        if self.site.problem:
            tells = insists or not (self._told_problem or self.site is _UNKNOWN)
            self._told_problem = self._told_problem or tells
            return False, self.site.problem if tells else ""
        if not launch_mode.can_start_at_once(request.spec):
            return False, "its Slurm options need the queue" if insists else ""
        return insists or (looks_free and self._is_calm(request.spec)), ""

    def _is_calm(self, spec: JobSpec) -> bool:
        until_s, _ = self._pauses.get(spec.asked_partition, (0.0, 0.0))
        if self._under_way >= _AT_ONCE or time.monotonic() < until_s:
            return False
        # Where jobs of ours wait, one that comes later would only be told the same.
        jobs = self._watch.all_jobs().values()
        return not any(job_states.waits_for_resources(job) for job in jobs)

    async def launch(self, uid: PodUid, request: JobRequest) -> JobId:
        """The job, started. Raises NotNow, LaunchFailed, or a transient SlurmError that may hide a success."""
        files = self._settings.files.pod(uid)
        runner = ["python3", "-IS", str(self._settings.files.runner), "step", self.site.library]
        task = [*_TASK, str(files.job_log), *runner, str(files.root)]
        partition = request.spec.asked_partition
        self._under_way += 1
        try:
            async with self._slots:
                job_id = await asyncio.to_thread(self._start, request.spec, task)
        except NotNow:
            _, pause_s = self._pauses.get(partition, (0.0, _PAUSE_S / 2))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._pauses[partition] = (time.monotonic() + pause_s, pause_s)
            raise
        finally:
            self._under_way -= 1
        self._pauses.pop(partition, None)
        return job_id

    def _start(self, spec: JobSpec, task: Sequence[str]) -> JobId:
        around = {**self._environment, **spec.environment}
        return immediate.start(spec, task, around, async_steps=self.site.async_steps)


class LaunchKeeper:
    """Looks after jobs that were started at once and have no runner to tell of them."""

    def __init__(
        self,
        settings: Settings,
        slurm: Slurm,
        watch: JobWatch,
        launcher: Launcher,
        is_linked: Callable[[PodUid], bool],
        disowned: Callable[[PodUid, JobId], Awaitable[None]],
    ) -> None:
        self._settings, self._slurm, self._watch, self._launcher = settings, slurm, watch, launcher
        self._is_linked, self._disowned = is_linked, disowned
        self._suspects: set[JobId] = set()  # had no step when last looked at
        self._idle_since_s: dict[JobId, float] = {}  # have a step, and nobody has begun there

    async def run(self) -> None:
        await self._launcher.find_out()
        began_s = time.monotonic()
        while True:
            if time.monotonic() - began_s < _LEFT_BEHIND_S:
                await asyncio.to_thread(self._let_go_of_sruns)
            try:
                await self._look()
            except SlurmletError as error:
                log.warning("jobs that were started at once: %s", error.message)
            await asyncio.sleep(_LOOK_S)

    def _let_go_of_sruns(self) -> None:
        """Of a hub that died between the start of a pod and this. One whose pod has not begun is still needed."""
        for pid, line in immediate.left_behind(f"{self._settings.files.pods}/"):
            if (Path(line.rstrip().rpartition(" ")[2]) / "claim").exists():
                log.info("letting go of srun %s that an earlier hub left", pid)
                immediate.let_go(pid)

    async def _look(self) -> None:
        alone = {
            job.job_id: (uid, job) for uid, job in self._watch.all_jobs().items() if self._is_alone(uid, job)
        }
        ours: dict[JobId, PodUid] = {}
        with_step: set[JobId] = set()
        if alone:
            at_once = await asyncio.to_thread(self._started_at_once, [uid for uid, _ in alone.values()])
            ours = {job_id: uid for job_id, (uid, _) in alone.items() if uid in at_once}
        if ours:
            with_step = await asyncio.to_thread(immediate.steps)
        without = ours.keys() - with_step
        await self._look_for_idle_steps({job_id: uid for job_id, uid in ours.items() if job_id in with_step})
        # Twice in a row: a step may just be coming, and what squeue told of the job may just be outdated.
        for job_id in without & self._suspects:
            await self._finish(alone[job_id][0], job_id)
        self._suspects = without

    async def _look_for_idle_steps(self, found: dict[JobId, PodUid]) -> None:
        now_s = time.monotonic()
        idle = {
            job_id: uid for job_id, uid in found.items() if not await asyncio.to_thread(self._is_begun, uid)
        }
        self._idle_since_s = {job_id: self._idle_since_s.get(job_id, now_s) for job_id in idle}
        for job_id, uid in idle.items():
            if now_s - self._idle_since_s[job_id] >= _NEVER_BEGAN_S:
                await self._start_over(uid, job_id)

    def _is_begun(self, uid: PodUid) -> bool:
        """Or about to: its srun is at work."""
        files = self._settings.files.pod(uid)
        return files.claim.exists() or any(immediate.left_behind(f"{files.root}"))

    def _is_alone(self, uid: PodUid, job: Job) -> bool:
        return job_states.fate_of(job).stage is Stage.RUNNING and not self._is_linked(uid)

    def _started_at_once(self, uids: Sequence[PodUid]) -> set[PodUid]:
        notes = ((uid, read_job_file(self._settings.files.pod(uid))) for uid in uids)
        return {uid for uid, note in notes if note.get("lane") == LANE}

    async def _finish(self, uid: PodUid, job_id: JobId) -> None:
        """Its step is over, or never came."""
        files = self._settings.files.pod(uid)
        if not await asyncio.to_thread(files.claim.exists):
            await self._start_over(uid, job_id)
            return
        status = await asyncio.to_thread(self._status, uid, job_id)
        log.info("Slurm job %s outlived its step: ending it with %s", job_id, status)
        if not await self._complete(job_id, status):
            await self._slurm.cancel([job_id])
        self._watch.expect(uid, f"end {job_id}")

    async def _complete(self, job_id: JobId, status: int | None) -> bool:
        if status is None or self._launcher.site.problem:
            return False
        try:
            await asyncio.to_thread(immediate.complete, self._launcher.site.library, job_id, status)
        except SlurmletError as error:
            log.warning("Slurm job %s: %s", job_id, error.message)
            return False
        return True

    async def _start_over(self, uid: PodUid, job_id: JobId) -> None:
        """The pod never began. Its claim is taken while the job is ended, so that it does not begin in it now."""
        claim = self._settings.files.pod(uid).claim
        try:
            await asyncio.to_thread(claim.touch, 0o600, exist_ok=False)
        except OSError:
            return
        log.info("Slurm job %s runs, and its pod never began: ending it", job_id)
        try:
            await self._slurm.cancel([job_id])
        finally:
            await asyncio.to_thread(claim.unlink, missing_ok=True)
        await self._disowned(uid, job_id)

    def _status(self, uid: PodUid, job_id: JobId) -> int | None:
        report = read_json(self._settings.files.pod(uid).report) or {}
        if report.get("phase") == "Done" and report.get("exit_code") is not None:
            return int(report["exit_code"]) << 8
        return immediate.step_status(job_id)
