"""Requests that wait their turn in the client: how many are under way, which share an answer, what a late patch says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from slurmlet.kube.client import ApiClient, ApiError
from tests.unit.loopback import Api, api_server, make_keys, until


class Gate:
    """A handler that holds every request until it is opened."""

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self.count = 0
        self.open = asyncio.Event()

    async def __call__(self, request: web.Request) -> web.Response:
        self.inside += 1
        self.most = max(self.most, self.inside)
        self.count += 1
        number = self.count
        await self.open.wait()
        self.inside -= 1
        return web.json_response({"number": number})


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def with_client(keys: Path, at_once: int, scenario: Callable[[Api, ApiClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys, at_once) as api:
            await asyncio.wait_for(scenario(api, api.client), 5)

    asyncio.run(run())


def test_no_more_than_so_many_at_once(keys: Path) -> None:
    async def scenario(api: Api, client: ApiClient) -> None:
        gate = Gate()
        api.on("POST", "/x", gate)
        asking = [asyncio.create_task(client.create("/x", {"n": number})) for number in range(7)]
        await until(lambda: gate.inside == 2)
        await asyncio.sleep(0.05)
        assert gate.inside == 2
        gate.open.set()
        await asyncio.gather(*asking)
        assert gate.most == 2
        assert [body["n"] for _, body in api.seen("POST", "/x")] == list(range(7)), (
            "in the order they were asked for"
        )

    with_client(keys, 2, scenario)


def test_readers_share_only_what_was_not_sent_yet(keys: Path) -> None:
    async def scenario(api: Api, client: ApiClient) -> None:
        gate = Gate()
        api.on("GET", "/cm", gate)
        first = asyncio.create_task(client.read("/cm"))
        await until(lambda: gate.inside == 1)
        # The request under way may have been answered before these were asked: they need another, one for all three.
        later = [asyncio.create_task(client.read("/cm")) for _ in range(3)]
        await asyncio.sleep(0.05)
        later[0].cancel()  # one who gives up takes nothing from the others
        gate.open.set()
        assert (await first)["number"] == 1
        assert [(await one)["number"] for one in later[1:]] == [2, 2]
        assert gate.count == 2
        assert (await client.read("/cm"))["number"] == 3, "an answer is never kept"

    with_client(keys, 1, scenario)


def test_readers_share_a_refusal_too(keys: Path) -> None:
    async def scenario(api: Api, client: ApiClient) -> None:
        api.on("GET", "/none", 404)
        told = await asyncio.gather(*(client.read("/none") for _ in range(3)), return_exceptions=True)
        assert [one.status for one in told if isinstance(one, ApiError)] == [404] * 3

    with_client(keys, 1, scenario)


def test_a_patch_says_what_holds_when_it_is_sent(keys: Path) -> None:
    async def scenario(api: Api, client: ApiClient) -> None:
        gate = Gate()
        api.on("PATCH", "/pod", gate)
        state: dict[str, Any] = {"phase": "Pending"}
        first = asyncio.create_task(client.patch("/pod", {"phase": "Pending"}))
        await until(lambda: gate.inside == 1)
        waiting = asyncio.create_task(client.patch_latest("/pod", lambda: state or None))
        needless = asyncio.create_task(client.patch_latest("/pod", lambda: None))
        await asyncio.sleep(0.02)
        state["phase"] = "Running"
        gate.open.set()
        await asyncio.gather(first, waiting, needless)
        assert [body for _, body in api.seen("PATCH", "/pod")] == [{"phase": "Pending"}, {"phase": "Running"}]
        assert needless.result() is None

    with_client(keys, 1, scenario)
