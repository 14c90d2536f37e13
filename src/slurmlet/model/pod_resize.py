"""What a pod's job was given, in the words of its status, and resizes that come later.

A Slurm job keeps the resources it started with. Its allocation is read back from the status it was written to, so that a
new hub knows it too; before the first status with a job it is what the spec says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from slurmlet.model.pod_resources import pod_limits, pod_requests, same, written

Obj = Mapping[str, Any]
PENDING = "PodResizePending"
MESSAGE = "a Slurm job keeps the resources it was submitted with; delete the pod and create it again"


def allocated(pod: Obj, container: Obj) -> Obj:
    """The container's resources as its job has them."""
    status = pod.get("status") or {}
    every = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    for one in every:
        if one["name"] == container["name"] and one.get("resources") is not None:
            found: Obj = one["resources"]
            return found
    return container.get("resources") or {}


def container_amounts(pod: Obj, container: Obj) -> dict[str, Any]:
    """`resources` and `allocatedResources` of a container's status."""
    given = allocated(pod, container)
    amounts: dict[str, Any] = {"resources": dict(given)}
    if given.get("requests"):
        amounts["allocatedResources"] = dict(given["requests"])
    return amounts


def pod_amounts(pod: Obj) -> dict[str, Any]:
    """`resources` and `allocatedResources` of the pod's status."""
    spec = pod["spec"]
    before = (pod.get("status") or {}).get("resources")
    if before is not None:
        return {}
    requests, limits = written(pod_requests(spec)), written(pod_limits(spec))
    whole = {"requests": requests, "limits": limits}
    amounts: dict[str, Any] = {"resources": {kind: value for kind, value in whole.items() if value}}
    if requests:
        amounts["allocatedResources"] = requests
    return amounts


def resize_condition(pod: Obj) -> dict[str, Any] | None:
    """The condition of a pod that is asked to become what its job is not: reason and message alone."""
    if all(same(allocated(pod, one), one.get("resources")) for one in _resizable(pod["spec"])):
        return None
    return {"type": PENDING, "status": "True", "reason": "Infeasible", "message": MESSAGE}


def resize_event(pod: Obj) -> str:
    """The kubelet's event text for a resize that cannot be."""
    summary: dict[str, Any] = {}
    for key, kind in (("initContainers", "initContainers"), ("containers", "containers")):
        listed = [
            {"name": one["name"], "resources": one.get("resources") or {}}
            for one in pod["spec"].get(kind) or ()
        ]
        if listed:
            summary[key] = listed
    summary |= {"generation": pod["metadata"].get("generation"), "error": MESSAGE}
    return f"Pod resize Infeasible: {json.dumps(summary, separators=(',', ':'))}"


def is_new_resize(pod: Obj) -> bool:
    """Whether the pod's status does not say so yet."""
    if not pod.get("status") or resize_condition(pod) is None:
        return False
    known: Obj = next((one for one in pod["status"].get("conditions") or () if one["type"] == PENDING), {})
    return bool(known.get("observedGeneration") != pod["metadata"].get("generation"))


def _resizable(spec: Obj) -> Iterator[Obj]:
    yield from spec.get("initContainers") or ()
    yield from spec["containers"]
