"""Which pods may start at once instead of being queued. Pure.

The default is "batch" (docs/decisions/0016 says why) unless `slurmlet up --launch` says otherwise; "auto" is at once where
nothing speaks against it. A request that only makes sense in a queue, or that holds more than one task, is always a batch
job: its script is what Slurm starts once, on the first node.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurmlet.base.errors import RefusedPod
from slurmlet.model.sbatch_options import PREFIX
from slurmlet.model.slurm_values import JobSpec, Partition

LAUNCH_ANNOTATION = f"{PREFIX}launch"
AUTO, BATCH, IMMEDIATE = "auto", "batch", "immediate"
WAYS = (AUTO, BATCH, IMMEDIATE)

# Options that mean the same for a job that starts at once.
_SAME = frozenset(
    {
        "account", "acctg-freq", "chdir", "comment", "constraint", "core-spec", "cpu-freq", "cpus-per-gpu",
        "cpus-per-task", "exclude", "export", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-task", "gres",
        "gres-flags", "hint", "job-name", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-per-cpu",
        "mem-per-gpu", "nice", "nodelist", "partition", "prefer", "priority", "profile", "qos", "reservation",
        "thread-spec", "threads-per-core", "time", "time-min", "tmp", "tres-per-task", "wckey",
    }
)  # fmt: skip
_SINGLE = frozenset({"nodes", "ntasks"})
_FREE_STATES = frozenset({"idle", "mixed", "mix"})


def launch_of(annotations: Mapping[str, str], default: str = BATCH) -> str:
    """What the pod asks for, else what holds for its cluster. Raises RefusedPod."""
    asked = annotations.get(LAUNCH_ANNOTATION, default)
    if asked not in WAYS:
        raise RefusedPod(
            f"annotation {LAUNCH_ANNOTATION}: {asked!r} is not a launch mode",
            hint=f"Use one of: {', '.join(WAYS)}.",
        )
    return asked


def can_start_at_once(spec: JobSpec) -> bool:
    """Whether nothing in the request is one for the queue, or for more than one task."""
    single = all(count in (None, 1) for count in (spec.nodes, spec.tasks, spec.tasks_per_node))
    return single and all(name in _SAME or (name in _SINGLE and value == "1") for name, value in spec.options)


def looks_free(partition: Partition) -> bool:
    """Whether some node had room when Slurm was last asked; also where it did not say."""
    states = partition.node_states
    return not states or any(state.rstrip("*~#!%$@^-") in _FREE_STATES for state in states)
