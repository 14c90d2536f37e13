"""The provisioner against a scripted API server: directories made, grown, removed and left alone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmlet.hub.storage import claim_controller
from slurmlet.hub.storage.claim_controller import ClaimController
from slurmlet.kube.work_queue import Backoff
from slurmlet.model import claims
from tests.unit.fakes import FakeEvents
from tests.unit.hub_making import make_settings
from tests.unit.loopback import Api, api_server, make_keys, until, watching

CLAIMS, VOLUMES = "/api/v1/persistentvolumeclaims", "/api/v1/persistentvolumes"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
STATUS = "/api/v1/namespaces/ns/persistentvolumeclaims/data/status"
ONE = f"{VOLUMES}/pvc-u1"


def a_claim(**spec: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": "ns", "name": "data", "uid": "u1", "resourceVersion": "3",
            "annotations": {"volume.kubernetes.io/storage-provisioner": claims.PROVISIONER},
        },
        "spec": {"storageClassName": "shared", "resources": {"requests": {"storage": "1Gi"}}, **spec},
    }  # fmt: skip


def a_volume(directory: Path, phase: str, **changes: Any) -> dict[str, Any]:
    made = claims.persistent_volume(a_claim(), claims.storage_classes()[0], str(directory))
    made["metadata"].update({"uid": "v1", "resourceVersion": "4", **changes.pop("metadata", {})})
    made["spec"].update(changes)
    return {**made, "status": {"phase": phase}}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


Scenario = Callable[[Api, FakeEvents], Awaitable[None]]


def listing(*items: dict[str, Any]) -> dict[str, Any]:
    return {"metadata": {"resourceVersion": "9"}, "items": list(items)}


def provisioned(
    keys: Path, root: Path, pvcs: list[Any], pvs: list[Any], scenario: Scenario, more: Any = ()
) -> FakeEvents:
    """Run a provisioner in a cluster with these objects."""
    classes = [
        {**one, "metadata": {**one["metadata"], "uid": one["metadata"]["name"], "resourceVersion": "1"}}
        for one in (*claims.storage_classes(), *more)
    ]
    events = FakeEvents()

    async def run() -> None:
        async with api_server(keys) as api:
            api.on("GET", CLASSES, listing(*classes), watching(then="hang"))
            api.on("GET", CLAIMS, listing(*pvcs), watching(then="hang"))
            api.on("GET", VOLUMES, listing(*pvs), watching(then="hang"))
            api.on("POST", CLASSES, 409)
            settings = make_settings(root)
            task = asyncio.create_task(ClaimController(settings, api.client, events).run())  # type: ignore[arg-type]
            try:
                await scenario(api, events)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())
    return events


def test_classes_are_made_where_they_are_missing(keys: Path, tmp_path: Path) -> None:
    async def scenario(api: Api, _events: FakeEvents) -> None:
        await until(lambda: len(api.seen("POST", CLASSES)) == 2)
        assert [body["metadata"]["name"] for _, body in api.seen("POST", CLASSES)] == [
            "shared",
            "shared-wait",
        ]

    provisioned(keys, tmp_path, [], [], scenario)


def test_a_claim_gets_a_private_directory_and_a_volume_once(keys: Path, tmp_path: Path) -> None:
    directory = tmp_path / "volumes/pvc-u1"

    async def scenario(api: Api, events: FakeEvents) -> None:
        made = a_volume(directory, "Pending")
        api.on("POST", VOLUMES, made)
        await until(lambda: len(events.said) == 2)
        await asyncio.sleep(0.1)
        ((_, body),) = api.seen("POST", VOLUMES)
        assert body["spec"]["hostPath"]["path"] == str(directory)
        assert directory.stat().st_mode & 0o777 == 0o700
        assert directory.parent.stat().st_mode & 0o777 == 0o700

    events = provisioned(keys, tmp_path, [a_claim()], [], scenario)
    assert [reason for reason, _ in events.said] == ["Provisioning", "ProvisioningSucceeded"]


def test_a_claim_that_asks_too_much_is_told_and_gets_nothing(keys: Path, tmp_path: Path) -> None:
    async def scenario(api: Api, events: FakeEvents) -> None:
        await until(lambda: len(events.said) == 2)
        assert events.said[1][0] == "ProvisioningFailed"
        assert "spec.volumeMode" in events.said[1][1]
        assert api.seen("POST", VOLUMES) == []

    provisioned(keys, tmp_path, [a_claim(volumeMode="Block")], [], scenario)
    assert not (tmp_path / "volumes").exists()


def test_growing_writes_the_volume_and_then_the_claim(keys: Path, tmp_path: Path) -> None:
    claim = a_claim(volumeName="pvc-u1", resources={"requests": {"storage": "2Gi"}})
    claim["status"] = {"phase": "Bound", "capacity": {"storage": "1Gi"}}

    async def scenario(api: Api, events: FakeEvents) -> None:
        api.on("PATCH", ONE, a_volume(tmp_path, "Bound", capacity={"storage": "2Gi"}))
        api.on("PATCH", STATUS, {**claim, "status": {"phase": "Bound", "capacity": {"storage": "2Gi"}}})
        await until(lambda: len(events.said) == 2)
        await asyncio.sleep(0.1)
        assert [body for _, body in api.seen("PATCH", ONE)] == [{"spec": {"capacity": {"storage": "2Gi"}}}]
        ((_, body),) = api.seen("PATCH", STATUS)
        assert body["status"] == {"capacity": {"storage": "2Gi"}, "conditions": []}

    provisioned(keys, tmp_path, [claim], [a_volume(tmp_path, "Bound")], scenario)


def released(tmp_path: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    directory = tmp_path / "volumes/pvc-u1"
    directory.mkdir(parents=True)
    (directory / "file").write_text("x")
    return directory, a_volume(directory, "Released", **changes)


def test_a_released_volume_loses_its_directory_first(keys: Path, tmp_path: Path) -> None:
    directory, volume = released(tmp_path)

    async def scenario(api: Api, _events: FakeEvents) -> None:
        there: list[bool] = []

        async def delete(_request: Any) -> Any:
            there.append(directory.exists())
            return web.json_response({})

        api.on("DELETE", ONE, delete)
        both = {**volume, "metadata": {**volume["metadata"], "finalizers": [claims.FINALIZER, "a/b"]}}
        # Somebody else takes theirs off in between.
        api.on("GET", ONE, both, volume)
        api.on("PATCH", ONE, 409, volume)
        await until(lambda: len(api.seen("PATCH", ONE)) == 2, 5)
        assert there == [False]
        first, second = (body["metadata"]["finalizers"] for _, body in api.seen("PATCH", ONE))
        assert (first, second) == (["a/b"], None)

    provisioned(keys, tmp_path, [], [volume], scenario)


def test_retain_keeps_the_directory_and_lets_the_object_go(keys: Path, tmp_path: Path) -> None:
    going = {"deletionTimestamp": "2026-01-01T00:00:00Z"}
    directory, volume = released(tmp_path, persistentVolumeReclaimPolicy="Retain", metadata=going)

    async def scenario(api: Api, _events: FakeEvents) -> None:
        api.on("GET", ONE, volume)
        api.on("PATCH", ONE, volume)
        await until(lambda: api.seen("PATCH", ONE))
        assert api.seen("DELETE", ONE) == []

    provisioned(keys, tmp_path, [], [volume], scenario)
    assert (directory / "file").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"metadata": {"annotations": {}}},
        {"hostPath": {"path": "/home/user1"}},
    ],
    ids=["not ours", "another path"],
)
def test_nothing_else_is_ever_removed(keys: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    directory, volume = released(tmp_path, **change)

    async def scenario(api: Api, _events: FakeEvents) -> None:
        await until(lambda: api.seen("GET", VOLUMES))
        await asyncio.sleep(0.3)
        assert api.seen("DELETE", ONE) == []

    provisioned(keys, tmp_path, [], [volume], scenario)
    assert (directory / "file").exists()


def test_a_bound_volume_is_left_alone_even_when_its_object_is_to_go(keys: Path, tmp_path: Path) -> None:
    directory, volume = released(tmp_path, metadata={"deletionTimestamp": "2026-01-01T00:00:00Z"})
    volume["status"] = {"phase": "Bound"}

    async def scenario(api: Api, _events: FakeEvents) -> None:
        await until(lambda: api.seen("GET", VOLUMES))
        await asyncio.sleep(0.3)
        assert api.seen("PATCH", ONE) == []

    provisioned(keys, tmp_path, [], [volume], scenario)
    assert (directory / "file").exists()


def test_a_failure_is_tried_again(keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim_controller, "_BACKOFF", Backoff(0.05, 1.0))

    async def scenario(api: Api, _events: FakeEvents) -> None:
        api.on("POST", VOLUMES, 500, a_volume(tmp_path / "volumes/pvc-u1", "Pending"))
        await until(lambda: len(api.seen("POST", VOLUMES)) == 2)
        first, second = api.seen("POST", VOLUMES)
        assert first == second

    provisioned(keys, tmp_path, [a_claim()], [], scenario)


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.ESTALE, "Stale"), ValueError("a bug")],
)
def test_whatever_goes_wrong_with_one_claim_is_told_and_mended_later(
    keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr(claim_controller, "_BACKOFF", Backoff(0.05, 0.1))
    tries = 0
    make = claim_controller._make_private

    def failing(directory: Path) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise error
        make(directory)

    monkeypatch.setattr(claim_controller, "_make_private", failing)

    async def scenario(api: Api, events: FakeEvents) -> None:
        api.on("POST", VOLUMES, a_volume(tmp_path / "volumes/pvc-u1", "Pending"))
        await until(lambda: any(told[1] == "ProvisioningSucceeded" for told in events.told), 5)
        failed = [message for _, reason, message, _ in events.told if reason == "ProvisioningFailed"]
        assert failed == [f'failed to provision volume with StorageClass "shared": {error}'] * 2

    provisioned(keys, tmp_path, [a_claim()], [], scenario)
