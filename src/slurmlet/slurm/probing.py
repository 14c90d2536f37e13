"""What `slurmlet doctor` asks of Slurm: its configuration, and one tiny job. Never leaves a job behind."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from slurmlet.base.processes import CommandError, Completed, run

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "srun")
_CONFIG_LINE = re.compile(r"^(\w+)\s*=\s?(.*?)\s*$")
_CONFIG_TIMEOUT_S = 15.0
# Of Slurm's own variables only those that say where the cluster is: the others belong to an allocation the doctor may
# have been started in, or are defaults that the hub's jobs do not get either.
_SLURM_VARIABLE = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC)_")
_KEPT = ("SLURM_CONF", "SLURM_JWT")


@dataclass(frozen=True)
class ProbeJob:
    """What came of the job. `timed_out`: no node was free in time; `problem`: Slurm or the node said no."""

    output: str = ""
    problem: str = ""
    timed_out: bool = False


def missing_commands() -> list[str]:
    return [name for name in COMMANDS if shutil.which(name) is None]


def parse_config(text: str) -> dict[str, str]:
    """`scontrol show config` as a mapping; lines of other shapes are headings."""
    found = (_CONFIG_LINE.match(line) for line in text.splitlines())
    return {match[1]: match[2] for match in found if match}


def show_config() -> dict[str, str]:
    return parse_config(
        run(["scontrol", "show", "config"], timeout_s=_CONFIG_TIMEOUT_S, env=environment()).stdout
    )


def run_on_node(program: str, *, partition: str | None, wait_s: float) -> ProbeJob:
    """Run a Python program on some compute node. It goes in by stdin: no file, no argument carries it."""
    argv = [
        "srun", "--quiet", "--job-name=slurmlet-doctor", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=100M",
        "--time=2", "--mpi=none", "--chdir=/", "--export=ALL",
    ]  # fmt: skip
    if partition:
        argv.append(f"--partition={partition}")
    try:
        done: Completed = run(
            [*argv, "python3", "-"], stdin=program, timeout_s=wait_s, env=environment(), check=False
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


def environment(source: Mapping[str, str] | None = None) -> dict[str, str]:
    variables = os.environ if source is None else source
    return {
        name: value for name, value in variables.items() if name in _KEPT or not _SLURM_VARIABLE.match(name)
    }
