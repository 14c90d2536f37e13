"""A JobSpec as options of sbatch's and srun's. Every option is one `--name=value` word, so no value can become an option."""

from __future__ import annotations

from collections.abc import Iterator

from slurmlet.model.slurm_values import JobSpec, Option


def sbatch_words(spec: JobSpec) -> list[str]:
    own: list[Option] = [("no-requeue", None)]
    if spec.output:
        # sbatch would put the job's id for %j.
        own += [("output", spec.output.replace("%", "%%")), ("open-mode", "append")]
    return [_word(name, value) for name, value in (*own, *_common(spec), *spec.options)]


def srun_words(spec: JobSpec) -> list[str]:
    """What srun allocates the same job with. Where it writes to is not srun's to say: nobody reads what comes there."""
    return [_word(name, value) for name, value in (*_common(spec), *spec.options)]


def salloc_words(spec: JobSpec) -> list[str]:
    """The same allocation without a task. What the task's environment is, is srun's to say."""
    return [word for word in srun_words(spec) if word != "--export=ALL"]


def _word(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={value}"


def _common(spec: JobSpec) -> Iterator[Option]:
    yield "job-name", spec.name
    if spec.comment:
        yield "comment", spec.comment
    # The environment that the command runs in is our own short list, so ALL hands on nothing by accident.
    yield "export", "ALL"
    if spec.directory:
        yield "chdir", spec.directory
    if spec.partition:
        yield "partition", spec.partition
    yield from _sizes(spec)
    texts = {
        "account": spec.account, "qos": spec.qos, "reservation": spec.reservation, "constraint": spec.features,
        "licenses": spec.licenses, "nodelist": ",".join(spec.hosts),
    }  # fmt: skip
    yield from ((name, value) for name, value in texts.items() if value)
    if spec.exclusive:
        yield "exclusive", None


def _sizes(spec: JobSpec) -> Iterator[Option]:
    numbers = {
        "nodes": spec.nodes, "ntasks": spec.tasks, "ntasks-per-node": spec.tasks_per_node,
        "cpus-per-task": spec.cpus_per_task, "time": spec.time_limit_min, "nice": spec.nice,
    }  # fmt: skip
    yield from ((name, str(value)) for name, value in numbers.items() if value is not None)
    if spec.memory_mb is not None:
        yield "mem", f"{spec.memory_mb}M"
    if spec.memory_mb_per_cpu is not None:
        yield "mem-per-cpu", f"{spec.memory_mb_per_cpu}M"
    if spec.gres:
        yield "gres", ",".join(f"{name}:{count}" for name, count in spec.gres)
