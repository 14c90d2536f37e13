"""The Standard Workload Format: eighteen numbers a line, -1 for what is not known, comments after a semicolon. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from slurmlet.operators.provisioning.simulator.trace_job import TraceError, TraceJob, whole

_FIELDS = (
    "job number", "submit time", "wait time", "run time", "allocated processors", "average CPU time", "used memory",
    "requested processors", "requested time", "requested memory", "status", "user", "group", "executable", "queue",
    "partition", "preceding job", "think time",
)  # fmt: skip


def read_swf(lines: Iterable[str]) -> list[TraceJob]:
    """Jobs that ran; those that never started (no run time or no processors) are left out."""
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition(";")[0].split()
        if not text:
            continue
        if len(text) < len(_FIELDS):
            raise TraceError(
                f"line {number}: has {len(text)} fields, expected the {len(_FIELDS)} of the Standard Workload Format"
            )
        values = {name: whole(value, number, name) for name, value in zip(_FIELDS, text, strict=False)}
        job = _job(values)
        if job is not None:
            found.append(job)
    return found


def _job(values: dict[str, int]) -> TraceJob | None:
    cpus = (
        values["requested processors"]
        if values["requested processors"] > 0
        else values["allocated processors"]
    )
    if cpus <= 0 or values["run time"] < 0 or values["submit time"] < 0:
        return None
    # Memory is in KiB for each processor.
    memory_kb = values["requested memory"] if values["requested memory"] > 0 else values["used memory"]
    return TraceJob(
        job_id=str(values["job number"]),
        submit_s=float(values["submit time"]),
        run_s=float(values["run time"]),
        nodes=1,
        cpus=cpus,
        memory_mb=max(0, memory_kb * cpus // 1024),
        limit_s=float(values["requested time"]) if values["requested time"] > 0 else None,
        partition=str(values["partition"]) if values["partition"] > 0 else "",
        user=str(values["user"]) if values["user"] >= 0 else "",
    )
