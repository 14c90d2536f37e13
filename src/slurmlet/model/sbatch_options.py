"""Which sbatch options a manifest may set, and how annotations spell them.

An allow-list of whole names: sbatch accepts any unambiguous abbreviation (`--wra` is `--wrap`), so a deny-list could be
walked around. Every accepted option leaves here as a pair of its name and its value.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from slurmlet.base.errors import RefusedPod
from slurmlet.model.slurm_values import Option

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
        "nice",
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


def from_annotations(annotations: Mapping[str, str]) -> tuple[list[Option], list[str]]:
    """(options, notes on annotations that have no effect). Raises RefusedPod naming the annotation."""
    options: list[Option] = []
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


def _take(options: list[Option], annotations: Mapping[str, str], key: str, option: str) -> None:
    if key in annotations:
        options.append((option, _checked(key, annotations[key])))


def _take_nodes(options: list[Option], annotations: Mapping[str, str]) -> None:
    low, high = annotations.get(f"{_SLINKY}min-nodes"), annotations.get(f"{_SLINKY}max-nodes")
    if low or high:
        both = "-".join(_checked(f"{_SLINKY}min-nodes", value) for value in (low or "1", high) if value)
        options.append(("nodes", both))


def _take_exclusive(options: list[Option], annotations: Mapping[str, str], key: str) -> None:
    value = annotations.get(key)
    if value is None or value.lower() == "false":
        return
    plain = value.lower() in ("", "true")
    options.append(("exclusive", None if plain else _checked(key, value)))


def parse_line(key: str, line: str) -> list[Option]:
    """Options written as on a command line, with shell quoting; each checked against the allow-list."""
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise RefusedPod(f"annotation {key}: {error}", hint="Check the quotes.") from error
    return parse_words(f"annotation {key}", words)


def parse_words(where: str, given: Sequence[str]) -> list[Option]:
    """The same, of words; `where` they were written, for the refusal."""
    options: list[Option] = []
    words = list(given)
    while words:
        name, value = _option_name(where, words.pop(0))
        if name in _FLAGS:
            if value is not None:
                raise RefusedPod(f"{where}: --{name} takes no value", hint=f"Write --{name} alone.")
            options.append((name, None))
        elif value is not None:
            options.append((name, _checked_at(where, value)))
        elif name in _OPTIONAL_VALUE:
            options.append((name, None))
        elif words:
            options.append((name, _checked_at(where, words.pop(0))))
        else:
            raise RefusedPod(f"{where}: --{name} needs a value", hint=f"Write --{name}=VALUE.")
    return options


def _option_name(where: str, word: str) -> tuple[str, str | None]:
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        found = value if equals else None
    elif word.startswith("-") and len(word) > 1:
        name, found = _SHORT.get(word[1], word[:2]), word[2:].removeprefix("=") or None
    else:
        raise RefusedPod(
            f"{where}: {word!r} is not an option",
            hint="Only sbatch options can be given here, such as --constraint=ib --nice=100.",
        )
    if name not in _VALUED and name not in _FLAGS and name not in _OPTIONAL_VALUE:
        raise RefusedPod(
            f"{where}: sbatch option {word.split('=')[0]!r} cannot be used here",
            hint=f"Options must be written in full and not change how slurmlet runs the job; allowed: "
            f"{', '.join(sorted(_VALUED | _FLAGS | _OPTIONAL_VALUE))}.",
        )
    return name, found


def _checked(key: str, value: str) -> str:
    return _checked_at(f"annotation {key}", value)


def _checked_at(where: str, value: str) -> str:
    if not value or any(ord(char) < 32 or ord(char) == 127 for char in value):
        raise RefusedPod(
            f"{where}: value {value!r} is empty or has control characters",
            hint="Write one line of printable text.",
        )
    return value


def used(annotations: Mapping[str, str]) -> list[str]:
    """Annotations that gave options."""
    return sorted(key for key in annotations if key in _KNOWN_OWN or key in _LINES or key in _SLINKY_KNOWN)


def unknown_annotations(annotations: Mapping[str, str], known: frozenset[str]) -> list[str]:
    """Annotations under our prefix that mean nothing to us: most likely a typing error."""
    return sorted(key for key in annotations if key.startswith(PREFIX) and key not in _KNOWN_OWN | known)
