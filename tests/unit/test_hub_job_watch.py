"""One look at Slurm for all: what an absence means, what a refresh waits for, who decides how a job ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from slurmlet.base.clock import Clock
from slurmlet.hub.jobs import job_watch, look_pace
from slurmlet.hub.jobs.job_watch import JobWatch
from slurmlet.model.ids import JobId, PodUid
from slurmlet.model.job_states import Stage
from slurmlet.model.slurm_values import EndedJob, Job
from slurmlet.slurm.fake import FakeSlurm, away
from tests.unit.hub_making import TurnedClock, make_job, make_settings
from tests.unit.loopback import until

UID = PodUid("u-1")


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_pace, "SHORTEST_S", 0.001)
    monkeypatch.setattr(look_pace, "_FIRST_FAILURE_S", 0.01)


def watch_with(
    tmp_path: Path,
    slurm: FakeSlurm,
    scenario: Callable[[JobWatch], Awaitable[None]],
    clock: Clock | None = None,
    **settings: object,
) -> None:
    async def run() -> None:
        watch = JobWatch(make_settings(tmp_path, **settings), slurm, clock)
        task = asyncio.create_task(watch.run())
        try:
            await asyncio.wait_for(scenario(watch), 2)
        finally:
            assert not task.done(), "the watch outlives every failure of Slurm's"
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_jobs_are_found_by_the_pod_in_their_comment(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    foreign = Job(JobId("8"), "RUNNING", "", "", "batch", "slurmlet:cafebabe:u-2")
    slurm.queue = [make_job("7"), foreign, Job(JobId("9"), "RUNNING", "", "", "batch", "my job")]

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        job = watch.job(UID)
        assert job is not None
        assert job.job_id == "7"
        assert list(watch.all_jobs()) == [UID]

    watch_with(tmp_path, slurm, scenario)


@pytest.mark.parametrize(
    ("states", "chosen"),
    [
        (("RUNNING", "RUNNING"), "7"),
        (("COMPLETED", "RUNNING"), "8"),
        (("COMPLETED", "FAILED"), "7"),
        (("PENDING", "COMPLETED"), "7"),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_two_jobs_of_one_pod_the_living_counts_then_the_older(
    tmp_path: Path, states: tuple[str, str], chosen: str, turned: bool
) -> None:
    slurm = FakeSlurm()
    slurm.queue = [make_job("7", state=states[0]), make_job("8", state=states[1])]
    if turned:
        slurm.queue.reverse()

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        assert watch.all_jobs()[UID].job_id == chosen

    watch_with(tmp_path, slurm, scenario)


def test_refresh_waits_for_a_look_that_began_after_it(tmp_path: Path) -> None:
    """A look under way may have read the queue before the job was there."""
    slurm = FakeSlurm()
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        looking.set()
        await go_on.wait()

    slurm.hooks["jobs"] = hold

    async def scenario(watch: JobWatch) -> None:
        await until(looking.is_set)
        slurm.queue = [make_job("7")]  # after the look under way has read the (empty) queue
        refreshing = asyncio.create_task(watch.refresh())
        await asyncio.sleep(0.01)
        slurm.hooks.clear()
        go_on.set()
        await refreshing
        assert slurm.looks == 2
        assert watch.job(UID) is not None

    watch_with(tmp_path, slurm, scenario)


def test_an_absence_means_nothing_before_a_whole_look_after_the_mark(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    looking, go_on = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        looking.set()
        await go_on.wait()

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        slurm.hooks["jobs"] = hold
        watch.expect("somebody", "news")
        await until(looking.is_set)
        mark = watch.mark  # a job is submitted now, while a look is under way
        assert not watch.looked_since(mark)
        slurm.hooks.clear()
        go_on.set()
        await asyncio.sleep(0.005)
        await watch.refresh()
        assert watch.looked_since(mark)

    watch_with(tmp_path, slurm, scenario, calm_poll_s=60.0)


def test_a_slurm_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.queue = [make_job("7")]

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        slurm.hooks["jobs"] = away
        slurm.queue = []
        mark, looks = watch.mark, slurm.looks
        await until(lambda: slurm.looks >= looks + 3)
        assert watch.job(UID) is not None
        assert not watch.looked_since(mark + 1)
        fate = await watch.fate(JobId("7"))
        assert fate is not None
        assert fate.stage is Stage.RUNNING
        slurm.hooks.clear()
        await watch.refresh()
        assert watch.job(UID) is None

    watch_with(tmp_path, slurm, scenario)


def test_it_looks_often_while_somebody_waits_and_seldom_else(tmp_path: Path) -> None:
    slurm = FakeSlurm()

    async def scenario(watch: JobWatch) -> None:
        await asyncio.sleep(0.1)
        assert slurm.looks == 1
        watch.expect("a pod", "the end of its job")
        await until(lambda: slurm.looks >= 5)

    watch_with(tmp_path, slurm, scenario, busy_poll_s=0.005, calm_poll_s=60.0)


FATES = [
    ("queued", make_job("7", state="PENDING", reason="Priority"), None, Stage.QUEUED, ""),
    ("running", make_job("7"), None, Stage.RUNNING, ""),
    ("accounting knows more", make_job("7", state="CANCELLED"), EndedJob(JobId("7"), "CANCELLED", 0, 0, 0), Stage.ENDED,
     "Slurm job 7 was cancelled by root"),
    ("accounting lags behind", make_job("7", state="TIMEOUT", reason="TimeLimit"),
     EndedJob(JobId("7"), "RUNNING", 0, 0, None), Stage.ENDED, "Slurm job 7 reached its time limit (TimeLimit)"),
    ("accounting has nothing", make_job("7", state="NODE_FAIL"), None, Stage.ENDED, "Slurm job 7 lost its node"),
    ("only accounting knows", None, EndedJob(JobId("7"), "PREEMPTED", 0, 0, None), Stage.ENDED,
     "Slurm job 7 was preempted by another job"),
    ("only accounting knows, and it runs", None, EndedJob(JobId("7"), "RUNNING", 0, 0, None), Stage.RUNNING, ""),
    ("nobody knows", None, None, Stage.ENDED, "Slurm job 7 is no longer known to Slurm"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("queued", "ended", "stage", "message"), [row[1:] for row in FATES], ids=[row[0] for row in FATES]
)
def test_the_fate_of_a_job(
    tmp_path: Path, queued: Job | None, ended: EndedJob | None, stage: Stage, message: str
) -> None:
    slurm = FakeSlurm()
    slurm.queue = [queued] if queued else []
    slurm.accounts = {JobId("7"): ended} if ended else {}

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        fate = await watch.fate(JobId("7"))
        assert fate is not None
        assert (fate.stage, fate.message) == (stage, message)

    watch_with(tmp_path, slurm, scenario)


def test_nobody_can_say_while_accounting_is_away(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.hooks["ended"] = away

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        assert await watch.fate(JobId("7")) is None
        slurm.hooks.clear()
        clock.turn(0.5)
        assert await watch.fate(JobId("7")) is None, "not asked again at once"
        clock.turn(1)
        assert await watch.fate(JobId("7")) is not None

    clock = TurnedClock()
    watch_with(tmp_path, slurm, scenario, clock)


def test_an_end_is_remembered_until_it_is_forgotten(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.accounts = {JobId("7"): EndedJob(JobId("7"), "TIMEOUT", 0, 0, None)}

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        first = await watch.fate(JobId("7"))
        slurm.hooks["ended"] = away
        assert await watch.fate(JobId("7")) == first
        watch.forget(JobId("7"))
        assert await watch.fate(JobId("7")) is None

    watch_with(tmp_path, slurm, scenario)


def test_accounting_is_asked_once_for_all_that_ended_meanwhile(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    ids = [JobId(str(number)) for number in range(7, 12)]
    slurm.accounts = {one: EndedJob(one, "COMPLETED", 0, 0, None) for one in ids}
    asked: list[list[JobId]] = []
    answer = slurm.ended

    async def ended(job_ids: Sequence[JobId]) -> dict[JobId, EndedJob]:
        asked.append(list(job_ids))
        return await answer(job_ids)

    slurm.ended = ended  # type: ignore[method-assign]
    held = asyncio.Event()

    async def hold() -> None:
        await held.wait()

    slurm.hooks["ended"] = hold

    async def scenario(watch: JobWatch) -> None:
        first = asyncio.create_task(watch.fate(ids[0]))
        await until(lambda: asked)
        others = [asyncio.create_task(watch.fate(one)) for one in ids[1:]]
        await asyncio.sleep(0.02)
        held.set()
        fates = await asyncio.gather(first, *others)
        assert [fate is not None and fate.stage for fate in fates] == [Stage.ENDED] * len(ids)
        assert asked == [ids[:1], ids[1:]]

    watch_with(tmp_path, slurm, scenario)


@pytest.mark.parametrize(("state", "asks"), [("COMPLETED", False), ("FAILED", False), ("CANCELLED", True)])
def test_an_end_that_the_runner_told_needs_no_accounting(tmp_path: Path, state: str, asks: bool) -> None:
    slurm = FakeSlurm()
    slurm.queue = [make_job("7", state=state)]
    asked: list[int] = []
    slurm.hooks["ended"] = lambda: asked.append(1)

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        fate = await watch.fate(JobId("7"), ended_well=True)
        assert fate is not None
        assert fate.stage is Stage.ENDED
        assert bool(asked) is asks

    watch_with(tmp_path, slurm, scenario)


def test_accounting_that_is_away_says_nothing_to_anybody(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.hooks["ended"] = away

    async def scenario(watch: JobWatch) -> None:
        assert await asyncio.gather(*(watch.fate(JobId(str(number))) for number in range(3))) == [None] * 3

    watch_with(tmp_path, slurm, scenario)


def test_whoever_asks_and_is_cancelled_leaves_nobody_waiting(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    asking = asyncio.Event()

    async def hang() -> None:
        asking.set()
        await asyncio.Event().wait()

    slurm.hooks["ended"] = hang

    async def scenario(watch: JobWatch) -> None:
        first = asyncio.create_task(watch.fate(JobId("7")))
        await until(asking.is_set)
        second = asyncio.create_task(watch.fate(JobId("7")))
        await asyncio.sleep(0.01)
        slurm.hooks.clear()
        first.cancel()
        found = await second
        assert found is not None
        assert found.stage is Stage.ENDED

    watch_with(tmp_path, slurm, scenario)


def test_ends_are_not_remembered_without_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_watch, "_REMEMBERED", 3)
    slurm = FakeSlurm()
    ids = [JobId(str(number)) for number in range(7, 12)]
    slurm.accounts = {one: EndedJob(one, "COMPLETED", 0, 0, None) for one in ids}

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        for one in ids:
            await watch.fate(one)
        slurm.hooks["ended"] = away
        known = [one for one in ids if await watch.fate(one) is not None]
        assert known == ids[-3:]

    watch_with(tmp_path, slurm, scenario)


def test_jobs_of_pools_and_gangs_come_with_the_same_look(tmp_path: Path) -> None:
    slurm, clock = FakeSlurm(), TurnedClock()
    shared = {"state": "RUNNING", "reason": "", "nodes": "c1", "partition": "batch"}
    slurm.queue = [
        Job(JobId("5"), comment="slurmlet-pool:deadbeef:pool-aaa", left_s=100.0, **shared),  # type: ignore[arg-type]
        Job(JobId("6"), comment="slurmlet-pool:cafebabe:pool-bbb", **shared),  # type: ignore[arg-type]
    ]

    async def scenario(watch: JobWatch) -> None:
        await watch.refresh()
        clock.turn(30)
        (one,) = watch.pool_jobs()
        assert (one.job_id, one.node, one.left_s) == ("5", "pool-aaa", 70.0), "time goes on between two looks"
        assert slurm.looks <= 2

    watch_with(tmp_path, slurm, scenario, clock, calm_poll_s=60.0)


def test_jobs_that_ended_are_counted_once(tmp_path: Path) -> None:
    slurm = FakeSlurm()
    slurm.queue = [make_job("7"), make_job("8", uid="u-2"), make_job("9", uid="u-3", state="COMPLETED")]
    told: list[int] = []

    async def scenario(watch: JobWatch) -> None:
        watch.subscribe_ended(told.append)
        await watch.refresh()
        slurm.queue = [make_job("7", state="FAILED")]
        await watch.refresh()
        await watch.refresh()
        assert told == [2]

    watch_with(tmp_path, slurm, scenario)
