"""A trace from a file, whichever of the formats it is in, or one that is made up from a seed, the same for everybody."""

from __future__ import annotations

import math
import random
from itertools import islice
from pathlib import Path

from slurmlet.operators.provisioning.simulator.sacct_trace import read_sacct
from slurmlet.operators.provisioning.simulator.swf_trace import read_swf
from slurmlet.operators.provisioning.simulator.trace_job import TraceError, TraceJob

_DAY_S = 86_400.0


def read_trace(path: Path) -> list[TraceJob]:
    """By submission. The first line that is not a comment tells the format: sacct's has a header with bars."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error
    first = next((line for line in lines if line.strip() and not line.startswith(";")), "")
    try:
        found = read_sacct(lines) if "|" in first else read_swf(lines)
    except TraceError as error:
        raise TraceError(f"{path}: {error.message}", hint=error.hint) from error
    if not found:
        raise TraceError(f"{path}: holds no job that ran")
    return sorted(found, key=lambda job: (job.submit_s, job.job_id))


def generate(jobs: int, seed: int, *, cpus_per_node: int = 16, nodes: int = 32) -> list[TraceJob]:
    """A made-up month at a small site: days busier than nights, bursts of equal small jobs, some of several nodes.

    Sizes and run times are drawn as published workloads have them: most jobs short and narrow, a few long ones that hold
    most of the hours (log-normal), and users who ask for more time than they use.
    """
    draw = random.Random(seed)  # noqa: S311
    found: list[TraceJob] = []
    at_s = 0.0
    # What a job costs on the average decides how many fit into a day at two thirds of the pool.
    gap_s = 1400.0 * 32 / nodes / 3
    while len(found) < jobs:
        hour = at_s % _DAY_S / 3600
        busy = 0.35 + 0.65 * max(0.0, math.sin((hour - 6) / 24 * 2 * math.pi))
        at_s += draw.expovariate(busy / gap_s)
        burst = 1 if draw.random() < 0.8 else draw.randint(4, 40)
        template = _draw_job(draw, cpus_per_node, nodes)
        for _ in range(min(burst, jobs - len(found))):
            run_s = max(10.0, template.run_s * draw.lognormvariate(0, 0.3))
            limit_s = _rounded_limit_s(run_s * draw.choice((1.2, 2, 4)))
            found.append(
                TraceJob(
                    job_id=str(len(found) + 1), submit_s=round(at_s, 1), run_s=round(run_s, 1), nodes=template.nodes,
                    cpus=template.cpus, memory_mb=template.memory_mb, limit_s=limit_s, user=f"user{draw.randint(1, 9)}",
                    held_s=template.held_s,
                )
            )  # fmt: skip
    return found


def _draw_job(draw: random.Random, cpus_per_node: int, nodes: int) -> TraceJob:
    run_s = min(draw.lognormvariate(6.3, 1.6), 2 * _DAY_S)
    held_s = draw.expovariate(1 / 3600) if draw.random() < 0.05 else 0.0
    if draw.random() < 0.15:
        wide = min(nodes, draw.choice((2, 2, 2, 4, 4, 8)))
        return TraceJob("", 0, run_s, wide, wide * cpus_per_node, held_s=held_s)
    cpus = min(cpus_per_node, draw.choice((1, 1, 1, 2, 4, 4, 8, 16)))
    return TraceJob(
        "", 0, run_s, 1, cpus, memory_mb=cpus * draw.choice((500, 1000, 2000, 3000)), held_s=held_s
    )


def _rounded_limit_s(limit_s: float) -> float:
    return math.ceil(limit_s / 900) * 900.0


def to_swf(jobs: list[TraceJob], *, note: str) -> str:
    """So that a trace that was made up can be kept, and read by others' simulators."""
    lines = [f"; {line}" for line in ("Version: 2.2", f"Note: {note}", f"MaxJobs: {len(jobs)}")]
    for number, job in enumerate(islice(jobs, None), 1):
        memory_kb = job.memory_mb * 1024 // job.cpus if job.memory_mb else -1
        limit_s = round(job.limit_s) if job.limit_s is not None else -1
        fields = (
            number, round(job.submit_s), -1, round(job.run_s), job.cpus, -1, memory_kb, job.cpus, limit_s, memory_kb, 1,
            -1, -1, -1, -1, -1, -1, -1,
        )  # fmt: skip
        lines.append(" ".join(map(str, fields)))
    return "\n".join([*lines, ""])
