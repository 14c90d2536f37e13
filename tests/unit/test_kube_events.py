"""Events: repeats are counted on one object, failures cost one event, a flood costs no memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmlet.kube import events as events_module
from slurmlet.kube.events import EventRecorder
from tests.unit.loopback import Api, api_server, make_keys, until

POD = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u-1"},
    "spec": {"containers": [{"name": "c"}], "initContainers": [{"name": "i"}]},
}
EVENTS = "/api/v1/namespaces/ns/events"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


async def created(request: web.Request) -> web.Response:
    return web.json_response(await request.json(), status=201)


def record(keys: Path, scenario: Callable[[Api, EventRecorder], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            api.on("POST", EVENTS, created)
            recorder = EventRecorder(api.client, "login")
            task = asyncio.create_task(recorder.run())
            try:
                await scenario(api, recorder)
            finally:
                assert not task.done()
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def posted(api: Api) -> list[dict[str, Any]]:
    return [body for _, body in api.seen("POST", EVENTS)]


def patched(api: Api) -> list[tuple[str, Any]]:
    return [(path, body) for method, path, _, body in api.requests if method == "PATCH"]


def test_an_event_as_kubectl_describe_reads_it(keys: Path) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        recorder.pod_event(POD, "Normal", "Submitted", "Submitted as Slurm job 7")
        await until(lambda: posted(api))
        (event,) = posted(api)
        assert event["involvedObject"] == {
            "kind": "Pod", "apiVersion": "v1", "namespace": "ns", "name": "p", "uid": "u-1",
        }  # fmt: skip
        assert (event["type"], event["reason"], event["message"]) == (
            "Normal",
            "Submitted",
            "Submitted as Slurm job 7",
        )
        assert (event["count"], event["source"]) == (1, {"component": "slurmlet", "host": "login"})
        assert event["metadata"]["name"].startswith("p.")
        assert event["firstTimestamp"] == event["lastTimestamp"]

    record(keys, scenario)


@pytest.mark.parametrize(
    ("container", "path"), [("c", "spec.containers{c}"), ("i", "spec.initContainers{i}")]
)
def test_the_container_is_named_as_the_kubelet_names_it(keys: Path, container: str, path: str) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        recorder.pod_event(POD, "Normal", "Pulled", "x", container)
        await until(lambda: posted(api))
        assert posted(api)[0]["involvedObject"]["fieldPath"] == path

    record(keys, scenario)


def test_good_news_come_a_moment_later(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_LATER_S", 0.5)

    async def scenario(api: Api, recorder: EventRecorder) -> None:
        recorder.pod_event(POD, "Warning", "Failed", "trouble")
        await until(lambda: posted(api))
        recorder.pod_event(POD, "Normal", "Started", "good")
        await asyncio.sleep(0.1)
        assert [event["reason"] for event in posted(api)] == ["Failed"]
        await until(lambda: len(posted(api)) == 2)

    record(keys, scenario)


def test_repeats_are_counted_on_one_object(keys: Path) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        api.on("PATCH", "*", {})
        for _ in range(3):
            recorder.pod_event(POD, "Warning", "BackOff", "again")
        recorder.pod_event(POD, "Warning", "BackOff", "something else")
        recorder.pod_event(POD, "Warning", "BackOff", "again", "c")
        await until(lambda: len(posted(api)) == 3)
        name = posted(api)[0]["metadata"]["name"]
        assert [path for path, _ in patched(api)] == [f"{EVENTS}/{name}"] * 2
        assert [body["count"] for _, body in patched(api)] == [2, 3]

    record(keys, scenario)


def test_a_counted_event_that_expired_is_made_anew(keys: Path) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        recorder.pod_event(POD, "Normal", "Queued", "x")
        await until(lambda: posted(api))
        # The scripted server knows no PATCH and answers 404, as after the events' hour.
        recorder.pod_event(POD, "Normal", "Queued", "x")
        await until(lambda: len(posted(api)) == 2)
        first, second = posted(api)
        assert first["metadata"]["name"] != second["metadata"]["name"]
        assert second["count"] == 1

    record(keys, scenario)


def test_repeats_long_apart_are_events_of_their_own(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_SAME_WITHIN_S", 0.0)

    async def scenario(api: Api, recorder: EventRecorder) -> None:
        recorder.pod_event(POD, "Normal", "Queued", "x")
        recorder.pod_event(POD, "Normal", "Queued", "x")
        await until(lambda: len(posted(api)) == 2)
        assert patched(api) == []

    record(keys, scenario)


@pytest.mark.parametrize("status", [403, 500])
def test_an_event_that_cannot_be_written_costs_only_itself(keys: Path, status: int) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        api.on("POST", EVENTS, status, created)
        recorder.pod_event(POD, "Normal", "First", "x")
        recorder.pod_event(POD, "Normal", "Second", "x")
        await until(lambda: len(posted(api)) == 2)
        assert posted(api)[1]["reason"] == "Second"

    record(keys, scenario)


def test_a_flood_drops_events_instead_of_growing(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events_module, "_QUEUE_LIMIT", 10)
    monkeypatch.setattr(events_module, "_REMEMBERED", 3)

    async def scenario(api: Api, recorder: EventRecorder) -> None:
        for number in range(1000):
            recorder.pod_event(POD, "Normal", "Flood", str(number))
        await until(lambda: len(posted(api)) >= 10)
        await asyncio.sleep(0.02)
        assert len(posted(api)) == 10
        assert len(recorder._seen) == 3

    record(keys, scenario)


def test_long_names_and_messages_stay_legal(keys: Path) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        long = {"metadata": {**POD["metadata"], "name": "a" * 198 + "-.b" + "c" * 40}, "spec": {}}
        recorder.pod_event(long, "Normal", "X", "m" * 5000)
        await until(lambda: posted(api))
        (event,) = posted(api)
        assert event["metadata"]["name"].startswith("a" * 198 + ".")
        assert len(event["metadata"]["name"]) <= 253
        assert len(event["message"]) == 1024

    record(keys, scenario)


def test_events_of_nodes_lie_in_the_default_namespace(keys: Path) -> None:
    async def scenario(api: Api, recorder: EventRecorder) -> None:
        path = "/api/v1/namespaces/default/events"
        api.on("POST", path, created)
        recorder.node_event("batch", "Warning", "PartitionDown", "x")
        await until(lambda: api.seen("POST", path))
        ((_, event),) = api.seen("POST", path)
        assert event["involvedObject"] == {
            "kind": "Node",
            "apiVersion": "v1",
            "name": "batch",
            "uid": "batch",
        }

    record(keys, scenario)
