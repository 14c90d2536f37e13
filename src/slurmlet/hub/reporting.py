"""Every write to a pod's API object: status, annotations, the last delete."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from slurmlet.base.clock import rfc3339
from slurmlet.hub.podstate import PodState
from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError
from slurmlet.model.status import Facts, pod_status

log = logging.getLogger(__name__)


async def write_status(client: ApiClient, state: PodState) -> None:
    """Patch the status to what is known now; nothing is sent when nothing changed."""
    status = pod_status(
        Facts(
            pod=state.pod,
            now=rfc3339(),
            report=state.report,
            fate=state.fate,
            job_id=state.job_id or "",
            waiting=state.waiting,
            refused=state.refused,
            failed=state.failed,
            place=state.place,
            refused_ephemeral=state.refused_ephemeral,
            image_ids={name: image.repo_digest for name, image in state.images.items()},
        )
    )
    if unchanged(status, state.pod.get("status") or {}):
        return
    change = {"metadata": {"uid": state.uid}, "status": status}
    state.take_newer(await client.patch(f"{state.path}/status", change, STRATEGIC))


async def annotate(client: ApiClient, state: PodState, annotations: Mapping[str, str]) -> None:
    """For people to read; a pod runs without it, so a failure is only logged."""
    known = state.pod["metadata"].get("annotations") or {}
    if all(known.get(key) == value for key, value in annotations.items()):
        return
    try:
        change = {"metadata": {"uid": state.uid, "annotations": dict(annotations)}}
        state.take_newer(await client.patch(state.path, change))
    except ApiError as error:
        log.warning("pod %s: annotation not written: %s", state.name, error.message)


async def delete_object(client: ApiClient, state: PodState) -> None:
    """Let the object go, as a kubelet does when everything of the pod is gone."""
    try:
        await client.delete(state.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": state.uid}})
    except ApiError as error:
        if error.status not in (404, 409):
            raise


def unchanged(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
    """Whether a patch would change nothing: absent and None are the same, others' conditions are not ours."""
    for key, value in new.items():
        before = old.get(key)
        if key == "conditions":
            known = {one["type"]: one for one in before or ()}
            if any(not unchanged(one, known.get(one["type"], {})) for one in value):
                return False
        elif value != before and (value or before):
            return False
    return True
