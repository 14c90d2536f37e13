"""Notes about queued pods: written without anybody waiting, and never over anything newer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.queued_status import QueuedStatus
from slurmlet.hub.pods.status_writer import StatusWriter
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Fate, Stage
from tests.unit.loopback import Api, api_server, make_keys, until
from tests.unit.reports import pod_report

STATUS = "/api/v1/namespaces/ns/pods/p/status"
QUEUED = Fate(Stage.QUEUED, pending_reason="Priority")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def queued_pod(version: str = "5") -> PodState:
    metadata = {"name": "p", "namespace": "ns", "uid": "u-1", "resourceVersion": version}
    status = {"phase": "Pending", "startTime": "2026-01-01T00:00:00Z"}
    state = PodState(
        {"metadata": metadata, "spec": {"containers": [{"name": "c", "image": "i"}]}, "status": status}
    )
    state.job_id, state.fate = JobId("7"), QUEUED
    return state


def noting(keys: Path, scenario: Callable[[Api, QueuedStatus], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            notes = QueuedStatus(StatusWriter(api.client))
            task = asyncio.create_task(notes.run())
            try:
                await asyncio.wait_for(scenario(api, notes), 5)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def written(api: Api) -> list[Any]:
    return [body for _, body in api.seen("PATCH", STATUS)]


def test_a_note_tells_slurms_reason_at_the_version_it_knows(keys: Path) -> None:
    async def scenario(api: Api, notes: QueuedStatus) -> None:
        state = queued_pod()
        newer = {**state.pod, "metadata": {**state.pod["metadata"], "resourceVersion": "6"}}
        api.on("PATCH", STATUS, newer)
        notes.add(state)
        notes.add(state)  # twice the same is one
        await until(lambda: state.pod is not newer and state.pod["metadata"]["resourceVersion"] == "6")
        (patch,) = written(api)
        assert patch["metadata"]["resourceVersion"] == "5"
        assert patch["metadata"]["annotations"] == {"slurmlet.io/job-id": "7"}
        waiting = patch["status"]["containerStatuses"][0]["state"]["waiting"]
        assert waiting == {"reason": "Queued", "message": "Slurm job 7 is pending: Priority"}

    noting(keys, scenario)


def test_a_pod_that_runs_by_then_is_left_to_its_worker(keys: Path) -> None:
    async def scenario(api: Api, notes: QueuedStatus) -> None:
        api.on("PATCH", STATUS, 409)
        started, over, gone, changed = queued_pod(), queued_pod(), queued_pod(), queued_pod()
        started.report, over.fate, gone.gone = pod_report(), Fate(Stage.ENDED), True
        for state in (started, over, gone):
            notes.add(state)
            await asyncio.sleep(0.02)
        assert written(api) == []
        # One that somebody else changed: the watch brings the newer version, and the note is not tried again.
        notes.add(changed)
        await until(lambda: written(api))
        await asyncio.sleep(0.05)
        assert len(written(api)) == 1

    noting(keys, scenario)
