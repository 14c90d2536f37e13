"""Asking runners what they use: only when wanted, never more than needed, whatever they answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from slurmlet.hub.hub_metrics import Counts
from slurmlet.hub.kubelet import pod_usage as module
from slurmlet.hub.kubelet.kubelet_stats import node_asked
from slurmlet.hub.kubelet.pod_usage import Usage
from slurmlet.hub.runner_links import LinkLost, RunnerLink
from slurmlet.kube.controller import Controller
from slurmlet.model.histogram import Histogram
from slurmlet.model.ids import PodUid
from slurmlet.model.stats_summary import exposition
from slurmlet.model.usage_samples import pod_cores
from tests.unit.loopback import until
from tests.unit.virtual_time import run_virtually


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_virtually(test(*arguments, **named))

    return run


def now_s() -> float:
    return asyncio.get_running_loop().time()


class FakeLink:
    """A runner at the other end: uses one core, answers when it is told to."""

    def __init__(self, delay_s: float = 0.0, fault: str = "") -> None:
        self.delay_s, self.fault = delay_s, fault
        self.asked: list[bool] = []
        self.began_s = now_s()

    async def ask_usage(self, timeout_s: float, *, disk: bool) -> Any:
        self.asked.append(disk)
        if self.fault == "silent":
            raise TimeoutError
        if self.fault == "lost":
            raise LinkLost
        await asyncio.sleep(self.delay_s)
        if self.fault == "nonsense":
            return {"at": "soon", "containers": []}
        if self.fault == "not begun":
            return None
        at_s = now_s()
        room = dict.fromkeys(
            ("used_bytes", "inodes_used", "capacity_bytes", "available_bytes", "inodes", "inodes_free"), 1
        )
        main = {
            "started_at": "2026-01-01T00:00:00Z", "cpu_s": at_s - self.began_s, "memory_bytes": 10, "rss_bytes": 5,
            "processes": 1, "rootfs": room if disk else None, "logs": None,
        }  # fmt: skip
        return {"at": at_s, "containers": {"main": main}, "volumes": {}}


class FakePod:
    def __init__(self, number: int, link: FakeLink | None, node: str = "batch") -> None:
        self.uid = PodUid(f"uid-{number}")
        self.node = node
        self.live_link: Any = link


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=now_s))
    monkeypatch.setattr(module, "_SHORTEST_BASE_S", 0.0625)
    monkeypatch.setattr(module, "POLL_S", 0.1)
    monkeypatch.setattr(module, "_STALE_S", 0.15)


@in_loop
async def test_a_first_look_takes_two_samples_and_a_second_none() -> None:
    link = FakeLink()
    pods = [FakePod(1, link), FakePod(2, None)]
    usage = Usage(lambda: pods)
    found = await usage.look(pods)
    assert list(found) == ["uid-1"]
    # One core, measured over a sixteenth of a second.
    assert pod_cores(found[PodUid("uid-1")]) == pytest.approx(1.0)
    await usage.look(pods)
    assert link.asked == [False, False]


@in_loop
async def test_disk_is_walked_only_for_who_asks_and_then_remembered() -> None:
    link = FakeLink()
    pods = [FakePod(1, link)]
    usage = Usage(lambda: pods)
    found = await usage.look(pods, space=True)
    assert found[PodUid("uid-1")].now.has_space
    await asyncio.sleep(0.2)
    found = await usage.look(pods, space=True)
    assert found[PodUid("uid-1")].now.has_space
    assert link.asked.count(True) == 1


@in_loop
async def test_a_thousand_runners_are_asked_together_but_not_all_at_once() -> None:
    under_way, most, answered = 0, 0, 0

    class Counting(FakeLink):
        async def ask_usage(self, timeout_s: float, *, disk: bool) -> Any:
            nonlocal under_way, most, answered
            under_way += 1
            most = max(most, under_way)
            try:
                return await super().ask_usage(timeout_s, disk=disk)
            finally:
                under_way -= 1
                answered += 1

    pods = [FakePod(number, Counting(delay_s=0.002)) for number in range(1000)]
    usage = Usage(lambda: pods)
    in_one_turn: list[int] = []

    async def others() -> None:
        while True:
            before = answered
            await asyncio.sleep(0.0005)
            in_one_turn.append(answered - before)

    watcher = asyncio.create_task(others())
    found = await usage.look(pods)
    watcher.cancel()
    assert len(found) == 1000
    assert most <= 64
    # Whoever wants the loop for something else gets it, after no more answers than are asked for together.
    assert 0 < max(in_one_turn) <= 64


@pytest.mark.parametrize("fault", ["silent", "lost", "nonsense", "not begun"])
@in_loop
async def test_a_bad_runner_costs_its_own_figures_only(fault: str) -> None:
    pods = [FakePod(1, FakeLink(fault=fault)), FakePod(2, FakeLink())]
    usage = Usage(lambda: pods)
    assert list(await usage.look(pods)) == ["uid-2"]
    assert usage.silent(pods) == 1


@in_loop
async def test_what_was_looked_at_is_kept_warm_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARM_S", 0.35)
    looked_at, other = FakeLink(), FakeLink()
    pods = [FakePod(1, looked_at), FakePod(2, other)]
    usage = Usage(lambda: pods)
    keeper = asyncio.create_task(usage.run())
    await asyncio.sleep(0.25)
    assert looked_at.asked == []
    await usage.look(pods[:1])
    await asyncio.sleep(0.3)
    warm = len(looked_at.asked)
    assert warm >= 4
    await asyncio.sleep(0.5)
    settled = len(looked_at.asked)
    await asyncio.sleep(0.3)
    assert len(looked_at.asked) == settled
    assert other.asked == []
    keeper.cancel()


@in_loop
async def test_cpu_time_of_pods_that_are_gone_stays_with_their_node() -> None:
    pods = [FakePod(1, FakeLink()), FakePod(2, FakeLink(), node="short")]
    usage = Usage(lambda: pods)
    found = await usage.look(pods)
    used_s = found[PodUid("uid-1")].now.cpu_s
    assert usage.other_cpu_s("batch", found) == 0
    pods.pop(0)
    assert usage.other_cpu_s("batch", {}) == used_s
    usage._forget_ended()
    assert usage.other_cpu_s("batch", {}) == used_s
    assert used_s > 0


class FakeWriter:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)

    async def drain(self) -> None:
        return None

    def close(self) -> None:
        return None


@in_loop
async def test_answers_find_their_questions() -> None:
    writer = FakeWriter()
    link = RunnerLink(PodUid("u"), {"has_pod": True}, writer)  # type: ignore[arg-type]

    def answer(number: int, usage: Any) -> None:
        link.answered({"type": "answer", "id": number, "usage": usage})

    first = asyncio.create_task(link.ask_usage(1.0, disk=False))
    second = asyncio.create_task(link.ask_usage(1.0, disk=True))
    await asyncio.sleep(0)
    answer(2, "two")
    answer(1, "one")
    answer(1, "late")
    answer(99, "of nobody")
    assert [await first, await second] == ["one", "two"]
    with pytest.raises(TimeoutError):
        await link.ask_usage(0.01, disk=False)
    lost = asyncio.create_task(link.ask_usage(5.0, disk=False))
    await asyncio.sleep(0)
    link.end()
    with pytest.raises(LinkLost):
        await lost


@pytest.mark.parametrize(
    ("uri", "node"),
    [
        ("/api/v1/nodes/batch/proxy/pods", "batch"), ("/api/v1/nodes/batch/proxy/", "batch"),
        ("/api/v1/nodes/gpu.a-1/proxy/stats/summary", "gpu.a-1"), ("/api/v1/nodes/https:batch:40123/proxy/pods", "batch"),
        ("/api/v1/nodes/batch:40123/proxy/pods", "batch"), ("/pods", None), ("", None),
        ("/api/v1/namespaces/x/nodes/y/proxy", None),
    ],
)  # fmt: skip
def test_which_node_is_asked_about(uri: str, node: str | None) -> None:
    assert node_asked({"X-Forwarded-Uri": uri}) == node


def test_a_histogram_counts_up() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    text = exposition([histogram.family("t_seconds", "help")])
    assert 't_seconds_bucket{le="0.1"} 2' in text
    assert 't_seconds_bucket{le="1.0"} 3' in text
    assert 't_seconds_bucket{le="+Inf"} 4' in text
    assert "t_seconds_sum 7.65" in text
    assert "t_seconds_count 4" in text


def test_requests_are_counted_by_their_answer() -> None:
    counts = Counts()
    for status in (200, 200, 409):
        counts.api_answered("PATCH", status)
    text = exposition(counts.families())
    assert 'slurmlet_api_requests_total{method="PATCH",code="200"} 2' in text
    assert 'slurmlet_api_requests_total{method="PATCH",code="409"} 1' in text


def test_what_controllers_do_is_counted_by_their_names() -> None:
    async def reconcile(key: str) -> None:
        if key == "bad":
            raise OSError("no space")

    async def scenario() -> str:
        counts = Counts()
        controller, idle = Controller("claim", reconcile), Controller("pool", reconcile)
        counts.follow(controller, idle)
        for key in ("good", "bad"):
            controller.add(key)
        task = asyncio.create_task(controller.run())
        await until(lambda: controller.tally.failed)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        idle.add("waits")
        return exposition(counts.families())

    text = asyncio.run(scenario())
    assert 'slurmlet_controller_reconciles_total{controller="claim"} 2' in text
    assert 'slurmlet_controller_reconcile_errors_total{controller="claim"} 1' in text
    assert 'slurmlet_controller_failing_keys{controller="claim"} 1' in text
    assert 'slurmlet_controller_queue_depth{controller="claim"} 0' in text
    assert 'slurmlet_controller_queue_depth{controller="pool"} 1' in text
    assert 'slurmlet_controller_failing_keys{controller="pool"} 0' in text
