"""Where this process stands in Slurm, and the srun that brings it to where it should be. Pure.

Whatever way a person comes (a login host, an sbatch script, a shell of salloc's, their own srun), the work is done by one
step with a task on each host: the first drives, the others serve their host.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.model.allocation_node import node_name

# Slurm's numbers for steps that are none: batch script, interactive shell and the like.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_SAME_FOR_ALL_TASKS = (
    "SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_JOB_START_TIME", "SLURM_SRUN_COMM_HOST",
    "SLURM_SRUN_COMM_PORT", "SLURM_RESTART_COUNT",
)  # fmt: skip


@dataclass(frozen=True)
class Task:
    """This process as a task of a step."""

    job_id: str
    number: int
    is_first_here: bool
    host: str
    hosts: str  # as Slurm writes a list
    key: str  # the same for all tasks of the step, and for no other step ever

    @property
    def drives(self) -> bool:
        return self.number == 0


def task_here(environ: Mapping[str, str]) -> Task | None:
    """None outside a step: on a login host, in a batch script, in a shell of salloc's."""
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdigit() or int(step) >= _FIRST_SPECIAL_STEP or "SLURM_PROCID" not in environ:
        return None
    said = "\0".join(environ.get(name, "") for name in _SAME_FOR_ALL_TASKS)
    return Task(
        job_id=environ["SLURM_JOB_ID"],
        number=int(environ["SLURM_PROCID"]),
        is_first_here=environ.get("SLURM_LOCALID", "0") == "0",
        host=environ.get("SLURMD_NODENAME", ""),
        hosts=environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", ""),
        key=f"{environ['SLURM_JOB_ID']}-{hashlib.sha256(said.encode()).hexdigest()[:10]}",
    )


def srun_argv(
    environ: Mapping[str, str], options: Sequence[str], program: Sequence[str], *, terminal: bool
) -> list[str]:
    """The srun that starts `program` on every host. `terminal`: the person's shell wants one of its own."""
    # Without the second option srun keeps the first Ctrl-C to itself.
    argv = ["srun", "--kill-on-bad-exit=1", "--disable-status"]
    nodes = _given(options, "-N", "--nodes") or environ.get("SLURM_JOB_NUM_NODES") or "1"
    if environ.get("SLURM_JOB_ID"):
        # All that the job holds, shared with whatever else runs in it.
        argv += ["--overlap", f"--nodes={nodes}", "--mem=0"]
    elif not _given(options, "-J", "--job-name"):
        argv.append("--job-name=slurmlet-run")
    tasks = _given(options, "-n", "--ntasks")
    if not tasks and nodes.isdigit():
        tasks = nodes
        argv += [f"--ntasks={nodes}", "--ntasks-per-node=1"]
    if terminal:
        argv.append("--pty")
    elif tasks:
        # Only the first task reads. srun takes the number for a file's name unless it knows how many tasks there are.
        argv.append("--input=0")
    return [*argv, *options, *program]


def _given(options: Sequence[str], short: str, long: str) -> str:
    """The last value of an option in whichever of its spellings; "" when it is not there."""
    found = ""
    for number, word in enumerate(options):
        if word in (short, long):
            found = options[number + 1] if number + 1 < len(options) else ""
        elif word.startswith(f"{long}="):
            found = word.partition("=")[2]
        elif word.startswith(short) and not word.startswith("--"):
            found = word.removeprefix(short)
    return found


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Our tasks start programs of their own: they must not be bound to the one CPU of a task."""
    changed = {**environ, "SLURM_CPU_BIND": "none"}
    if environ.get("SLURM_JOB_ID"):
        # Of the surrounding job; they would contradict what the command line says.
        for name in ("SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_CPUS_PER_TASK", "SLURM_MEM_PER_CPU",
                     "SLURM_NTASKS", "SLURM_NPROCS", "SLURM_TRES_PER_TASK"):  # fmt: skip
            changed.pop(name, None)
    return changed


def agent_argv(shared: Path, host: str) -> list[str]:
    """What serves a host of the allocation, in place of the task there."""
    # Isolated, and without site: the agent needs the standard library only.
    node = shared / "nodes" / node_name(host)
    return [sys.executable, "-IS", str(shared / "runner.pyz"), "agent", "--run", str(node)]
