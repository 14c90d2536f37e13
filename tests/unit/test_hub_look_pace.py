"""The budget of requests to slurmctld: quick while something is expected, then less; less still when Slurm is slow."""

from __future__ import annotations

import pytest

from slurmlet.hub.jobs.look_pace import LookPace
from tests.unit.hub_making import TurnedClock

BUSY_S, QUEUED_S, CALM_S = 0.3, 10.0, 30.0


def make_pace() -> tuple[LookPace, TurnedClock]:
    clock = TurnedClock()
    return LookPace(clock, BUSY_S, QUEUED_S, CALM_S), clock


def looks_within(pace: LookPace, clock: TurnedClock, seconds: float, queued: bool = False) -> int:
    looks, passed_s = 0, 0.0
    while passed_s < seconds:
        pace.answered(0.02)
        wait_s = pace.interval_s(queued)
        clock.turn(wait_s)
        passed_s += wait_s
        looks += 1
    return looks


def test_at_rest_there_are_two_looks_a_minute() -> None:
    pace, clock = make_pace()
    assert looks_within(pace, clock, 600) == 20


def test_jobs_in_the_queue_alone_are_no_reason_to_hurry() -> None:
    pace, clock = make_pace()
    assert looks_within(pace, clock, 600, queued=True) == 60


def test_what_was_just_asked_for_is_looked_for_at_once_and_then_less_and_less() -> None:
    pace, clock = make_pace()
    pace.expect("pod a", "start of 7")
    assert looks_within(pace, clock, 2) >= 4
    assert looks_within(pace, clock, 58) <= 20
    looks_within(pace, clock, 240)
    assert looks_within(pace, clock, 600) == 20, (
        "what has not come in minutes waits for the next look at rest"
    )


def test_waiting_on_for_the_same_thing_does_not_keep_the_pace_up() -> None:
    pace, clock = make_pace()
    assert pace.expect("pod a", "end")
    clock.turn(100)
    assert not pace.expect("pod a", "end")
    assert pace.interval_s(queued=False) == 25.0
    assert pace.expect("pod a", "something else")
    assert pace.interval_s(queued=False) == BUSY_S


def test_who_has_what_it_waited_for_is_no_reason_to_look() -> None:
    pace, _ = make_pace()
    pace.expect("pod a", "end")
    assert not pace.quiet
    pace.settle("pod a")
    assert pace.quiet
    assert pace.interval_s(queued=False) == CALM_S


def test_a_slow_slurm_is_asked_less() -> None:
    pace, _ = make_pace()
    pace.expect("pod a", "end")
    pace.answered(4.0)
    assert pace.interval_s(queued=False) == 12.0


def test_a_slurm_that_does_not_answer_is_asked_less_and_less() -> None:
    pace, _ = make_pace()
    pace.expect("pod a", "end")
    waits = []
    for _ in range(8):
        pace.failed(limited=False)
        waits.append(pace.interval_s(queued=False))
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    pace.answered(0.02)
    assert pace.interval_s(queued=False) == BUSY_S


def test_a_site_that_limits_requests_is_given_more_time_for_long() -> None:
    pace, _ = make_pace()
    pace.expect("pod a", "end")
    for _ in range(3):
        pace.failed(limited=True)
    pace.answered(0.02)
    assert pace.interval_s(queued=False) == pytest.approx(16.0)
    for _ in range(30):
        pace.answered(0.02)
    assert pace.interval_s(queued=False) == BUSY_S
