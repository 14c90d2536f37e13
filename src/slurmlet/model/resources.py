"""What a pod asks for in all, as Kubernetes computes it: max(init, sum of containers) plus sidecars and overhead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from slurmlet.model import quantities

Amounts = dict[str, Fraction]


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """Effective requests by resource name. A limit without a request counts as the request (API defaulting)."""
    running = _sum(_requests(container) for container in spec.get("containers", ()))
    sidecars: Amounts = {}
    peak: Amounts = {}
    # Init containers run one after another beside the sidecars started before them.
    for container in spec.get("initContainers", ()):
        asked = _requests(container)
        if container.get("restartPolicy") == "Always":
            sidecars = _sum((sidecars, asked))
            peak = _max(peak, sidecars)
        else:
            peak = _max(peak, _sum((sidecars, asked)))
    total = _max(_sum((running, sidecars)), peak)
    pod_level = (spec.get("resources") or {}).get("requests") or {}
    total.update({name: quantities.parse(value) for name, value in pod_level.items()})
    return _sum(
        (total, {name: quantities.parse(value) for name, value in (spec.get("overhead") or {}).items()})
    )


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantities.parse(value) for name, value in asked.items()}


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, Fraction(0)) + value
    return total


def _max(left: Amounts, right: Amounts) -> Amounts:
    return {name: max(left.get(name, Fraction(0)), right.get(name, Fraction(0))) for name in {*left, *right}}


def qos_class(spec: Mapping[str, Any]) -> str:
    """Guaranteed, Burstable or BestEffort, by the kubelet's rule over cpu and memory."""
    containers = [*spec.get("containers", ()), *spec.get("initContainers", ())]
    asked_any = False
    guaranteed = True
    for container in containers:
        given = (container.get("resources") or {}).get("limits") or {}
        asked = _requests(container)
        for name in ("cpu", "memory"):
            # An amount of zero counts as none.
            limit, request = quantities.parse(given.get(name, 0)), asked.get(name, Fraction(0))
            asked_any = asked_any or limit > 0 or request > 0
            guaranteed = guaranteed and limit > 0 and limit == request
    if not asked_any:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"
