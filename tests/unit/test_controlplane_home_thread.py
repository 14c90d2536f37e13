"""The thread that touches the home for the supervisor: order, what is left out, what is told when it hangs."""

from __future__ import annotations

import threading

import pytest

from slurmlet.controlplane.home_thread import HomeThread


def hung(home: HomeThread) -> threading.Event:
    """The home hangs until the event is set."""
    begun, back = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        back.wait(30)

    home.ask("hangs", hang)
    assert begun.wait(10)
    return back


def test_all_is_done_in_order() -> None:
    home, done = HomeThread(), list[int]()
    for number in range(50):
        home.ask(str(number), lambda number=number: done.append(number))  # type: ignore[misc]
    assert home.settle(10)
    assert done == list(range(50))


def test_who_asks_goes_on_while_the_home_hangs_and_the_latest_of_a_name_is_done_when_it_is_back() -> None:
    home, done = HomeThread(patience_s=0.05), list[int]()
    back = hung(home)
    for number in range(1000):
        home.ask("record", lambda number=number: done.append(number))  # type: ignore[misc]
    assert not home.settle()
    assert home.answer(lambda: "read", "not known") == "not known"
    assert home.silent_s() > 0
    back.set()
    assert home.settle(10)
    assert done == [999]
    assert home.silent_s() == 0
    assert home.answer(lambda: "read", "not known") == "read"


def test_what_went_wrong_is_raised_where_it_was_asked_for_and_the_thread_goes_on() -> None:
    home = HomeThread()

    def fail() -> None:
        raise LookupError("taken")

    home.ask("beat", fail)
    with pytest.raises(LookupError, match="taken"):
        home.settle(10)
    assert home.answer(lambda: 7, 0) == 7
