"""Which sbatch options a manifest may set, and how annotations spell them.

An allow-list of whole names: sbatch accepts any unambiguous abbreviation (`--wra` is `--wrap`), so a deny-list could be
walked around. Every accepted option leaves here as one `--name=value` word, so a value can never become an option.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from slurmlet.base.errors import RefusedPod

PREFIX = "slurmlet.io/"

# Options with a value.
_VALUED = {
    "account", "acctg-freq", "begin", "bb", "cluster-constraint", "constraint", "core-spec", "cores-per-socket",
    "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "exclude",
    "extra-node-info", "gpu-bind", "gpu-freq", "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres",
    "gres-flags", "hint", "licenses", "mail-type", "mail-user", "mcs-label", "mem", "mem-bind", "mem-per-cpu",
    "mem-per-gpu", "mincpus", "network", "nice", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu",
    "ntasks-per-node", "ntasks-per-socket", "partition", "prefer", "priority", "profile", "qos", "reservation",
    "segment", "sockets-per-node", "switches", "thread-spec", "threads-per-core", "time", "time-min", "tmp",
    "tres-bind", "tres-per-task", "wckey",
}  # fmt: skip
_OPTIONAL_VALUE = {"exclusive", "nice"}
_FLAGS = {"contiguous", "hold", "overcommit", "oversubscribe", "spread-job", "use-min-nodes"}
_SHORT = {
    "A": "account", "B": "extra-node-info", "b": "begin", "C": "constraint", "c": "cpus-per-task", "d": "dependency",
    "F": "nodefile", "G": "gpus", "H": "hold", "L": "licenses", "m": "distribution", "N": "nodes", "n": "ntasks",
    "O": "overcommit", "p": "partition", "q": "qos", "s": "oversubscribe", "S": "core-spec", "t": "time",
    "w": "nodelist", "x": "exclude",
}  # fmt: skip

# annotation → option, for the common ones
_NAMED = {
    name: name
    for name in (
        "time",
        "partition",
        "account",
        "qos",
        "constraint",
        "gres",
        "licenses",
        "reservation",
        "ntasks",
    )
}
_LINES = (f"{PREFIX}sbatch", "slurm-job.hpk.io/flags", "slurm.hpk.io/flags")
_SLINKY = "slurmjob.slinky.slurm.net/"
_SLINKY_NAMED = {
    "account": "account", "constraints": "constraint", "licenses": "licenses", "partition": "partition",
    "priority": "priority", "qos": "qos", "reservation": "reservation", "cpu-per-task": "cpus-per-task",
    "gres": "gres", "mem-per-node": "mem", "timelimit": "time", "wckey": "wckey",
}  # fmt: skip
# Accepted for the sake of manifests written for others, without effect here; the pod gets an event that says so.
_WITHOUT_EFFECT = {
    "slurm-job.hpk.io/mpi-flags": "slurmlet starts the container's command itself, not through mpiexec",
    f"{_SLINKY}user-id": "jobs run as the user who owns the cluster",
    f"{_SLINKY}group-id": "jobs run as the user who owns the cluster",
    f"{_SLINKY}job-name": "the job's name tells the pod's name, namespace and cluster",
}
_SLINKY_KNOWN = {f"{_SLINKY}{name}" for name in (*_SLINKY_NAMED, "min-nodes", "max-nodes", "exclusive")}
_KNOWN_OWN = {f"{PREFIX}{name}" for name in (*_NAMED, "exclusive", "sbatch")}


def from_annotations(annotations: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """(options as `--name=value`, notes on annotations that have no effect). Raises RefusedPod naming the annotation."""
    options: list[str] = []
    for name, option in _NAMED.items():
        _take(options, annotations, PREFIX + name, option)
    for name, option in _SLINKY_NAMED.items():
        _take(options, annotations, _SLINKY + name, option)
    _take_nodes(options, annotations)
    for key in (f"{PREFIX}exclusive", f"{_SLINKY}exclusive"):
        _take_exclusive(options, annotations, key)
    for key in _LINES:
        if key in annotations:
            options += parse_line(key, annotations[key])
    notes = [f"{key}: {why}" for key, why in _WITHOUT_EFFECT.items() if key in annotations]
    return options, notes


def _take(options: list[str], annotations: Mapping[str, str], key: str, option: str) -> None:
    if key in annotations:
        options.append(f"--{option}={_checked(key, annotations[key])}")


def _take_nodes(options: list[str], annotations: Mapping[str, str]) -> None:
    low, high = annotations.get(f"{_SLINKY}min-nodes"), annotations.get(f"{_SLINKY}max-nodes")
    if low or high:
        both = "-".join(_checked(f"{_SLINKY}min-nodes", value) for value in (low or "1", high) if value)
        options.append(f"--nodes={both}")


def _take_exclusive(options: list[str], annotations: Mapping[str, str], key: str) -> None:
    value = annotations.get(key)
    if value is None or value.lower() == "false":
        return
    plain = value.lower() in ("", "true")
    options.append("--exclusive" if plain else f"--exclusive={_checked(key, value)}")


def parse_line(key: str, line: str) -> list[str]:
    """Options written as on a command line, with shell quoting; each checked against the allow-list."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise RefusedPod(f"annotation {key}: {error}", hint="Balance the quotes.") from error
    options: list[str] = []
    while words:
        name, value = _option_name(key, words.pop(0))
        if name in _FLAGS:
            if value is not None:
                raise RefusedPod(f"annotation {key}: --{name} takes no value", hint=f"Write --{name} alone.")
            options.append(f"--{name}")
        elif value is not None:
            options.append(f"--{name}={_checked(key, value)}")
        elif name in _OPTIONAL_VALUE:
            options.append(f"--{name}")
        elif words:
            options.append(f"--{name}={_checked(key, words.pop(0))}")
        else:
            raise RefusedPod(f"annotation {key}: --{name} needs a value", hint=f"Write --{name}=VALUE.")
    return options


def _option_name(key: str, word: str) -> tuple[str, str | None]:
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        found = value if equals else None
    elif word.startswith("-") and len(word) > 1:
        name, found = _SHORT.get(word[1], word[:2]), word[2:].removeprefix("=") or None
    else:
        raise RefusedPod(
            f"annotation {key}: {word!r} is not an option",
            hint="The annotation holds sbatch options only, such as --constraint=ib --nice=100.",
        )
    if name not in _VALUED and name not in _FLAGS and name not in _OPTIONAL_VALUE:
        raise RefusedPod(
            f"annotation {key}: sbatch option {word.split('=')[0]!r} cannot be used for a pod",
            hint=f"Options must be written in full and not change how slurmlet runs the job; allowed: "
            f"{', '.join(sorted(_VALUED | _FLAGS | _OPTIONAL_VALUE))}.",
        )
    return name, found


def _checked(key: str, value: str) -> str:
    if not value or any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise RefusedPod(
            f"annotation {key}: value {value!r} is empty or has control characters",
            hint="Write one line of printable text.",
        )
    return value


def used(annotations: Mapping[str, str]) -> list[str]:
    """Annotations that gave options."""
    return sorted(key for key in annotations if key in _KNOWN_OWN or key in _LINES or key in _SLINKY_KNOWN)


def unknown_annotations(annotations: Mapping[str, str], known: frozenset[str]) -> list[str]:
    """Annotations under our prefix that mean nothing to us: most likely a typing error."""
    return sorted(key for key in annotations if key.startswith(PREFIX) and key not in _KNOWN_OWN | known)
