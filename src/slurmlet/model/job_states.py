"""The one table from Slurm's job states to what becomes of the pod. No other module knows a Slurm state by name.

A state is a *stage* in the life of the job; the ended ones also carry the pod's reason and message. `unknown` states of
a newer Slurm count as alive, so that nobody's pod is failed because of a state that is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from slurmlet.model.slurm_values import EndedJob, Job


class Stage(Enum):
    QUEUED = "queued"  # no resources yet
    RUNNING = "running"
    ENDING = "ending"  # over, still cleaning up
    ENDED = "ended"


@dataclass(frozen=True)
class _Row:
    stage: Stage
    reason: str = ""
    message: str = ""
    # True when the runner ended the job by itself, so that its report is the truth about the pod.
    by_itself: bool = False


_TABLE: dict[str, _Row] = {
    "PENDING": _Row(Stage.QUEUED),
    "CONFIGURING": _Row(Stage.QUEUED),
    "REQUEUED": _Row(Stage.QUEUED),
    "REQUEUE_FED": _Row(Stage.QUEUED),
    "REQUEUE_HOLD": _Row(Stage.QUEUED),
    "RESV_DEL_HOLD": _Row(Stage.QUEUED),
    "SPECIAL_EXIT": _Row(Stage.QUEUED),
    "POWER_UP_NODE": _Row(Stage.QUEUED),
    "RUNNING": _Row(Stage.RUNNING),
    "SUSPENDED": _Row(Stage.RUNNING),
    "STOPPED": _Row(Stage.RUNNING),
    "SIGNALING": _Row(Stage.RUNNING),
    "RESIZING": _Row(Stage.RUNNING),
    "EXPEDITING": _Row(Stage.RUNNING),
    "COMPLETING": _Row(Stage.ENDING),
    "STAGE_OUT": _Row(Stage.ENDING),
    "COMPLETED": _Row(Stage.ENDED, "RunnerLost", "ended without a report from its runner", by_itself=True),
    "FAILED": _Row(Stage.ENDED, "JobFailed", "failed before its runner could report", by_itself=True),
    "CANCELLED": _Row(Stage.ENDED, "JobCancelled", "was cancelled"),
    "TIMEOUT": _Row(Stage.ENDED, "JobTimeout", "reached its time limit"),
    "DEADLINE": _Row(Stage.ENDED, "JobDeadline", "missed its deadline"),
    # Also of a job in which one process was killed and the runner went on: then its report tells the rest.
    "OUT_OF_MEMORY": _Row(
        Stage.ENDED, "OutOfMemory", "was killed for using more memory than it asked for", by_itself=True
    ),
    "NODE_FAIL": _Row(Stage.ENDED, "NodeFailure", "lost its node"),
    "BOOT_FAIL": _Row(Stage.ENDED, "NodeFailure", "ended because its node did not boot"),
    "PREEMPTED": _Row(Stage.ENDED, "Preempted", "was preempted by another job"),
    "REVOKED": _Row(Stage.ENDED, "JobRevoked", "was revoked: another cluster of the federation ran it"),
    "LAUNCH_FAILED": _Row(Stage.ENDED, "JobLaunchFailed", "could not be launched on its node"),
    "RECONFIG_FAIL": _Row(Stage.ENDED, "NodeFailure", "ended because its node could not be reconfigured"),
}
_UNKNOWN = _Row(Stage.RUNNING)
_GONE = _Row(Stage.ENDED, "JobLost", "is no longer known to Slurm")


@dataclass(frozen=True)
class Fate:
    """What the state of the job means for the pod."""

    stage: Stage
    reason: str = ""
    message: str = ""
    by_itself: bool = False
    pending_reason: str = ""


def is_over(state: str) -> bool:
    return _TABLE.get(state, _UNKNOWN).stage is Stage.ENDED


def stage_of(state: str) -> Stage:
    return _TABLE.get(state, _UNKNOWN).stage


def holds_resources(state: str) -> bool:
    """Whether the job is still in Slurm's hands: to be cancelled, to be waited for."""
    return not is_over(state)


def waits_for_resources(job: Job) -> bool:
    """Whether Slurm has looked for a place and found none; not one that is held, or waits for a time or another job."""
    return _TABLE.get(job.state, _UNKNOWN).stage is Stage.QUEUED and job.reason in ("Resources", "Priority")


def never_placed(job: Job) -> bool:
    """What a request to start at once leaves when it is refused: an ended job that never had a node."""
    return job.state == "FAILED" and not job.nodes


def fate_of(job: Job) -> Fate:
    """From a line of squeue."""
    row = _TABLE.get(job.state, _UNKNOWN)
    if row.stage is Stage.ENDED:
        return _ended(job.job_id, row, detail=job.reason)
    return Fate(row.stage, pending_reason=job.reason if row.stage is Stage.QUEUED else "")


def fate_of_ended(job: EndedJob, user_names: dict[int, str] | None = None) -> Fate:
    """From accounting, which also knows who cancelled."""
    row = _TABLE.get(job.state, _UNKNOWN)
    if row.stage is not Stage.ENDED:
        return Fate(row.stage)
    detail = job.reason
    if job.cancelled_by_uid is not None:
        name = (user_names or {}).get(job.cancelled_by_uid, f"uid {job.cancelled_by_uid}")
        return _ended(job.job_id, row, by=f" by {name}")
    if job.state == "FAILED":
        detail = f"signal {job.signal}" if job.signal else f"exit code {job.exit_code}"
    return _ended(job.job_id, row, detail=detail)


def fate_of_runner(node: str, exit_code: int | None) -> Fate:
    """A runner without a job of its own ended: its report tells the rest, if it left one."""
    how = "ended with its agent" if exit_code is None else f"ended without a report (exit code {exit_code})"
    return Fate(Stage.ENDED, "RunnerLost", f"the pod's runner on node {node} {how}", by_itself=True)


RUNNING = Fate(Stage.RUNNING)


def fate_of_lost(job_id: str) -> Fate:
    """Neither squeue nor accounting knows the job any more."""
    return _ended(job_id, _GONE)


def _ended(job_id: str, row: _Row, *, by: str = "", detail: str = "") -> Fate:
    told = f" ({detail})" if detail else ""
    return Fate(Stage.ENDED, row.reason, f"Slurm job {job_id} {row.message}{by}{told}", row.by_itself)
