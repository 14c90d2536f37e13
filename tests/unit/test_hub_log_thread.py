"""The hub's log, while the home takes lines and while it does not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import pytest

from slurmlet.hub.log_thread import LogThread


class Home(logging.Handler):
    """Takes lines while it is well."""

    def __init__(self) -> None:
        super().__init__()
        self.well, self.asked = threading.Event(), threading.Event()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.asked.set()
        assert self.well.wait(30)
        self.lines.append(record.getMessage())


@pytest.fixture
def home() -> Iterator[Home]:
    made = Home()
    yield made
    made.well.set()


def logger(thread: LogThread) -> logging.Logger:
    made = logging.Logger("hub")
    made.addHandler(thread)
    return made


def test_lines_are_written_in_order_with_their_tracebacks(home: Home) -> None:
    home.well.set()
    thread = LogThread(home)
    log = logger(thread)
    log.info("pod %s", "a")
    try:
        {}["lost"]
    except KeyError:
        log.exception("pod b")
    thread.finish(10)
    assert home.lines[0] == "pod a"
    assert home.lines[1].startswith("pod b\nTraceback")
    assert home.lines[1].endswith("KeyError: 'lost'")


def test_who_logs_goes_on_while_the_home_hangs_and_what_is_left_out_is_told(home: Home) -> None:
    thread = LogThread(home, most=10)
    log = logger(thread)
    log.info("first")
    assert home.asked.wait(10)
    for number in range(30):
        log.info("line %d", number)
    thread.finish(0.01)  # does not hang either
    home.well.set()
    thread.finish(10)
    assert home.lines == [
        "first",
        *(f"line {number}" for number in range(10)),
        "20 lines were left out of this log: the home did not take them",
    ]
