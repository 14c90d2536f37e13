"""The reflector against a scripted API server: pages, events, bookmarks, breaks, relists."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.kube import reflector as reflecting
from slurmlet.kube.reflector import Reflector
from tests.unit.loopback import Api, api_server, make_keys, until, watching

Told = list[tuple[str, str, bool]]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def thing(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


def listing(*items: dict[str, Any], version: int, more: str = "") -> dict[str, Any]:
    return {
        "metadata": {"resourceVersion": str(version), **({"continue": more} if more else {})},
        "items": list(items),
    }


def event(type_: str, *about: Any) -> dict[str, Any]:
    return {"type": type_, "object": thing(*about)}


EXPIRED = {"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old resource version"}}


class Watched:
    def __init__(self, api: Api) -> None:
        self.api = api
        self.told: Told = []
        self.synced = 0

    def took(self, item: dict[str, Any], gone: bool) -> None:
        self.told.append((item["metadata"]["name"], item["metadata"]["resourceVersion"], gone))

    def sync(self) -> None:
        self.synced += 1

    def lists(self) -> list[dict[str, str]]:
        return [query for query, _ in self.api.seen("GET", "/pods") if "watch" not in query]

    def watches(self) -> list[str]:
        return [query["resourceVersion"] for query, _ in self.api.seen("GET", "/pods") if "watch" in query]


def reflect(keys: Path, answers: list[Any], scenario: Callable[[Watched], Awaitable[None]]) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            api.on("GET", "/pods", *answers)
            watched = Watched(api)
            reflector = Reflector(
                api.client, "/pods", watched.took, on_synced=watched.sync, fieldSelector="spec.nodeName!="
            )
            task = asyncio.create_task(reflector.run())
            try:
                await scenario(watched)
            finally:
                assert not task.done(), "a reflector never ends by itself"
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


HANG = watching(then="hang")


def test_all_pages_are_listed_before_it_calls_itself_synced(keys: Path) -> None:
    async def scenario(watched: Watched) -> None:
        await until(lambda: watched.watches())
        assert watched.told == [("a", "1", False), ("b", "2", False)]
        assert [query.get("continue") for query in watched.lists()] == [None, "next"]
        assert all(query["fieldSelector"] == "spec.nodeName!=" for query in watched.lists())
        assert (watched.synced, watched.watches()) == (1, ["10"])

    reflect(
        keys,
        [listing(thing("a", 1), version=9, more="next"), listing(thing("b", 2), version=10), HANG],
        scenario,
    )


def test_events_are_told_and_bookmarks_only_move_the_version(keys: Path) -> None:
    events = watching(
        event("ADDED", "a", 11),
        event("MODIFIED", "a", 12),
        event("DELETED", "a", 13),
        event("BOOKMARK", "", 20),
    )

    async def scenario(watched: Watched) -> None:
        await until(lambda: len(watched.watches()) == 2)
        assert watched.told == [("a", "11", False), ("a", "12", False), ("a", "13", True)]
        assert watched.watches() == ["10", "20"]
        assert len(watched.lists()) == 1

    reflect(keys, [listing(version=10), events, HANG], scenario)


def test_a_broken_connection_is_resumed_where_it_broke(keys: Path) -> None:
    broken = watching(event("ADDED", "a", 11), then="break")

    async def scenario(watched: Watched) -> None:
        await until(lambda: ("b", "12", False) in watched.told)
        assert watched.told == [("a", "11", False), ("b", "12", False)]
        assert watched.watches()[:3] == ["10", "11", "11"]
        assert len(watched.lists()) == 1

    reflect(
        keys, [listing(version=10), broken, 503, watching(event("ADDED", "b", 12), then="hang")], scenario
    )


@pytest.mark.parametrize("expiry", [410, watching(EXPIRED)], ids=["answer", "event"])
def test_an_expired_version_means_a_new_list_that_notices_what_vanished(keys: Path, expiry: Any) -> None:
    first = listing(thing("stays", 1), thing("goes", 2), thing("changes", 3), version=10)
    second = listing(thing("stays", 1), thing("changes", 15), thing("comes", 16), version=20)

    async def scenario(watched: Watched) -> None:
        await until(lambda: len(watched.watches()) == 2)
        assert watched.told[3:] == [("goes", "2", True), ("changes", "15", False), ("comes", "16", False)]
        assert watched.watches() == ["10", "20"]
        assert watched.synced == 2

    reflect(keys, [first, expiry, second, HANG], scenario)


def test_an_object_made_anew_under_its_old_name_is_another_one(keys: Path) -> None:
    again = thing("a", 15)
    again["metadata"]["uid"] = "uid-new"

    async def scenario(watched: Watched) -> None:
        await until(lambda: len(watched.watches()) == 2)
        assert watched.told == [("a", "1", False), ("a", "1", True), ("a", "15", False)]

    reflect(keys, [listing(thing("a", 1), version=10), 410, listing(again, version=20), HANG], scenario)


def test_a_server_that_is_away_at_first_is_waited_for(keys: Path) -> None:
    async def scenario(watched: Watched) -> None:
        await until(lambda: watched.synced)
        assert watched.told == [("a", "1", False)]

    reflect(keys, [503, 403, listing(thing("a", 1), version=10), HANG], scenario)


def test_watches_that_end_at_once_make_no_tight_loop(keys: Path) -> None:
    async def scenario(watched: Watched) -> None:
        await asyncio.sleep(0.3)
        assert 2 <= len(watched.watches()) <= 8

    reflect(keys, [listing(version=10), watching()], scenario)


def test_failures_in_a_row_are_spaced_out(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflecting, "_BACKOFF_S", (0.01, 0.1, 5.0))

    async def scenario(watched: Watched) -> None:
        await asyncio.sleep(0.4)
        # A list that succeeds between them does not begin the row anew: 410 after 410 would hammer the server.
        assert len(watched.lists()) == 3

    reflect(
        keys,
        [
            listing(version=10),
            410,
            listing(version=11),
            410,
            listing(version=12),
            410,
            listing(version=13),
            410,
        ],
        scenario,
    )
