"""Controllers: one key's trouble is its own, cancellation passes, informers feed keys."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.errors import SlurmletError
from slurmlet.kube.controller import Again, Controller, Informer, key_of, told
from slurmlet.kube.work_queue import Backoff
from tests.unit.loopback import api_server, make_keys, until, watching

QUICK = Backoff(first_s=0.005, most_s=0.02)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_keys(tmp_path_factory.mktemp("pki"))


def running(controller: Controller[str], scenario: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        task = asyncio.create_task(controller.run())
        try:
            await scenario()
            assert not task.done(), "a controller never ends by itself"
        finally:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        SlurmletError("no"),
        RuntimeError("bug"),
        TimeoutError(),
    ],
)
def test_any_failure_of_one_key_is_told_counted_and_tried_again(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[str] = []
    failures: list[tuple[str, Exception, int]] = []

    async def reconcile(key: str) -> Again:
        seen.append(key)
        if key == "bad" and seen.count("bad") < 4:
            raise error
        return None

    controller = Controller(
        "thing",
        reconcile,
        backoff=QUICK,
        on_failure=lambda key, why, count, _: failures.append((key, why, count)),
    )

    async def scenario() -> None:
        controller.add("bad")
        controller.add("good")
        await until(lambda: seen.count("bad") == 4)
        assert seen[:2] == ["bad", "good"], "others do not wait"
        assert failures == [("bad", error, 1), ("bad", error, 2), ("bad", error, 3)]
        assert (controller.tally.failed, controller.tally.failing) == (3, set())
        assert controller.queue.failures("bad") == 0

    with caplog.at_level(logging.WARNING):
        running(controller, scenario)
    assert caplog.records[0].getMessage().startswith(f"thing bad: {told(error)}; again in ")
    # Where a bug is must be seen; a full disk needs no traceback.
    assert bool(caplog.records[0].exc_info) == (type(error) is RuntimeError)


def test_a_report_of_a_failure_that_fails_itself_changes_nothing() -> None:
    seen: list[str] = []

    async def reconcile(key: str) -> Again:
        seen.append(key)
        raise SlurmletError("no")

    def report(key: str, error: Exception, count: int, delay_s: float) -> None:
        raise ValueError("bug in the report")

    controller = Controller("thing", reconcile, backoff=QUICK, on_failure=report)

    async def scenario() -> None:
        controller.add("a")
        await until(lambda: len(seen) >= 2)

    running(controller, scenario)


def test_a_result_says_when_to_look_again() -> None:
    seen: list[float] = []

    async def reconcile(key: str) -> Again:
        seen.append(asyncio.get_running_loop().time())
        return 0.02 if len(seen) < 3 else None

    controller = Controller("thing", reconcile)

    async def scenario() -> None:
        controller.add("a")
        await until(lambda: len(seen) == 3)
        assert min(seen[1] - seen[0], seen[2] - seen[1]) > 0.015
        await asyncio.sleep(0.05)
        assert len(seen) == 3

    running(controller, scenario)


def test_a_reconcile_that_hangs_has_failed_and_other_workers_go_on() -> None:
    seen: list[str] = []

    async def reconcile(key: str) -> Again:
        seen.append(key)
        if key == "hangs" and seen.count("hangs") == 1:
            await asyncio.sleep(60)
        return None

    controller = Controller("thing", reconcile, workers=2, timeout_s=0.05, backoff=QUICK)

    async def scenario() -> None:
        controller.add("hangs")
        controller.add("other")
        await until(lambda: seen.count("hangs") == 2)
        assert seen == ["hangs", "other", "hangs"]
        assert controller.tally.failed == 1

    running(controller, scenario)


def test_two_workers_never_have_the_same_key() -> None:
    inside: list[str] = []
    most = 0
    done = 0

    async def reconcile(key: str) -> Again:
        nonlocal most, done
        assert key not in inside
        inside.append(key)
        most = max(most, len(inside))
        await asyncio.sleep(0.01)
        inside.remove(key)
        done += 1
        return None

    controller = Controller("thing", reconcile, workers=3)

    async def scenario() -> None:
        for _ in range(3):
            for key in ("a", "b"):
                controller.add(key)
            await asyncio.sleep(0.005)
        await until(lambda: done >= 4)
        assert most == 2
        assert controller.tally.failed == 0

    running(controller, scenario)


def thing(name: str, version: int, uid: str = "", **metadata: Any) -> dict[str, Any]:
    metadata |= {"name": name, "namespace": "ns", "uid": uid or name, "resourceVersion": str(version)}
    return {"metadata": metadata}


def test_an_informer_feeds_each_controller_its_own_keys_and_keeps_objects_by_key(keys: Path) -> None:
    listed = {
        "metadata": {"resourceVersion": "5"},
        "items": [thing("a", 1, labels={"owner": "o"}), thing("b", 2)],
    }
    events = watching(
        {"type": "ADDED", "object": thing("a", 7, uid="second")},
        {"type": "DELETED", "object": thing("a", 8)},
        {"type": "DELETED", "object": thing("b", 9)},
        then="hang",
    )

    async def run() -> None:
        seen: list[str] = []
        owners: list[str] = []

        async def reconcile(key: str) -> Again:
            seen.append(key)
            return None

        async def reconcile_owner(key: str) -> Again:
            owners.append(key)
            return None

        async with api_server(keys) as api, asyncio.TaskGroup() as tasks:
            api.on("GET", "/things", listed, events)
            informer = Informer(api.client, "/things")
            own, owner = Controller("own", reconcile), Controller("owner", reconcile_owner)
            informer.feed(own, key_of)
            informer.feed(owner, lambda obj: (obj["metadata"].get("labels") or {}).get("owner"))
            started = [tasks.create_task(work) for work in (informer.run(), own.run(), owner.run())]
            await informer.synced.wait()
            await until(lambda: len(informer.objects()) == 1)
            kept = informer.get("ns/a")
            assert kept is not None
            assert kept["metadata"]["uid"] == "second", "late news of the old one take nothing away"
            await until(lambda: {"ns/a", "ns/b"} <= set(seen))
            await until(lambda: owners)
            assert set(owners) == {"o"}
            for task in started:
                task.cancel()

    asyncio.run(run())


def test_a_controller_that_is_added_late_gets_what_is_there(keys: Path) -> None:
    async def run() -> None:
        async with api_server(keys) as api:

            async def reconcile(key: str) -> Again:
                return None

            informer, late = Informer(api.client, "/things"), Controller("late", reconcile)
            informer.keep(thing("a", 1))
            informer.feed(late, key_of)
            assert await late.queue.get() == "ns/a"

    asyncio.run(run())


def test_keys_are_as_kubectl_writes_them() -> None:
    assert key_of({"metadata": {"name": "n"}}) == "n"
    assert key_of({"metadata": {"name": "n", "namespace": "ns"}}) == "ns/n"


def test_an_answer_that_comes_late_does_not_replace_what_the_watch_told_meanwhile(keys: Path) -> None:
    async def run() -> None:
        async with api_server(keys) as api:
            informer = Informer(api.client, "/things")
            informer.keep(thing("a", 10))
            informer.keep(thing("a", 9))
            kept = informer.get("ns/a")
            assert kept is not None
            assert kept["metadata"]["resourceVersion"] == "10"

    asyncio.run(run())
