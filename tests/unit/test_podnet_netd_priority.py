"""netd and the processor: who goes first while a program makes many connections."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.fast.native.netd_priority import Yielding


@pytest.fixture
def loop() -> Iterator[Loop]:
    made = Loop()
    yield made
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    made.close()


def after(loop: Loop, seconds: float) -> int:
    """The policy of this process once the loop has turned for so long."""
    loop.run_until(lambda: False, seconds)
    return os.sched_getscheduler(0)


def test_steps_back_while_calls_are_many_and_not_longer(loop: Loop) -> None:
    yielding = Yielding(loop, shares_processor=True)
    yielding.heard(500)
    assert after(loop, 0.15) == os.SCHED_BATCH
    assert after(loop, 0.15) == os.SCHED_OTHER


def test_few_calls_change_nothing(loop: Loop) -> None:
    yielding = Yielding(loop, shares_processor=True)
    yielding.heard(5)
    assert after(loop, 0.15) == os.SCHED_OTHER


def test_stays_back_from_one_look_to_the_next(loop: Loop) -> None:
    yielding = Yielding(loop, shares_processor=True)
    yielding.heard(500)
    loop.later(0.12, lambda: yielding.heard(500))
    assert after(loop, 0.25) == os.SCHED_BATCH


def test_is_an_ordinary_process_again_when_it_ends(loop: Loop) -> None:
    yielding = Yielding(loop, shares_processor=True)
    yielding.heard(500)
    after(loop, 0.15)
    yielding.close()
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_keeps_what_somebody_else_chose(loop: Loop) -> None:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    yielding = Yielding(loop, shares_processor=True)
    yielding.heard(500)
    after(loop, 0.15)
    assert after(loop, 0.15) == os.SCHED_BATCH


def test_goes_first_where_each_has_a_processor_of_its_own(loop: Loop) -> None:
    yielding = Yielding(loop, shares_processor=False)
    yielding.heard(500)
    assert after(loop, 0.15) == os.SCHED_OTHER
