"""Finalizers: ours comes and goes, others' stay, a lost race is run again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.kube import finalizers
from slurmlet.kube.client import ApiError
from tests.unit.loopback import Api, api_server, make_keys

OURS = "slurmlet.io/directory"
PATH = "/api/v1/persistentvolumes/v"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def volume(*names: str, version: str = "1", **metadata: Any) -> dict[str, Any]:
    return {"metadata": {"name": "v", "resourceVersion": version, "finalizers": list(names), **metadata}}


def served(keys: Path, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            await scenario(api)

    asyncio.run(run())


def patches(api: Api) -> list[Any]:
    return [body["metadata"] for _, body in api.seen("PATCH", PATH)]


def test_it_is_added_beside_others_and_once(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", PATH, volume("theirs"), volume("theirs", OURS))
        api.on("PATCH", PATH, volume("theirs", OURS, version="2"))
        made = await finalizers.add(api.client, PATH, OURS)
        assert made is not None
        assert finalizers.has(made, OURS)
        assert await finalizers.add(api.client, PATH, OURS) is not None
        assert patches(api) == [{"finalizers": ["theirs", OURS], "resourceVersion": "1"}]

    served(keys, scenario)


def test_nothing_is_begun_for_an_object_that_goes_or_is_gone(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", PATH, volume("theirs", deletionTimestamp="2026-01-01T00:00:00Z"), 404)
        assert await finalizers.add(api.client, PATH, OURS) is None
        assert await finalizers.add(api.client, PATH, OURS) is None
        assert patches(api) == []

    served(keys, scenario)


def test_it_is_taken_off_though_others_change_the_list_meanwhile(keys: Path) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", PATH, volume("theirs", OURS), volume(OURS, version="2"))
        api.on("PATCH", PATH, 409, volume())
        await finalizers.remove(api.client, PATH, OURS)
        assert patches(api) == [
            {"finalizers": ["theirs"], "resourceVersion": "1"},
            {"finalizers": None, "resourceVersion": "2"},
        ]
        api.on("GET", PATH, 404)
        await finalizers.remove(api.client, PATH, OURS)

    served(keys, scenario)


@pytest.mark.parametrize(("answer", "tries"), [(409, 10), (403, 1)])
def test_what_never_succeeds_is_said(keys: Path, answer: int, tries: int) -> None:
    async def scenario(api: Api) -> None:
        api.on("GET", PATH, volume(OURS))
        api.on("PATCH", PATH, answer)
        with pytest.raises(ApiError) as error:
            await finalizers.remove(api.client, PATH, OURS)
        assert error.value.status == answer
        assert len(patches(api)) == tries

    served(keys, scenario)
