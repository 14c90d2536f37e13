"""What a pod asks for in all, as Kubernetes computes it: max(init, sum of containers) plus sidecars and overhead."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from slurmlet.model import quantities
from slurmlet.protocol.pod_plan import StorageLimits

Amounts = dict[str, Fraction]
_POD_LEVEL = ("cpu", "memory")  # and huge pages; others are asked for by containers alone
_STORAGE = "ephemeral-storage"


def pod_requests(spec: Mapping[str, Any]) -> Amounts:
    """Effective requests by resource name. A limit without a request counts as the request (API defaulting)."""
    total = _aggregate(spec, _requests)
    total.update(_pod_level(spec, "requests"))
    return _sum((total, _amounts(spec.get("overhead"))))


def pod_limits(spec: Mapping[str, Any]) -> Amounts:
    """Effective limits; overhead counts only where there is a limit to raise."""
    total = _aggregate(spec, _limits)
    total.update(_pod_level(spec, "limits"))
    overhead = _amounts(spec.get("overhead"))
    return {name: value + (overhead.get(name, 0) if value else 0) for name, value in total.items()}


def _aggregate(spec: Mapping[str, Any], asked_by: Any) -> Amounts:
    running = _sum(asked_by(container) for container in spec.get("containers") or ())
    sidecars: Amounts = {}
    peak: Amounts = {}
    # Init containers run one after another beside the sidecars started before them.
    for container in spec.get("initContainers") or ():
        asked = asked_by(container)
        if container.get("restartPolicy") == "Always":
            sidecars = _sum((sidecars, asked))
            peak = _max(peak, sidecars)
        else:
            peak = _max(peak, _sum((sidecars, asked)))
    return _max(_sum((running, sidecars)), peak)


def _pod_level(spec: Mapping[str, Any], kind: str) -> Amounts:
    given = _amounts((spec.get("resources") or {}).get(kind))
    return {
        name: value for name, value in given.items() if name in _POD_LEVEL or name.startswith("hugepages-")
    }


def _requests(container: Mapping[str, Any]) -> Amounts:
    resources = container.get("resources") or {}
    return _amounts({**(resources.get("limits") or {}), **(resources.get("requests") or {})})


def _limits(container: Mapping[str, Any]) -> Amounts:
    return _amounts((container.get("resources") or {}).get("limits"))


def _amounts(given: Mapping[str, Any] | None) -> Amounts:
    return {name: quantities.parse(value) for name, value in (given or {}).items()}


def _sum(parts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for part in parts:
        for name, value in part.items():
            total[name] = total.get(name, Fraction(0)) + value
    return total


def _max(left: Amounts, right: Amounts) -> Amounts:
    return {name: max(left.get(name, Fraction(0)), right.get(name, Fraction(0))) for name in {*left, *right}}


def written(amounts: Amounts) -> dict[str, str]:
    """As the API shows sums: bytes in binary units, all else in decimal ones."""
    units = {name: "Ki" if _in_bytes(name) else "" for name in amounts}
    return {name: quantities.canonical(value, units[name]) for name, value in sorted(amounts.items())}


def _in_bytes(name: str) -> bool:
    return name in ("memory", _STORAGE) or name.startswith("hugepages-")


def same(left: Mapping[str, Any] | None, right: Mapping[str, Any] | None) -> bool:
    """Whether two resource requirements are equal, however they are written."""
    if left == right:
        return True  # nearly always, and asked for every pod at every turn
    return all(
        _amounts((left or {}).get(kind)) == _amounts((right or {}).get(kind))
        for kind in ("requests", "limits")
    )


def storage_limits(spec: Mapping[str, Any]) -> StorageLimits:
    containers: dict[str, tuple[int, str]] = {}
    for container in spec.get("containers") or ():
        limit = ((container.get("resources") or {}).get("limits") or {}).get(_STORAGE)
        if limit is not None and quantities.parse(limit):
            containers[container["name"]] = (quantities.ceil(quantities.parse(limit)), str(limit))
    whole = pod_limits(spec).get(_STORAGE)
    if whole is None:
        return {"containers": containers, "pod": None}
    return {"containers": containers, "pod": (quantities.ceil(whole), written({_STORAGE: whole})[_STORAGE])}


def qos_class(spec: Mapping[str, Any]) -> str:
    """Guaranteed, Burstable or BestEffort, by the kubelet's rule over cpu and memory."""
    asked_any = False
    guaranteed = True
    # Resources of the pod as a whole, where it has any, count alone.
    holders = (
        [spec]
        if spec.get("resources")
        else [*(spec.get("containers") or ()), *(spec.get("initContainers") or ())]
    )
    for holder in holders:
        given = (holder.get("resources") or {}).get("limits") or {}
        asked = _requests(holder)
        for name in ("cpu", "memory"):
            # An amount of zero counts as none.
            limit, request = quantities.parse(given.get(name, 0)), asked.get(name, Fraction(0))
            asked_any = asked_any or limit > 0 or request > 0
            guaranteed = guaranteed and limit > 0 and limit == request
    if not asked_any:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"
