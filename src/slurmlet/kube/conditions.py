"""Conditions as `kubectl wait` and `kubectl describe` read them (metav1.Condition). Pure but for the clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurmlet.base.clock import rfc3339

Obj = dict[str, Any]


@dataclass(frozen=True)
class Condition:
    type: str
    status: bool | None  # None: Unknown
    reason: str  # CamelCase, never empty: the API server refuses that
    message: str = ""


def merged(
    present: Sequence[Mapping[str, Any]], wanted: Sequence[Condition], generation: int, now: str = ""
) -> list[Obj]:
    """`present` with `wanted` in their places; those of other writers stay. Time moves only when the status does."""
    conditions = [dict(one) for one in present]
    for one in wanted:
        status = "Unknown" if one.status is None else str(one.status)
        old = next((known for known in conditions if known["type"] == one.type), None)
        moved = old is None or old["status"] != status
        new = {
            "type": one.type,
            "status": status,
            "reason": one.reason,
            "message": one.message,
            "observedGeneration": generation,
            "lastTransitionTime": (now or rfc3339()) if old is None or moved else old["lastTransitionTime"],
        }
        if old is None:
            conditions.append(new)
        else:
            conditions[conditions.index(old)] = new
    return conditions


def status_patch(obj: Mapping[str, Any], *wanted: Condition, **fields: Any) -> Obj | None:
    """A merge patch of the object's status, or None where it says all that already: no write, no event, no loop.

    With the resourceVersion: a merge patch replaces the whole list, and another writer's condition must not be lost.
    """
    status, metadata = obj.get("status") or {}, obj["metadata"]
    generation = int(metadata.get("generation") or 0)
    new = {"conditions": merged(status.get("conditions") or (), wanted, generation), **fields}
    if all(status.get(name) == value for name, value in new.items()):
        return None
    return {"metadata": {"resourceVersion": metadata["resourceVersion"]}, "status": new}


def is_true(obj: Mapping[str, Any], type_: str) -> bool:
    found = (obj.get("status") or {}).get("conditions") or ()
    return any(one["type"] == type_ and one["status"] == "True" for one in found)
