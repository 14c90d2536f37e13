"""How long `slurmlet run` needs: from its call to the workload's first instruction, and from the workload's end to its own.

Beside a bare srun of the same size, in turns. The first instruction writes an empty file on the shared file system and is
the workload's last one too, so what comes after the file's time is the end of everything.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurmlet.base.processes import CommandError, run
from slurmlet.bench import start_marks
from slurmlet.bench.statistics import Summary, summary
from slurmlet.slurm.task import run_task

_LIMIT_S = 120.0
# Every task of a bare srun runs the same words; one of them is the first.
_FIRST_ONLY = '[ "${SLURM_PROCID:-0}" != 0 ] || : > "$1"'
_SLURMLET = (sys.executable, "-P", "-c", "from slurmlet.cli.main import main; main()")


@dataclass(frozen=True)
class Size:
    """One number of nodes."""

    nodes: int
    srun: Summary
    start: Summary
    end: Summary

    def as_json(self) -> dict[str, Any]:
        parts = {name: getattr(self, name).as_json() for name in ("srun", "start", "end")}
        return {"nodes": self.nodes, **parts}


def measure(
    sizes: Sequence[int],
    runs: int,
    options: Sequence[str],
    on_run: Callable[[int, float, float, float], None],
) -> list[Size]:
    """`options` are srun's, for both."""
    taken: dict[int, list[tuple[float, float, float]]] = {nodes: [] for nodes in sizes}
    with start_marks.workspace() as directory:
        for nodes in sizes:
            _once(directory / f"warm-{nodes}", nodes, options)
        for number in range(runs):
            for nodes in sizes:
                bare_s = _srun(directory / f"bare-{nodes}-{number}", nodes, options)
                start_s, end_s = _once(directory / f"run-{nodes}-{number}", nodes, options)
                taken[nodes].append((bare_s, start_s, end_s))
                on_run(nodes, bare_s, start_s, end_s)
    return [
        Size(nodes, *(summary(column) for column in zip(*samples, strict=True)))
        for nodes, samples in taken.items()
    ]


def _once(mark: Path, nodes: int, options: Sequence[str]) -> tuple[float, float]:
    began_s = time.time()
    run(
        [*_SLURMLET, "run", f"-N{nodes}", *options, "--", "sh", "-c", f": > {shlex.quote(str(mark))}"],
        timeout_s=_LIMIT_S,
    )
    ended_s = time.time()
    first_s = start_marks.moment_s(mark)
    return first_s - began_s, ended_s - first_s


def _srun(mark: Path, nodes: int, options: Sequence[str]) -> float:
    began_s = time.time()
    done = run_task([f"-N{nodes}", *options], ["sh", "-c", _FIRST_ONLY, "sh", str(mark)], timeout_s=_LIMIT_S)
    if not done.ok:
        raise CommandError(done.argv, done.code, done.stderr)
    return start_marks.moment_s(mark) - began_s
