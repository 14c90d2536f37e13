"""The API client over real TLS on loopback: what is sent, how answers and failures are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmlet.kube.client import STRATEGIC, ApiClient, ApiError
from slurmlet.kube.credentials import by_certificate
from tests.unit.loopback import Api, api_server, make_keys, watching


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def served(keys: Path, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            await scenario(api)

    asyncio.run(run())


def test_requests_carry_query_body_and_content_type(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        types: list[str] = []

        async def remember(request: web.Request) -> web.Response:
            types.append(request.headers.get("Content-Type", ""))
            return web.json_response({"ok": True})

        for method in ("GET", "POST", "PATCH", "DELETE"):
            api.on(method, "/x", remember)
        assert await api.client.get("/x", fieldSelector="spec.nodeName!=", limit="1") == {"ok": True}
        await api.client.create("/x", {"a": 1})
        await api.client.patch("/x", {"b": 2})
        await api.client.patch("/x", {"b": 2}, STRATEGIC)
        await api.client.delete("/x", {"gracePeriodSeconds": 0})
        assert api.seen("GET", "/x") == [({"fieldSelector": "spec.nodeName!=", "limit": "1"}, None)]
        assert api.seen("POST", "/x") == [({}, {"a": 1})]
        assert api.seen("DELETE", "/x") == [({}, {"gracePeriodSeconds": 0})]
        assert types[1:] == [
            "application/json",
            "application/merge-patch+json",
            STRATEGIC,
            "application/json",
        ]

    served(keys, scenario)


@pytest.mark.parametrize(
    ("status", "transient"),
    [
        *((status, False) for status in (400, 403, 404, 409, 410, 422)),
        *((status, True) for status in (429, 500, 503)),
    ],
)
def test_the_servers_refusals(keys: Path, status: int, transient: bool) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", "/x", status)
        with pytest.raises(ApiError) as error:
            await api.client.get("/x")
        assert (error.value.status, error.value.transient) == (status, transient)
        assert (error.value.message, error.value.api_reason) == (f"answer {status}", f"Reason{status}")

    served(keys, scenario)


@pytest.mark.parametrize("text", ["plain words", '["no status"]', ""])
def test_a_refusal_that_is_no_status_object(keys: Path, text: str) -> None:
    async def scenario(api: Api) -> None:
        async def answer(request: web.Request) -> web.Response:
            return web.Response(status=502, text=text)

        api.on("GET", "/x", answer)
        with pytest.raises(ApiError) as error:
            await api.client.get("/x")
        assert (error.value.status, error.value.message) == (502, text or "Bad Gateway")

    served(keys, scenario)


def test_a_server_that_is_not_there_is_status_zero_and_transient(keys: Path) -> None:
    async def scenario() -> None:
        nobody = by_certificate("https://127.0.0.1:1", keys / "ca.crt", keys / "hub.crt", keys / "hub.key")
        async with ApiClient(nobody) as client:
            with pytest.raises(ApiError) as error:
                await client.get("/x")
            assert (error.value.status, error.value.transient) == (0, True)
            with pytest.raises(ApiError) as error:
                await _all(client.watch("/x"))
            assert error.value.status == 0

    asyncio.run(scenario())


def test_a_request_without_an_answer_is_told_with_a_reason(
    keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slurmlet.kube.client.REQUEST_TIMEOUT_S", 0.05)

    async def scenario(api: Api) -> None:
        api.on("GET", "/x", watching(then="hang"))
        with pytest.raises(ApiError, match=r"GET /x: .*[Tt]ime") as error:
            await api.client.get("/x")
        assert error.value.transient

    served(keys, scenario)


def test_a_server_of_another_authority_is_not_believed(keys: Path, tmp_path: Path) -> None:
    async def scenario(api: Api) -> None:
        others = make_keys(tmp_path)
        stranger = by_certificate(api.url, others / "ca.crt", keys / "hub.crt", keys / "hub.key")
        async with ApiClient(stranger) as client:
            with pytest.raises(ApiError, match="certificate"):
                await client.get("/x")
        assert api.requests == []

    served(keys, scenario)


async def _all(events: AsyncIterator[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event async for event in events]


def test_a_watch_asks_for_bookmarks_and_tells_each_event(keys: Path) -> None:
    first, second = {"type": "ADDED", "object": {"a": "ü"}}, {"type": "BOOKMARK", "object": {}}

    async def scenario(api: Api) -> None:
        text = (json.dumps(first) + "\n\n" + json.dumps(second) + "\n").encode()
        # Cut in the middle of a line: events are lines, however they arrive.
        api.on("GET", "/pods", watching(text[:20], text[20:50], text[50:]))
        assert await _all(api.client.watch("/pods", resourceVersion="5")) == [first, second]
        ((query, _),) = api.seen("GET", "/pods")
        assert {"watch": "1", "allowWatchBookmarks": "true", "resourceVersion": "5"}.items() <= query.items()

    served(keys, scenario)


def test_an_event_far_longer_than_a_buffer(keys: Path) -> None:
    event = {"type": "ADDED", "object": {"data": "x" * (1 << 20)}}

    async def scenario(api: Api) -> None:
        api.on("GET", "/pods", watching(event))
        assert await _all(api.client.watch("/pods")) == [event]

    served(keys, scenario)


def test_a_watch_that_breaks_or_is_refused_raises(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", "/pods", watching({"type": "ADDED", "object": {}}, then="break"), 410)
        with pytest.raises(ApiError) as error:
            await _all(api.client.watch("/pods"))
        assert error.value.status == 0
        with pytest.raises(ApiError) as error:
            await _all(api.client.watch("/pods"))
        assert error.value.status == 410

    served(keys, scenario)
