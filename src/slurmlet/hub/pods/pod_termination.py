"""From a pod that is to go to one that is gone: runner stopped, job over, object deleted, files removed. In that order."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time

from slurmlet.base.clock import parse_rfc3339
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.status_writer import delete_object, write_status
from slurmlet.hub.pods.tools import Tools

log = logging.getLogger(__name__)
_RETRY_S = 2.0
_SOON_S = 0.3
# A runner that was told to stop may take its grace and this much more before its job is cancelled.
_STOP_SLACK_S = 5.0
# How long a new hub waits for the runner of a pod that is being deleted before it cancels the job.
_DIAL_IN_S = 6.0
# A finished runner leaves by itself; one that has not after this long is cancelled.
_LINGER_S = 15.0


async def end(tools: Tools, state: PodState) -> float | None:
    """The object is being deleted: stop the pod, see the job gone, then let the object go."""
    if await _job_is_over(tools, state):
        if not state.terminal:
            await write_status(tools.client, state)
        await delete_object(tools.client, state)
        return _RETRY_S
    metadata = state.pod["metadata"]
    grace_s = int(metadata.get("deletionGracePeriodSeconds") or 0)
    if state.live_link is not None:
        if state.stop_sent_grace_s != grace_s:
            state.stop_sent_grace_s = grace_s
            await state.live_link.tell("stop", grace_s=grace_s, reason="deleted")
        overdue_s = time.time() - parse_rfc3339(metadata["deletionTimestamp"]).timestamp()
        if overdue_s > _STOP_SLACK_S:
            await _cancel(tools, state)
    elif state.runner_done:
        await linger(tools, state)
    elif state.queued or time.monotonic() - state.born_s > _DIAL_IN_S:
        await _cancel(tools, state)
    tools.watch.poke()
    return _SOON_S if state.runner_done or state.cancelled else 1.0


async def bury(tools: Tools, state: PodState) -> float | None:
    """The object is gone: no job may outlive it, no file either. None when all is done."""
    if not await _job_is_over(tools, state):
        state.done_since_s = state.done_since_s or time.monotonic()
        overdue = time.monotonic() - state.done_since_s > _STOP_SLACK_S
        if state.live_link is not None and not overdue:
            if state.stop_sent_grace_s != 0:
                state.stop_sent_grace_s = 0
                await state.live_link.tell("stop", grace_s=0, reason="deleted by force")
        elif overdue or not state.runner_done:
            await _cancel(tools, state)
        tools.watch.poke()
        return _SOON_S
    await asyncio.to_thread(shutil.rmtree, tools.settings.files.pod(state.uid).root, ignore_errors=True)
    if state.job_id is not None:
        tools.watch.forget(state.job_id)
    return None


async def expire(tools: Tools, state: PodState) -> float | None:
    """activeDeadlineSeconds is over: the pod ends as Failed, with its grace if it runs."""
    reason, message = "DeadlineExceeded", "Pod was active on the node longer than the specified deadline"
    if state.live_link is not None and not state.runner_done:
        grace_s = int(state.pod["spec"].get("terminationGracePeriodSeconds") or 0)
        if state.stop_sent_grace_s is None:
            state.stop_sent_grace_s = grace_s
            tools.events.pod_event(state.pod, "Normal", reason, message)
            problem = {"reason": reason, "message": message}
            await state.live_link.tell("stop", grace_s=grace_s, reason=message, problem=problem)
        return grace_s + _STOP_SLACK_S
    if not state.runner_done:
        state.failed = (reason, message)
        if not await _job_is_over(tools, state):
            await _cancel(tools, state)
    await write_status(tools.client, state)
    return _RETRY_S


async def linger(tools: Tools, state: PodState) -> float | None:
    """The pod has ended; its job must end too."""
    if state.job_id is None or state.job_over:
        return None
    state.done_since_s = state.done_since_s or time.monotonic()
    if time.monotonic() - state.done_since_s > _LINGER_S:
        await _cancel(tools, state)
    return _LINGER_S


async def _job_is_over(tools: Tools, state: PodState) -> bool:
    if state.job_id is not None:
        return state.all_over
    if not tools.settings.files.pod(state.uid).job.exists():
        return True
    # An intent whose outcome is unknown: ask Slurm before the pod may go.
    await tools.watch.refresh()
    state.job_id = tools.lanes.of(state.node).known(state.uid)
    return state.job_id is None


async def _cancel(tools: Tools, state: PodState) -> None:
    assert state.job_id is not None
    if not state.cancelled:
        log.info("pod %s: cancelling it in Slurm job %s", state.name, state.job_id)
    state.cancelled = True
    await tools.lanes.of(state.node).cancel(state)
