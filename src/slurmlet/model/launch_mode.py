"""Which pods may start at once instead of being queued, and how their request is written for srun. Pure.

The default is "batch" (docs/decisions/0016 says why) unless `slurmlet up --launch` says otherwise; "auto" is at once where
nothing speaks against it. A request that only makes sense in a queue, or that holds more than one task, is always a batch
job: its script is what Slurm starts once, on the first node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurmlet.base.errors import RefusedPod
from slurmlet.model.sbatch_options import PREFIX
from slurmlet.model.slurm_values import Partition

LAUNCH_ANNOTATION = f"{PREFIX}launch"
AUTO, BATCH, IMMEDIATE = "auto", "batch", "immediate"
WAYS = (AUTO, BATCH, IMMEDIATE)

# What job_request writes for sbatch alone.
_SBATCH_ONLY = frozenset({"--no-requeue", "--output", "--open-mode"})
_SINGLE = frozenset({"--nodes", "--ntasks"})
_SAME = frozenset(
    f"--{name}"
    for name in (
        "account", "acctg-freq", "chdir", "comment", "constraint", "core-spec", "cpu-freq", "cpus-per-gpu",
        "cpus-per-task", "exclude", "export", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-task", "gres",
        "gres-flags", "hint", "job-name", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-per-cpu",
        "mem-per-gpu", "nice", "nodelist", "partition", "prefer", "priority", "profile", "qos", "reservation",
        "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-per-task", "wckey",
    )
)  # fmt: skip
_FREE_STATES = frozenset({"idle", "mixed", "mix"})


def launch_of(annotations: Mapping[str, str], default: str = BATCH) -> str:
    """What the pod asks for, else what holds for its cluster. Raises RefusedPod."""
    asked = annotations.get(LAUNCH_ANNOTATION, default)
    if asked not in WAYS:
        raise RefusedPod(
            f"annotation {LAUNCH_ANNOTATION}: {asked!r} is no way to start a pod",
            hint=f"Write one of: {', '.join(WAYS)}.",
        )
    return asked


def srun_options(options: Sequence[str]) -> list[str] | None:
    """sbatch's options as srun takes them; None where the request is one for the queue."""
    found = []
    for word in options:
        name, _, value = word.partition("=")
        if name in _SBATCH_ONLY:
            continue
        if name not in _SAME and not (name in _SINGLE and value == "1"):
            return None
        found.append(word)
    return found


def looks_free(partition: Partition) -> bool:
    """Whether some node had room when Slurm was last asked; also where it did not say."""
    states = partition.node_states
    return not states or any(state.rstrip("*~#!%$@^-") in _FREE_STATES for state in states)


def partition_of(options: Sequence[str]) -> str:
    """The last one counts, as for sbatch."""
    named = [word.partition("=")[2] for word in options if word.startswith("--partition=")]
    return named[-1] if named else ""
