"""What the Scaling Webhook's ConfigMap says: which mirror Deployments there are, and what follows each. Pure.

The thesis's ConfigMap names one MachineDeployment; ours may name any number of mirrors, each with any number of targets.
A map with one mistake is refused whole: half of it would scale half of a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import yaml

from slurmlet.base.errors import UserError

CONFIG_MAP = "scaling-webhook-configmap"
_MIRROR = "mirror-deployment"
_API_VERSION, _KIND = "cluster.x-k8s.io/v1beta2", "MachineDeployment"


class Distribution(StrEnum):
    """`Copy`: every target gets the mirror's number. `Spread`: they share it, each up to its max, in their order."""

    COPY = "Copy"
    SPREAD = "Spread"


@dataclass(frozen=True)
class MirrorTarget:
    namespace: str
    name: str
    kind: str = _KIND
    group: str = "cluster.x-k8s.io"
    max: int | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}"


@dataclass(frozen=True)
class Mirror:
    namespace: str
    name: str
    targets: tuple[MirrorTarget, ...]
    distribution: Distribution = Distribution.COPY

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"

    def replicas(self, wanted: int) -> dict[MirrorTarget, int]:
        """What each target gets when the mirror has `wanted`."""
        given: dict[MirrorTarget, int] = {}
        left = wanted
        for target in self.targets:
            most = left if self.distribution is Distribution.SPREAD else wanted
            given[target] = most if target.max is None else min(most, target.max)
            left -= given[target]
        return given


class MalformedConfigMap(UserError):
    reason = "MalformedConfigMap"


def mirrors(config_map: Mapping[str, Any]) -> list[Mirror]:
    """Raises MalformedConfigMap with every problem, each with its field."""
    data: Mapping[str, str] = config_map.get("data") or {}
    home = config_map["metadata"]["namespace"]
    problems: list[str] = []
    found = _ours(data["mirrors"], home, problems) if "mirrors" in data else _thesis(data, home, problems)
    keys = [one.key for one in found]
    problems += [
        f"mirrors: Deployment {key} is there twice" for key in sorted(set(keys)) if keys.count(key) > 1
    ]
    targets = [str(target) for one in found for target in one.targets]
    problems += [
        f"mirrors: {name} follows two mirrors, or one twice"
        for name in sorted(set(targets))
        if targets.count(name) > 1
    ]
    if problems:
        raise MalformedConfigMap(f"ConfigMap {home}/{config_map['metadata']['name']}: {'; '.join(problems)}")
    return found


def _thesis(data: Mapping[str, str], home: str, problems: list[str]) -> list[Mirror]:
    """One target, by two keys of the map; spelled with and without a capital S, as both are found."""
    lower = {name.lower(): value.strip() for name, value in data.items()}
    name = lower.get("machinedeploymentname")
    if not name:
        problems.append("data.machineDeploymentName is missing (or data.mirrors)")
        return []
    target = MirrorTarget(lower.get("machinedeploymentnamespace") or home, name)
    mirror = lower.get("mirrordeploymentname") or _MIRROR
    return [Mirror(lower.get("mirrordeploymentnamespace") or home, mirror, (target,))]


def _ours(text: str, home: str, problems: list[str]) -> list[Mirror]:
    try:
        listed = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(f"data.mirrors is not YAML: {getattr(error, 'problem', error)}")
        return []
    if not isinstance(listed, list) or not listed:
        problems.append("data.mirrors is not a list of mirrors")
        return []
    return [
        made
        for number, one in enumerate(listed)
        if (made := _mirror(one, f"mirrors[{number}]", home, problems)) is not None
    ]


def _mirror(given: Any, at: str, home: str, problems: list[str]) -> Mirror | None:
    if not _is_map(given, at, ("deployment", "targets", "distribution"), problems):
        return None
    deployment, targets = given.get("deployment"), given.get("targets")
    if not _is_map(deployment, f"{at}.deployment", ("namespace", "name"), problems):
        return None
    if not isinstance(targets, list) or not targets:
        problems.append(f"{at}.targets is not a list of targets")
        return None
    made = [_target(one, f"{at}.targets[{number}]", home, problems) for number, one in enumerate(targets)]
    try:
        distribution = Distribution(given.get("distribution") or Distribution.COPY)
    except ValueError:
        problems.append(f"{at}.distribution is {given['distribution']!r}, expected Copy or Spread")
        return None
    if None in made or not _text(deployment, "name", f"{at}.deployment", problems):
        return None
    whole = tuple(one for one in made if one is not None)
    return Mirror(str(deployment.get("namespace") or home), str(deployment["name"]), whole, distribution)


def _target(given: Any, at: str, home: str, problems: list[str]) -> MirrorTarget | None:
    known = ("namespace", "name", "kind", "apiVersion", "max")
    if not _is_map(given, at, known, problems) or not _text(given, "name", at, problems):
        return None
    most = given.get("max")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 0):
        problems.append(f"{at}.max is {most!r}, expected a number from 0")
        return None
    group = str(given.get("apiVersion") or _API_VERSION).rpartition("/")[0]
    return MirrorTarget(
        str(given.get("namespace") or home), given["name"], str(given.get("kind") or _KIND), group, most
    )


def _is_map(given: Any, at: str, known: Sequence[str], problems: list[str]) -> bool:
    if not isinstance(given, dict):
        problems.append(f"{at} is not a map with {', '.join(known)}")
        return False
    unknown = sorted(str(name) for name in given if name not in known)
    problems += [f"{at}.{name} is not known here" for name in unknown]
    return not unknown


def _text(given: Mapping[str, Any], name: str, at: str, problems: list[str]) -> bool:
    if isinstance(given.get(name), str) and given[name]:
        return True
    problems.append(f"{at}.{name} is missing or not a text")
    return False
