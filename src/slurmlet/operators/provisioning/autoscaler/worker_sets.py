"""A WorkerSet's spec as a typed value. The CRD's schema says the same to whoever applies one; this is for what reached us
all the same (an older schema, a file given to the simulator), so that nothing is ever decided on a spec that is not sound.

All problems are reported at once, each with the field it is about. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.model.slurm_admin_values import Gres

SCALE_IN_AFTER_S = 300
DRAIN_DEADLINE_S = 3600
STARTUP_DEADLINE_S = 1800
_MOST_NODES = 65533
_FEATURE = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_GRES = re.compile(r"[A-Za-z0-9_.-]+(?::[A-Za-z0-9_.-]+)?")
_API_VERSION = re.compile(r"(?:[a-z0-9.-]+/)?v[a-z0-9]+")
_FIELDS = frozenset({
    "slurmCluster", "scaleTargetRef", "partitions", "features", "shape", "topologyDomain", "min", "max",
    "scaleInAfterSeconds", "scaleOutStep", "scaleInStep", "startupDeadlineSeconds", "nodeNamePrefix", "nodeNameFrom",
    "drain", "paused",
})  # fmt: skip


class InvalidWorkerSet(SlurmletError):
    """A spec on which nothing is decided. `problems`: one sentence for each field, beginning with its path."""

    reason = "Invalid"

    def __init__(self, name: str, problems: Sequence[str]) -> None:
        super().__init__(f"WorkerSet {name}: {'; '.join(problems)}", hint="Correct the fields named above.")
        self.problems = tuple(problems)


class DrainPolicy(Enum):
    WAIT = "Wait"
    NEVER = "Never"  # nothing is drained by us, and so nothing scaled in


class NodeNameFrom(Enum):
    MACHINE = "Machine"
    INFRASTRUCTURE_MACHINE = "InfrastructureMachine"


@dataclass(frozen=True)
class ScaleTarget:
    api_version: str
    kind: str
    name: str


@dataclass(frozen=True)
class Shape:
    """What one worker has for jobs."""

    cpus: int
    memory_mb: int
    gres: Gres = ()


@dataclass(frozen=True)
class WorkerSet:
    name: str
    slurm_cluster: str
    target: ScaleTarget
    partitions: frozenset[str]
    shape: Shape
    max: int
    min: int = 0
    features: frozenset[str] = frozenset()
    topology_domain: str = ""
    scale_in_after_s: float = SCALE_IN_AFTER_S
    scale_out_step: int | None = None  # machines that may be starting at a time; None: any number
    scale_in_step: int | None = None  # workers that may be on their way out at a time
    startup_deadline_s: float = STARTUP_DEADLINE_S  # a machine without a Slurm node after that has failed
    node_name_prefix: str = ""
    node_name_from: NodeNameFrom = NodeNameFrom.MACHINE
    drain_deadline_s: float = DRAIN_DEADLINE_S
    drain_policy: DrainPolicy = DrainPolicy.WAIT
    paused: bool = False


def parse_worker_set(manifest: Mapping[str, Any]) -> WorkerSet:
    """Raises InvalidWorkerSet with every field that is not as it must be."""
    name = str((manifest.get("metadata") or {}).get("name") or "(without a name)")
    spec = manifest.get("spec")
    if not isinstance(spec, Mapping):
        raise InvalidWorkerSet(name, ["spec: is missing, expected an object"])
    fields = _Fields(spec, "spec")
    fields.only(_FIELDS)
    target = fields.child("scaleTargetRef", required=True)
    shape = fields.child("shape", required=True)
    drain = fields.child("drain")
    made = WorkerSet(
        name=name,
        slurm_cluster=fields.text("slurmCluster", required=True),
        target=ScaleTarget(
            target.text("apiVersion", required=True, pattern=_API_VERSION),
            target.text("kind", required=True),
            target.text("name", required=True),
        ),
        partitions=frozenset(fields.texts("partitions", at_least=1)),
        shape=Shape(shape.count("cpus", least=1), shape.count("memoryMB", least=1), shape.gres("gres")),
        max=fields.count("max", most=_MOST_NODES),
        min=fields.count("min", 0, most=_MOST_NODES),
        features=frozenset(fields.texts("features", pattern=_FEATURE)),
        topology_domain=fields.text("topologyDomain"),
        scale_in_after_s=fields.count("scaleInAfterSeconds", SCALE_IN_AFTER_S),
        scale_out_step=fields.optional_count("scaleOutStep"),
        scale_in_step=fields.optional_count("scaleInStep"),
        startup_deadline_s=fields.count("startupDeadlineSeconds", STARTUP_DEADLINE_S, least=1),
        node_name_prefix=fields.text("nodeNamePrefix"),
        node_name_from=NodeNameFrom(fields.choice("nodeNameFrom", [one.value for one in NodeNameFrom])),
        drain_deadline_s=drain.count("deadlineSeconds", DRAIN_DEADLINE_S),
        drain_policy=DrainPolicy(drain.choice("policy", [one.value for one in DrainPolicy])),
        paused=fields.flag("paused"),
    )
    problems = [*fields.problems, *target.problems, *shape.problems, *drain.problems]
    if not problems and made.min > made.max:
        problems.append(f"spec.min: is {made.min}, expected at most spec.max, which is {made.max}")
    if problems:
        raise InvalidWorkerSet(name, problems)
    return made


class _Fields:
    """Reads one object of the spec; a field that is not as expected is written down and replaced by something harmless."""

    def __init__(self, values: Mapping[str, Any], path: str, *, silent: bool = False) -> None:
        self._values = values
        self._path = path
        self._silent = silent
        self.problems: list[str] = []

    def only(self, known: frozenset[str]) -> None:
        """An unknown field is a mistake in writing: with the right name it would have changed something."""
        for name in self._values:
            if name not in known:
                self.problems.append(f"{self._path}.{name}: is not a field of a WorkerSet")

    def child(self, name: str, *, required: bool = False) -> _Fields:
        value = self._values.get(name)
        if value is None and required:
            self._wrong(name, value, "an object")
        elif value is not None and not isinstance(value, Mapping):
            self._wrong(name, value, "an object")
            value = None
        # Of an object that is missing, each field need not be reported as missing too.
        return _Fields(value or {}, f"{self._path}.{name}", silent=value is None and required)

    def text(self, name: str, *, required: bool = False, pattern: re.Pattern[str] | None = None) -> str:
        value = self._values.get(name)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or not value:
            self._wrong(name, value, "a text that is not empty")
            return ""
        if pattern is not None and not pattern.fullmatch(value):
            self._wrong(name, value, f"a text like {pattern.pattern}")
        return value

    def texts(self, name: str, *, at_least: int = 0, pattern: re.Pattern[str] | None = None) -> list[str]:
        value = self._values.get(name)
        if value is None and not at_least:
            return []
        if not isinstance(value, list) or len(value) < at_least:
            self._wrong(
                name, value, f"a list of at least {at_least} names" if at_least else "a list of names"
            )
            return []
        for index, one in enumerate(value):
            if not isinstance(one, str) or not one or (pattern is not None and not pattern.fullmatch(one)):
                self._wrong(f"{name}[{index}]", one, "a name")
        return [one for one in value if isinstance(one, str)]

    def count(self, name: str, default: int | None = None, *, least: int = 0, most: int = 2**53) -> int:
        value = self._values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            wanted = f"a number from {least} to {most}" if most < 2**53 else f"a number of at least {least}"
            self._wrong(name, value, wanted)
            return least
        return value

    def optional_count(self, name: str) -> int | None:
        return None if self._values.get(name) is None else self.count(name, least=1)

    def gres(self, name: str) -> Gres:
        value = self._values.get(name) or {}
        if not isinstance(value, Mapping):
            self._wrong(name, value, "an object of names and counts")
            return ()
        for kind, number in value.items():
            if not _GRES.fullmatch(str(kind)):
                self._wrong(f"{name}.{kind}", kind, "a name such as gpu or gpu:a100")
            if not isinstance(number, int) or isinstance(number, bool) or number < 0:
                self._wrong(f"{name}.{kind}", number, "a number of at least 0")
        return tuple(
            sorted(
                (str(kind), number) for kind, number in value.items() if isinstance(number, int) and number
            )
        )

    def choice(self, name: str, choices: Sequence[str]) -> str:
        value = self._values.get(name, choices[0])
        if value not in choices:
            self._wrong(name, value, " or ".join(choices))
            return choices[0]
        return str(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            self._wrong(name, value, "true or false")
            return False
        return value

    def _wrong(self, name: str, value: object, expected: str) -> None:
        found = "is missing" if value is None else f"is {value!r}"
        if not self._silent:
            self.problems.append(f"{self._path}.{name}: {found}, expected {expected}")
