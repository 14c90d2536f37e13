"""One program on a compute node through srun, waited for: what the doctor's probe and measurements need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmlet.base.processes import CommandError, Completed, run
from slurmlet.slurm.environment import command_environment

_NAME = "--job-name=slurmlet-doctor"


@dataclass(frozen=True)
class ProbeJob:
    """What came of the job. `timed_out`: no node was free in time; `problem`: Slurm or the node said no."""

    output: str = ""
    problem: str = ""
    timed_out: bool = False


def run_task(options: Sequence[str], argv: Sequence[str], *, timeout_s: float) -> Completed:
    """`options` are srun's. Raises CommandError where it does not end in time; its job ends with it."""
    return run(["srun", *options, *argv], timeout_s=timeout_s, env=command_environment(), check=False)


def run_on_node(program: str, *, partition: str | None, wait_s: float) -> ProbeJob:
    """Run a Python program on some compute node. It goes in by stdin: no file, no argument carries it."""
    argv = [
        "srun", "--quiet", _NAME, "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=100M", "--time=2",
        "--mpi=none", "--chdir=/", "--export=ALL",
    ]  # fmt: skip
    if partition:
        argv.append(f"--partition={partition}")
    try:
        done = run(
            [*argv, "python3", "-"], stdin=program, timeout_s=wait_s, env=command_environment(), check=False
        )
    except CommandError as error:
        return ProbeJob(problem=error.stderr, timed_out=error.transient)
    if done.ok:
        return ProbeJob(output=done.stdout)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return ProbeJob(output=done.stdout, problem=_cause(lines) or f"srun ended with {done.code}")


def _cause(lines: list[str]) -> str:
    """The first error line tells; what follows ("task 0: Exited with …") only echoes it."""
    errors = [line for line in lines if "error:" in line and "Exited with" not in line]
    return (errors or lines or [""])[0]
