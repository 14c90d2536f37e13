"""How the hub begins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slurmlet.hub.hub import wait_for_api
from slurmlet.kube.client import ApiError
from tests.unit.loopback import api_server, make_keys

NODES = "/api/v1/nodes"


def test_it_waits_for_an_api_server_that_is_not_ready(tmp_path: Path) -> None:
    async def run() -> None:
        async with api_server(make_keys(tmp_path)) as api:
            api.on("GET", NODES, 503, 403, {"items": []})
            await asyncio.wait_for(wait_for_api(api.client), 5)
            assert len(api.seen("GET", NODES)) == 3

    asyncio.run(run())


def test_an_api_server_that_does_not_know_the_hub_is_told_and_not_waited_for(tmp_path: Path) -> None:
    async def run() -> None:
        async with api_server(make_keys(tmp_path)) as api:
            api.on("GET", NODES, 401)
            with pytest.raises(ApiError) as found:
                await asyncio.wait_for(wait_for_api(api.client), 5)
            assert "slurmlet up" in found.value.hint

    asyncio.run(run())
