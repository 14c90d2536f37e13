"""A JobSpec as the body of slurmrestd's `job/submit`, for the data parser that is spoken. Pure.

Options from annotations are sbatch's words; those that the REST API has a field for are translated, all others are
refused by name: an option that is dropped in silence would be worse.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slurmlet.base.errors import SlurmError
from slurmlet.model.slurm_values import JobSpec

Fields = dict[str, Any]
# The first parser whose numbers are objects, whose environment is a list, whose script belongs to the job.
_STRUCTS, _JOB_SCRIPT = 39, 40
_UNITS = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def body(spec: JobSpec, parser: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """Raises SlurmError that names the option which cannot be asked for this way."""
    job = _fields(spec, parser)
    for name, value in spec.options:
        job.update(_option(name, value, parser))
    whole = {**environment, **spec.environment}
    job["environment"] = whole if parser < _STRUCTS else [f"{name}={value}" for name, value in whole.items()]
    if parser < _JOB_SCRIPT:
        return {"script": spec.script, "job": job}
    return {"job": {**job, "script": spec.script}}


def _fields(spec: JobSpec, parser: int) -> Fields:
    job: Fields = {
        "name": spec.name,
        "current_working_directory": spec.directory or "/",
        "requeue": False,
    }
    texts = {
        "comment": spec.comment, "partition": spec.partition, "account": spec.account, "qos": spec.qos,
        "reservation": spec.reservation, "constraints": spec.features, "licenses": spec.licenses,
    }  # fmt: skip
    job |= {name: value for name, value in texts.items() if value}
    numbers = {
        "tasks": spec.tasks, "tasks_per_node": spec.tasks_per_node, "cpus_per_task": spec.cpus_per_task,
        "nice": spec.nice,
    }  # fmt: skip
    job |= {name: value for name, value in numbers.items() if value is not None}
    if spec.output:
        # slurmd would put the job's id for %j.
        job |= {
            "standard_output": spec.output.replace("%", "%%"),
            "open_mode": "append" if parser < _STRUCTS else ["APPEND"],
        }
    if spec.nodes is not None:
        job |= _nodes(str(spec.nodes), parser)
    if spec.memory_mb is not None:
        job["memory_per_node"] = _number(spec.memory_mb, parser)
    if spec.memory_mb_per_cpu is not None:
        job["memory_per_cpu"] = _number(spec.memory_mb_per_cpu, parser)
    if spec.time_limit_min is not None:
        job["time_limit"] = _number(spec.time_limit_min, parser)
    if spec.gres:
        job |= _gres(",".join(f"{name}:{count}" for name, count in spec.gres), parser)
    if spec.exclusive:
        job |= _exclusive(None, parser)
    if spec.hosts:
        job |= _hosts("required_nodes", ",".join(spec.hosts), parser)
    return job


def _number(value: int, parser: int) -> Any:
    return value if parser < _STRUCTS else {"set": True, "infinite": False, "number": value}


def _nodes(value: str, _: int) -> Fields:
    # A text also for v0.0.38, whose own description wants a list of two numbers and then does nothing with it.
    return {"nodes": value}


def _gres(value: str, parser: int) -> Fields:
    if parser < _STRUCTS:
        return {"gres": value}
    return {"tres_per_node": ",".join(f"gres/{one}" for one in value.split(",") if one)}


def _exclusive(value: str | None, parser: int) -> Fields:
    if parser < _STRUCTS:
        return {"exclusive": value or "true"}
    return {"shared": [value or "none"]}


def _hosts(field: str, value: str, parser: int) -> Fields:
    if parser < _STRUCTS:
        raise _refusal("nodelist", parser)
    return {field: value.split(",")}


def _option(name: str, value: str | None, parser: int) -> Fields:
    translate = _OPTIONS.get(name)
    if translate is None or (value is None and name not in _ALONE):
        raise _refusal(name, parser)
    return translate(value or "", parser)


def _refusal(name: str, parser: int) -> SlurmError:
    return SlurmError(
        f"--{name} cannot be asked for through slurmrestd (parser v0.0.{parser})",
        hint="Leave the option out, or let slurmlet use Slurm's commands.",
    )


def _int(name: str, value: str) -> int:
    if not re.fullmatch(r"-?\d+", value):
        raise SlurmError(f"--{name}={value}: not a number", hint="Write a whole number.")
    return int(value)


def memory_mb(name: str, value: str) -> int:
    """ "512", "4G", "100K"; rounded up."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", value.upper())
    if found is None:
        raise SlurmError(f"--{name}={value}: not an amount of memory", hint="Write it like 512M or 4G.")
    return -int(-int(found[1]) * _UNITS[found[2]] // 1)


def minutes(name: str, value: str) -> int | None:
    """sbatch's ways to write a time: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:…]; None: no limit."""
    if value.lower() in ("infinite", "unlimited", "-1"):
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", value)
    if found is None:
        raise SlurmError(f"--{name}={value}: not a time", hint="Write it like 90, 1:30:00 or 2-00:00:00.")
    days, first, second, third = (None if part is None else int(part) for part in found.groups())
    if days is not None:
        seconds = ((days * 24 + (first or 0)) * 60 + (second or 0)) * 60 + (third or 0)
    elif third is not None:
        seconds = ((first or 0) * 60 + (second or 0)) * 60 + third
    else:
        seconds = (first or 0) * 60 + (second or 0)
    return -(-seconds // 60)


def _time(field: str, name: str) -> Callable[[str, int], Fields]:
    def translate(value: str, parser: int) -> Fields:
        found = minutes(name, value)
        if found is not None:
            return {field: _number(found, parser)}
        return {field: 2**32 - 1 if parser < _STRUCTS else {"set": True, "infinite": True, "number": 0}}

    return translate


def _text(field: str) -> Callable[[str, int], Fields]:
    return lambda value, _: {field: value}


def _integer(field: str, name: str) -> Callable[[str, int], Fields]:
    return lambda value, _: {field: _int(name, value)}


def _memory(field: str, name: str) -> Callable[[str, int], Fields]:
    return lambda value, parser: {field: _number(memory_mb(name, value), parser)}


def _tres(field: str) -> Callable[[str, int], Fields]:
    def translate(value: str, parser: int) -> Fields:
        old = {"tres_per_job": "gpus", "tres_per_node": "gpus_per_node", "tres_per_task": "gpus_per_task"}
        return {old[field]: value} if parser < _STRUCTS else {field: f"gres/gpu:{value}"}

    return translate


_OPTIONS: dict[str, Callable[[str, int], Fields]] = {
    "account": _text("account"), "constraint": _text("constraints"), "dependency": _text("dependency"),
    "licenses": _text("licenses"), "mail-user": _text("mail_user"), "mcs-label": _text("mcs_label"),
    "network": _text("network"), "partition": _text("partition"), "prefer": _text("prefer"), "qos": _text("qos"),
    "reservation": _text("reservation"), "wckey": _text("wckey"), "tres-per-task": _text("tres_per_task"),
    "cpus-per-task": _integer("cpus_per_task", "cpus-per-task"), "ntasks": _integer("tasks", "ntasks"),
    "ntasks-per-node": _integer("tasks_per_node", "ntasks-per-node"),
    "threads-per-core": _integer("threads_per_core", "threads-per-core"),
    "mincpus": _integer("minimum_cpus_per_node", "mincpus"),
    "mem": _memory("memory_per_node", "mem"), "mem-per-cpu": _memory("memory_per_cpu", "mem-per-cpu"),
    "time": _time("time_limit", "time"), "time-min": _time("time_minimum", "time-min"),
    "gpus": _tres("tres_per_job"), "gpus-per-node": _tres("tres_per_node"), "gpus-per-task": _tres("tres_per_task"),
    "gres": _gres, "nodes": _nodes, "hold": lambda _, __: {"hold": True},
    "exclusive": lambda value, parser: _exclusive(value or None, parser),
    "nice": lambda value, _: {"nice": _int("nice", value or "100")},
    "priority": lambda value, parser: {"priority": _number(_int("priority", value), parser)},
    "nodelist": lambda value, parser: _hosts("required_nodes", value, parser),
    "exclude": lambda value, parser: _hosts("excluded_nodes", value, parser),
    "contiguous": lambda _, __: {"contiguous": True},
    "overcommit": lambda _, __: {"overcommit": True},
    "mail-type": lambda value, _: {"mail_type": value.upper().split(",")},
}  # fmt: skip
_ALONE = frozenset({"hold", "exclusive", "nice", "contiguous", "overcommit"})
