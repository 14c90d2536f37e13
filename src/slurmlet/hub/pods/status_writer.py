"""Every write to a pod's API object: status, annotations, the last delete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.base.clock import rfc3339
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError
from slurmlet.model.pod_job import HOST_ANNOTATION, JOB_ID_ANNOTATION
from slurmlet.model.pod_status import Facts, pod_status

Obj = dict[str, Any]
# Annotations that do not wait for the next change of the status.
_AT_ONCE = {JOB_ID_ANNOTATION}


class StatusWriter:
    def __init__(self, client: ApiClient) -> None:
        self._client = client

    async def write(self, state: PodState, only_if_latest: bool = False) -> None:
        """Patch the status to what is known now, annotations with it; nothing is sent when nothing changed.

        `only_if_latest`: not over a version of the object that is newer than the one known here (ApiError 409).
        """
        if _change(state, only_if_latest) is not None:
            # Asked again when it is sent: in a burst the pod may be further by then, and one write tells it all.
            newer = await self._client.patch_latest(
                f"{state.path}/status", lambda: _change(state, only_if_latest), STRATEGIC
            )
            if newer is not None:
                state.take_newer(newer, same=False)

    async def delete(self, state: PodState) -> None:
        """Let the object go, as a kubelet does when everything of the pod is gone."""
        try:
            await self._client.delete(
                state.path, {"gracePeriodSeconds": 0, "preconditions": {"uid": state.uid}}
            )
        except ApiError as error:
            if error.status not in (404, 409):
                raise


def _change(state: PodState, only_if_latest: bool) -> Obj | None:
    """The patch that brings the object up to date; None when it is."""
    status = _status(state)
    notes = _notes(state)
    if unchanged(status, state.pod.get("status") or {}) and not notes.keys() & _AT_ONCE:
        return None
    # The status endpoint takes annotations too: one write instead of two.
    metadata: Obj = {"uid": state.uid, "annotations": notes}
    if only_if_latest:
        metadata["resourceVersion"] = state.pod["metadata"]["resourceVersion"]
    return {"metadata": metadata, "status": status}


def _notes(state: PodState) -> dict[str, str]:
    """Annotations for people to read that are not yet as they should be."""
    told = {
        JOB_ID_ANNOTATION: str(state.job_id or ""),
        HOST_ANNOTATION: state.place.host if state.place is not None else "",
    }
    written = state.pod["metadata"].get("annotations") or {}
    return {key: value for key, value in told.items() if value and written.get(key) != value}


def _status(state: PodState) -> Obj:
    return pod_status(
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
