"""Volumes of running pods follow the API: what is due, what is delivered, what is left alone."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.hub.pods import delivered_volumes, volume_refresh
from slurmlet.hub.pods.delivered_volumes import Record, Versions, due, record_plan
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.volume_refresh import VolumeRefresh
from slurmlet.model.downward_api import Place
from slurmlet.model.pod_sources import Sources, Token, volume_needs
from slurmlet.model.volume_plan import volume_plan
from tests.unit.fakes import FakeEvents, FakeLink
from tests.unit.loopback import Api, api_server, make_keys, until, watching

MAP = "/api/v1/namespaces/ns/configmaps/cm"
TOKEN = "/api/v1/namespaces/ns/serviceaccounts/default/token"


def make_pod(**labels: str) -> dict[str, Any]:
    parts = [
        {"serviceAccountToken": {"path": "token", "expirationSeconds": 600}},
        {"configMap": {"name": "cm"}},
        {"downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]}},
    ]
    return {
        "metadata": {"namespace": "ns", "name": "p", "uid": "u-1", "resourceVersion": "1", "labels": labels},
        "spec": {
            "containers": [],
            "volumes": [{"name": "v", "projected": {"sources": parts}}, {"name": "e"}],
        },
    }


def config_map(version: int, **data: str) -> dict[str, Any]:
    return {"metadata": meta(version), "data": data}


def meta(version: int) -> dict[str, str]:
    return {"namespace": "ns", "name": "cm", "uid": "cm-1", "resourceVersion": str(version)}


def delivered(pod: dict[str, Any], link: FakeLink, version: int = 5, **data: str) -> PodState:
    """A pod whose runner was given its plan."""
    state = PodState(pod)
    sources = Sources(
        config_maps={"cm": {key: value.encode() for key, value in data.items()}},
        tokens={Token("", 600): "first"},
        versions={("configmaps", "cm"): str(version)},
    )
    volumes = {one["name"]: volume_plan(pod, one, sources, Place(), {}) for one in pod["spec"]["volumes"]}
    state.link = link  # type: ignore[assignment]
    state.delivered = record_plan(state.pod, link, {"volumes": volumes}, sources)  # type: ignore[arg-type]
    return state


# What is due


@pytest.fixture
def versions() -> dict[str, Versions]:
    found = {kind: Versions(None, kind) for kind in ("configmaps", "secrets")}  # type: ignore[arg-type]
    for one in found.values():
        one.synced = True
    found["configmaps"].changed({"metadata": meta(5)}, False)
    return found


def is_due(state: PodState, versions: dict[str, Versions], later_s: float = 0) -> bool:
    assert state.delivered is not None
    return due(state.delivered, state.pod, versions, time.monotonic() + later_s)


def test_nothing_is_due_after_the_plan(versions: dict[str, Versions]) -> None:
    assert not is_due(delivered(make_pod(), FakeLink(has_pod=True)), versions)


def test_newer_older_deleted_and_new_objects(versions: dict[str, Versions]) -> None:
    maps = versions["configmaps"]
    assert maps.newer("ns", "cm", "4")
    assert not maps.newer("ns", "cm", "5")
    assert not maps.newer("ns", "cm", "6"), "the pod is ahead of the watch"
    assert maps.newer("ns", "cm", None), "it appeared"
    assert maps.newer("ns", "gone", "3"), "it went"
    assert not maps.newer("ns", "none", None)
    maps.changed({"metadata": meta(7)}, True)
    assert maps.newer("ns", "cm", "5")
    assert not maps.newer("ns", "cm", None)


def test_a_watch_that_has_not_listed_yet_decides_nothing(versions: dict[str, Versions]) -> None:
    versions["configmaps"].synced = False
    assert not versions["configmaps"].newer("ns", "cm", "4")


def test_labels_make_it_due_only_where_they_are_shown(versions: dict[str, Versions]) -> None:
    state = delivered(make_pod(a="1"), FakeLink(has_pod=True))
    state.pod = make_pod(a="2")
    assert is_due(state, versions)
    plain = make_pod(a="1")
    plain["spec"]["volumes"] = [{"name": "v", "configMap": {"name": "cm"}}]
    state = delivered(plain, FakeLink(has_pod=True))
    state.pod = {**plain, "metadata": {**plain["metadata"], "labels": {"a": "2"}}}
    assert not is_due(state, versions)


def test_tokens_are_due_at_four_fifths_of_their_life(versions: dict[str, Versions]) -> None:
    state = delivered(make_pod(), FakeLink(has_pod=True))
    assert not is_due(state, versions, later_s=465)
    assert is_due(state, versions, later_s=481)


def test_a_failed_delivery_waits_for_its_retry(versions: dict[str, Versions]) -> None:
    record = Record(None, volume_needs(make_pod()), look_s=100.0, unsure=True)  # type: ignore[arg-type]
    assert not due(record, make_pod(), versions, 99.0)
    assert due(record, make_pod(), versions, 101.0)


# What is delivered, over a scripted API


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


Scenario = Callable[[Api, FakeLink, FakeEvents], Awaitable[None]]


def refreshed(
    keys: Path, monkeypatch: pytest.MonkeyPatch, state: PodState, events: list[Any], scenario: Scenario
) -> None:
    """Run a refresher over one pod while the watch of config maps tells `events`."""
    monkeypatch.setattr(volume_refresh, "TICK_S", 0.02)

    async def run() -> None:
        async with api_server(keys) as api:
            listing = {"metadata": {"resourceVersion": "5"}, "items": [{"metadata": meta(5)}]}
            api.on("GET", "/api/v1/configmaps", listing, watching(*events, then="hang"))
            api.on("GET", "/api/v1/secrets", {"metadata": {"resourceVersion": "5"}}, watching(then="hang"))
            api.on("POST", TOKEN, {"status": {"token": "second"}})
            told = FakeEvents()
            refresh = VolumeRefresh(api.client, told, lambda: [state])  # type: ignore[arg-type]
            task = asyncio.create_task(refresh.run())
            try:
                await scenario(api, state.link, told)  # type: ignore[arg-type]
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def changed(version: int, kind: str = "MODIFIED") -> dict[str, Any]:
    return {"type": kind, "object": {"metadata": meta(version)}}


def content(files: dict[str, Any], path: str) -> bytes:
    return base64.b64decode(files[path]["data"])


def test_a_change_is_delivered_once_and_costs_no_token(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: Api, link: FakeLink, _events: FakeEvents) -> None:
        api.on("GET", MAP, config_map(6, key="new"))
        await until(lambda: link.told)
        await asyncio.sleep(0.1)
        assert len(link.told) == 1
        files = link.told[0]["volumes"]["v"]["files"]
        assert content(files, "key") == b"new"
        assert files["token"]["keep"]
        assert api.seen("POST", TOKEN) == []

    state = delivered(make_pod(), FakeLink(has_pod=True), key="old")
    refreshed(keys, monkeypatch, state, [changed(6)], scenario)


def test_a_change_of_nothing_is_not_delivered(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: Api, link: FakeLink, _events: FakeEvents) -> None:
        api.on("GET", MAP, config_map(6, key="old"))
        await until(lambda: api.seen("GET", MAP))
        await asyncio.sleep(0.1)
        assert link.told == []
        assert len(api.seen("GET", MAP)) == 1

    state = delivered(make_pod(), FakeLink(has_pod=True), key="old")
    refreshed(keys, monkeypatch, state, [changed(6)], scenario)


def test_a_deleted_source_is_told_of_once_and_nothing_changes(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(api: Api, link: FakeLink, events: FakeEvents) -> None:
        api.on("GET", MAP, 404)
        await until(lambda: events.said)
        await asyncio.sleep(0.1)
        assert events.said == [
            ("FailedMount", 'MountVolume.SetUp failed for volume "v" : configmap "cm" not found')
        ]
        assert link.told == []

    state = delivered(make_pod(), FakeLink(has_pod=True), key="old")
    refreshed(keys, monkeypatch, state, [changed(6, "DELETED")], scenario)


def test_an_old_token_is_replaced(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(api: Api, link: FakeLink, _events: FakeEvents) -> None:
        api.on("GET", MAP, config_map(5, key="old"))
        await until(lambda: link.told)
        await asyncio.sleep(0.1)
        assert len(link.told) == 1
        assert content(link.told[0]["volumes"]["v"]["files"], "token") == b"second"
        assert len(api.seen("POST", TOKEN)) == 1

    state = delivered(make_pod(), FakeLink(has_pod=True), key="old")
    assert state.delivered is not None
    state.delivered.token_due_s = dict.fromkeys(state.delivered.token_due_s, 0.0)
    refreshed(keys, monkeypatch, state, [], scenario)


def test_a_runner_that_comes_back_is_given_everything_but_its_token(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(api: Api, link: FakeLink, _events: FakeEvents) -> None:
        api.on("GET", MAP, config_map(5, key="old"))
        await until(lambda: link.told)
        assert link.told[0]["volumes"]["v"]["files"]["token"]["keep"]
        assert state.delivered is not None
        assert set(state.delivered.token_due_s) == {Token("", 600)}

    monkeypatch.setattr(delivered_volumes.random, "uniform", lambda _low, high: high)
    state = delivered(make_pod(), FakeLink(has_pod=True), key="old")
    state.link = FakeLink(has_pod=True)  # type: ignore[assignment]
    refreshed(keys, monkeypatch, state, [], scenario)


def test_a_server_in_trouble_is_asked_again_later(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_refresh, "_RETRY_S", 0.05)

    async def scenario(api: Api, link: FakeLink, _events: FakeEvents) -> None:
        api.on("GET", MAP, 500, config_map(6, key="new"))
        await until(lambda: link.told)
        assert content(link.told[0]["volumes"]["v"]["files"], "key") == b"new"

    state = delivered(make_pod(), FakeLink(has_pod=True), key="old")
    refreshed(keys, monkeypatch, state, [changed(6)], scenario)
