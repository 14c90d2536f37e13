"""How the hub begins."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.files import read_json, write_json
from slurmlet.hub import runner_server
from slurmlet.hub.hub import wait_for_api
from slurmlet.hub.runner_server import write_record
from slurmlet.kube.client import ApiError
from slurmlet.kube.work_queue import Backoff
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


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.ESTALE])
def test_a_home_that_fails_when_the_hub_writes_its_record_is_waited_for_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    said: list[str] = []
    fails = 2

    def failing(path: Path, value: Any) -> None:
        nonlocal fails
        if fails:
            fails -= 1
            raise OSError(code, "the home fails")
        write_json(path, value)

    monkeypatch.setattr(runner_server, "write_json", failing)
    monkeypatch.setattr(runner_server, "_HOME_BACKOFF", Backoff(0.01, 0.02))
    asyncio.run(asyncio.wait_for(write_record(tmp_path / "hub.json", {"pid": 1}, said.append), 5))
    assert read_json(tmp_path / "hub.json") == {"pid": 1}
    assert len(said) == 2
    assert "the home fails" in said[0]
    assert "free space" in said[0]
