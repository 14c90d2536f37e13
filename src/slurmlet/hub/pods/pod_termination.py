"""From a pod that is to go to one that is gone: runner stopped, job over, object deleted, files removed. In that order."""

from __future__ import annotations

import asyncio
import logging
import shutil

from slurmlet.base.clock import Clock, parse_rfc3339
from slurmlet.base.layout import ClusterFiles
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.hub.pods.lanes import Lanes
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.status_writer import StatusWriter
from slurmlet.kube.events import EventRecorder
from slurmlet.protocol.pod_report import Problem

log = logging.getLogger(__name__)
_RETRY_S = 2.0
_SOON_S = 0.3
# A runner that was told to stop may take its grace and this much more before its job is cancelled.
_STOP_SLACK_S = 5.0
# How long a new hub waits for the runner of a pod that is being deleted before it cancels the job.
_DIAL_IN_S = 6.0
# A finished runner leaves by itself; one that has not after this long is cancelled.
_LINGER_S = 15.0


class PodTermination:
    """Each method does the next thing and returns seconds until another look is due; None to wait for news."""

    def __init__(
        self,
        files: ClusterFiles,
        lanes: Lanes,
        watch: JobWatch,
        status: StatusWriter,
        events: EventRecorder,
        clock: Clock,
    ) -> None:
        self._files = files
        self._lanes = lanes
        self._watch = watch
        self._status = status
        self._events = events
        self._clock = clock

    async def delete(self, state: PodState) -> float | None:
        """The object is being deleted: stop the pod, see the job gone, then let the object go."""
        if await self._job_is_over(state):
            if not state.terminal:
                await self._status.write(state)
            await self._status.delete(state)
            return _RETRY_S
        metadata = state.pod["metadata"]
        grace_s = int(metadata.get("deletionGracePeriodSeconds") or 0)
        if state.live_link is not None:
            if state.stop_sent_grace_s != grace_s:
                state.stop_sent_grace_s = grace_s
                await state.live_link.tell({"type": "stop", "grace_s": grace_s, "reason": "deleted"})
            overdue_s = self._clock.time_s() - parse_rfc3339(metadata["deletionTimestamp"]).timestamp()
            if overdue_s > _STOP_SLACK_S:
                await self._cancel(state)
        elif state.runner_done:
            await self.linger(state)
        elif state.queued or self._clock.monotonic_s() - state.created_s > _DIAL_IN_S:
            await self._cancel(state)
        return _SOON_S if state.runner_done or state.cancelled else 1.0

    async def clean_up(self, state: PodState) -> float | None:
        """The object is gone: no job may outlive it, no file either. None when all is done."""
        if not await self._job_is_over(state):
            overdue = self._done_for_s(state) > _STOP_SLACK_S
            if state.live_link is not None and not overdue:
                if state.stop_sent_grace_s != 0:
                    state.stop_sent_grace_s = 0
                    await state.live_link.tell({"type": "stop", "grace_s": 0, "reason": "deleted by force"})
            elif overdue or not state.runner_done:
                await self._cancel(state)
            return _SOON_S
        await asyncio.to_thread(shutil.rmtree, self._files.pod(state.uid).root, ignore_errors=True)
        self._lanes.of(state.node).forget(state)
        return None

    async def expire(self, state: PodState) -> float | None:
        """activeDeadlineSeconds is over: the pod ends as Failed, with its grace if it runs."""
        reason, message = "DeadlineExceeded", "Pod was active on the node longer than the specified deadline"
        now_s = self._clock.monotonic_s()
        if state.live_link is not None and not state.runner_done:
            grace_s = int(state.pod["spec"].get("terminationGracePeriodSeconds") or 0)
            if state.stop_sent_grace_s is None:
                state.stop_sent_grace_s = grace_s
                # Kept when the runner dials in anew and is told again.
                state.stop_due_s = state.stop_due_s or now_s + grace_s + _STOP_SLACK_S
                self._events.pod_event(state.pod, "Normal", reason, message)
                problem: Problem = {"reason": reason, "message": message}
                await state.live_link.tell(
                    {"type": "stop", "grace_s": grace_s, "reason": message, "problem": problem}
                )
            if now_s < state.stop_due_s:
                return state.stop_due_s - now_s
        if not state.runner_done:
            # It never began, or its runner does not end it though its time is over.
            state.failed = (reason, message)
            if not await self._job_is_over(state):
                await self._cancel(state)
        await self._status.write(state)
        return _RETRY_S

    async def linger(self, state: PodState) -> float | None:
        """The pod has ended; its job must end too."""
        if state.job_id is None or state.job_over:
            return None
        if self._done_for_s(state) > _LINGER_S:
            await self._cancel(state)
        return _LINGER_S

    def _done_for_s(self, state: PodState) -> float:
        now_s = self._clock.monotonic_s()
        if state.done_since_s is None:
            state.done_since_s = now_s
        return now_s - state.done_since_s

    async def _job_is_over(self, state: PodState) -> bool:
        if state.job_id is not None:
            return state.all_over
        if not await asyncio.to_thread(self._files.pod(state.uid).job.exists):
            return True
        # An intent whose outcome is unknown: ask Slurm before the pod may go.
        await self._watch.refresh()
        state.job_id = await self._lanes.of(state.node).known(state.uid)
        return state.job_id is None

    async def _cancel(self, state: PodState) -> None:
        assert state.job_id is not None
        if not state.cancelled:
            log.info("pod %s: cancelling it in Slurm job %s", state.name, state.job_id)
        state.cancelled = True
        await self._lanes.of(state.node).cancel(state)
