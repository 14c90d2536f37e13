"""The queue of keys: each once, one worker per key, failures later and later."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from slurmlet.kube.work_queue import Backoff, WorkQueue

QUICK = Backoff(first_s=0.01, most_s=0.05)


def run(scenario: Callable[[WorkQueue[str]], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(2):
            await scenario(WorkQueue(QUICK))

    asyncio.run(go())


def test_a_key_that_waits_is_there_once_and_order_is_kept() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        for key in ("a", "b", "a", "c", "b"):
            queue.add(key)
        assert [await queue.get() for _ in range(3)] == ["a", "b", "c"]
        assert len(queue) == 0

    run(scenario)


def test_a_key_added_while_it_is_worked_on_comes_again_only_after_done() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        queue.add("a")
        key = await queue.get()
        queue.add("a")
        queue.add("a")
        assert len(queue) == 0, "no second worker may have it"
        queue.done(key)
        assert len(queue) == 1
        queue.done(await queue.get())
        assert len(queue) == 0

    run(scenario)


def test_workers_wait_for_keys() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        waiting = [asyncio.create_task(queue.get()) for _ in range(2)]
        await asyncio.sleep(0)
        queue.add("a")
        queue.add("b")
        assert sorted(await asyncio.gather(*waiting)) == ["a", "b"]

    run(scenario)


def test_of_two_times_the_earlier_one_holds_and_now_beats_both() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        queue.add_after("a", 0.03)
        queue.add_after("a", 60)
        queue.add_after("a", 0.02)
        queue.done(await queue.get())
        assert 0.015 < loop.time() - began_s < 0.5
        queue.add_after("a", 0.02)
        queue.add("a")
        queue.done(await queue.get())
        await asyncio.sleep(0.05)
        assert len(queue) == 0, "the time it had was taken back"

    run(scenario)


def test_failures_in_a_row_wait_longer_until_forgotten() -> None:
    async def scenario(queue: WorkQueue[str]) -> None:
        delays_s = []
        for _ in range(6):
            delays_s.append(queue.add_failed("a"))
            queue.done(await queue.get())
        assert delays_s[0] < 0.012
        assert delays_s[0] < delays_s[1] < delays_s[2]
        assert max(delays_s) <= 0.055
        assert queue.failures("a") == 6
        queue.forget("a")
        assert queue.add_failed("a") < 0.012
        queue.close()
        await asyncio.sleep(0.03)
        assert len(queue) == 0

    run(scenario)


@pytest.mark.parametrize("failures", [1, 2, 10, 10_000])
def test_a_back_off_is_bounded_whatever_the_count(failures: int) -> None:
    assert 0 < Backoff(1.0, 300.0).delay_s(failures) <= 330.0
