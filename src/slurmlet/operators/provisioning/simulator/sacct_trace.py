"""What `sacct --parsable2 --allusers --allocations --format=…` prints, with its header, in any order of columns. Pure.

    sacct -P -a -X -S 2026-01-01 -E 2026-02-01 -o \
      JobID,User,Partition,Submit,Eligible,Start,End,Elapsed,Timelimit,NNodes,ReqCPUS,ReqMem,ReqTRES,Constraints,State

Steps are left out, and jobs that never ran. Times are sacct's own or, with SLURM_TIME_FORMAT=%s, seconds since the epoch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime

from slurmlet.model.slurm_admin_values import Gres
from slurmlet.operators.provisioning.simulator.trace_job import TraceError, TraceJob, whole

_NEEDED = ("jobid", "submit", "elapsed", "nnodes")
_ELAPSED = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)(?:\.\d+)?")
_MEMORY = re.compile(r"([0-9.]+)([KMGTP]?)([nc]?)", re.IGNORECASE)
_UNITS_MB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_NOT_KNOWN = ("", "Unknown", "None", "N/A")


def read_sacct(lines: Iterable[str]) -> list[TraceJob]:
    names: list[str] = []
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        values = line.rstrip("\n").split("|")
        if not names:
            names = [value.strip().lower() for value in values]
            missing = [name for name in _NEEDED if name not in names]
            if missing:
                raise TraceError(
                    f"line {number}: the header has no column {missing[0]!r}", hint=__doc__ or ""
                )
            continue
        row = dict(zip(names, (value.strip() for value in values), strict=False))
        if len(values) < len(names):
            raise TraceError(
                f"line {number}: has {len(values)} fields, expected the {len(names)} of the header"
            )
        job = _job(row, number)
        if job is not None:
            found.append(job)
    first_s = min((job.submit_s for job in found), default=0.0)
    return [_since(job, first_s) for job in found]


def _since(job: TraceJob, first_s: float) -> TraceJob:
    return replace(job, submit_s=job.submit_s - first_s)


def _job(row: Mapping[str, str], line: int) -> TraceJob | None:
    if "." in row.get("jobid", "") or "+" in row.get("jobid", ""):
        return None
    run_s = _duration_s(row.get("elapsed", ""), line, "Elapsed")
    if not run_s or row.get("start", "0") in _NOT_KNOWN:
        return None
    submit_s = _time_s(row.get("submit", ""), line, "Submit")
    eligible_s = (
        _time_s(row["eligible"], line, "Eligible")
        if row.get("eligible") not in (None, *_NOT_KNOWN)
        else submit_s
    )
    nodes = whole(row.get("nnodes", ""), line, "NNodes", least=1)
    cpus = whole(
        row.get("reqcpus") or row.get("ncpus") or row.get("alloccpus") or str(nodes), line, "ReqCPUS"
    )
    cpus = max(cpus, nodes)
    limit = row.get("timelimit", "")
    return TraceJob(
        job_id=row["jobid"],
        submit_s=submit_s,
        run_s=run_s,
        nodes=nodes,
        cpus=cpus,
        memory_mb=_memory_mb(row.get("reqmem", ""), nodes, cpus, line),
        gres=_gres(row.get("reqtres", "")),
        limit_s=_duration_s(limit, line, "Timelimit")
        if limit not in ("UNLIMITED", "Partition_Limit")
        else None,
        partition=row.get("partition", "").partition(",")[0],
        features=row.get("constraints", ""),
        user=row.get("user", ""),
        held_s=max(0.0, eligible_s - submit_s),
    )


def _time_s(text: str, line: int, field: str) -> float:
    if text.isdecimal():
        return float(text)
    try:
        # sacct prints local time without saying so; differences are what counts.
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        raise TraceError(f"line {line}: field {field!r} is {text[:40]!r}, expected a time") from None


def _duration_s(text: str, line: int, field: str) -> float | None:
    if text in _NOT_KNOWN:
        return None
    match = _ELAPSED.fullmatch(text)
    if match is None:
        raise TraceError(
            f"line {line}: field {field!r} is {text[:40]!r}, expected [days-]hours:minutes:seconds"
        )
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _memory_mb(text: str, nodes: int, cpus: int, line: int) -> int:
    """Of the whole job. "4Gc" is for each CPU and "4Gn" for each node (up to Slurm 21.08), "4G" for the job."""
    if text in (*_NOT_KNOWN, "0"):
        return 0
    match = _MEMORY.fullmatch(text)
    if match is None:
        raise TraceError(f"line {line}: field 'ReqMem' is {text[:40]!r}, expected a size such as 4G")
    amount, unit, each = match.groups()
    times = {"n": nodes, "c": cpus}.get(each.lower(), 1)
    return int(float(amount) * _UNITS_MB[unit.upper()] * times)


def _gres(tres: str) -> Gres:
    found: dict[str, int] = {}
    for part in tres.split(","):
        name, _, count = part.partition("=")
        if name.startswith("gres/") and count.isdecimal():
            found[name.removeprefix("gres/")] = int(count)
    # "gres/gpu=4,gres/gpu:a100=4" tells the same cards twice.
    typed = {name.partition(":")[0] for name in found if ":" in name}
    return tuple(sorted((name, count) for name, count in found.items() if name not in typed))
