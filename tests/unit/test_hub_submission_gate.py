"""A limit on the user's jobs: one back-off for the cluster, in line, and nobody is left standing."""

from __future__ import annotations

import pytest

from slurmlet.hub.jobs.submission_gate import SlurmLimited, SubmissionGate
from slurmlet.model.ids import PodUid
from slurmlet.model.submit_limits import breaks_it_alone, named_limit
from tests.unit.hub_making import TurnedClock

SAID = "AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/qos policy"


class Site:
    """Slurm with room for a number of jobs, and pods that try whenever they are let."""

    def __init__(self, room: int, pods: int) -> None:
        self.clock, self.room, self.requests = TurnedClock(), room, 0
        self.gate = SubmissionGate(self.clock)
        self.woken: list[PodUid] = []
        self.gate.subscribe(self.woken.append)
        self.pods = [PodUid(f"u-{number}") for number in range(pods)]
        self.jobs: list[PodUid] = []
        self.done: list[PodUid] = []

    def try_one(self, uid: PodUid) -> float | None:
        """Seconds to wait, None when it has its job."""
        try:
            self.gate.enter(uid)
            self.requests += 1
            if len(self.jobs) >= self.room:
                raise self.gate.refused(uid, SAID)
        except SlurmLimited as error:
            return error.retry_s
        self.jobs.append(uid)
        self.gate.accepted(uid)
        return None

    def try_all(self) -> None:
        for uid in self.pods:
            if uid not in self.jobs and uid not in self.done:
                self.try_one(uid)

    def follow_wakes(self) -> None:
        while self.woken:
            uid = self.woken.pop(0)
            if uid not in self.jobs:
                self.try_one(uid)


def test_a_thousand_pods_at_a_limit_of_five_ask_six_times() -> None:
    site = Site(room=5, pods=1000)
    site.try_all()
    assert len(site.jobs) == 5
    assert site.requests == 6
    for _ in range(100):
        site.try_all()
    assert site.requests == 6


def test_while_nothing_ends_one_pod_tries_less_and_less_often() -> None:
    site = Site(room=5, pods=100)
    site.try_all()
    for _ in range(3600):
        site.clock.turn(1)
        site.try_all()
    assert site.requests - 6 <= 18


def test_as_many_try_as_jobs_have_ended_in_the_order_they_came() -> None:
    site = Site(room=5, pods=20)
    site.try_all()
    site.jobs = site.jobs[3:]
    site.gate.jobs_ended(3)
    site.follow_wakes()
    assert site.jobs[2:] == [PodUid("u-5"), PodUid("u-6"), PodUid("u-7")]
    assert site.requests <= 6 + 3 + 1


def test_all_get_their_turn_when_jobs_end_one_by_one() -> None:
    site = Site(room=5, pods=60)
    site.try_all()
    for _ in range(60):
        if site.jobs:
            site.done.append(site.jobs.pop(0))
            site.gate.jobs_ended(1)
            site.follow_wakes()
            site.clock.turn(1)
            site.try_all()
    assert sorted([*site.done, *site.jobs]) == sorted(site.pods)
    assert site.gate.waiting == 0


def test_a_limit_that_is_lifted_lets_all_go_one_after_the_other() -> None:
    site = Site(room=5, pods=50)
    site.try_all()
    site.room = 1000
    site.clock.turn(10)
    site.try_all()
    site.follow_wakes()
    assert len(site.jobs) == 50
    site.try_one(PodUid("later"))
    assert "later" in site.jobs


def test_a_pod_that_goes_away_when_its_turn_comes_gives_it_to_the_next() -> None:
    site = Site(room=1, pods=3)
    site.try_all()
    site.jobs.clear()
    site.gate.jobs_ended(1)
    assert site.woken == ["u-1"]
    site.gate.gave_up(PodUid("u-1"))
    assert site.woken == ["u-1", "u-2"]


def test_a_pod_that_does_not_come_for_its_turn_does_not_hold_up_the_others() -> None:
    site = Site(room=1, pods=3)
    site.try_all()
    site.jobs.clear()
    site.gate.jobs_ended(1)
    site.clock.turn(60)
    assert site.try_one(PodUid("u-2")) is not None, "it is the turn of the first in line"
    assert site.try_one(PodUid("u-1")) is None


def test_the_error_tells_slurms_words_and_how_many_wait() -> None:
    site = Site(room=0, pods=2)
    site.try_all()
    with pytest.raises(SlurmLimited, match=r"AssocMaxSubmitJobLimit.*2 pods are waiting") as found:
        site.gate.enter(site.pods[1])
    assert found.value.retry_s == 8.0


@pytest.mark.parametrize(
    ("said", "name", "alone"),
    [
        ("AssocMaxSubmitJobLimit; Job violates accounting/qos policy", "AssocMaxSubmitJobLimit", False),
        ("QOSMaxSubmitJobPerUserLimit", "QOSMaxSubmitJobPerUserLimit", False),
        ("QOSMaxCpuPerJobLimit; Job violates accounting/qos policy", "QOSMaxCpuPerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", "AssocMaxWallDurationPerJobLimit", True),
        ("Job violates accounting/qos policy (job submit limit, user's size and/or time limits)", "", False),
    ],
)
def test_a_limit_that_the_job_breaks_by_itself_is_told_from_one_that_passes(
    said: str, name: str, alone: bool
) -> None:
    assert (named_limit(said), breaks_it_alone(said)) == (name, alone)
