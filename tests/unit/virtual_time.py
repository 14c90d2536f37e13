"""An event loop whose clock jumps to the next timer instead of waiting for it: hours pass in milliseconds, always alike."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from slurmlet.base.clock import Clock

T = TypeVar("T")
EPOCH_S = 1_700_000_000.0


class _Jumping(selectors.SelectSelector):
    """Looks whether anything is ready, and if nothing is, lets the time pass that it should have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits, and nothing will ever happen"
            self.now_s += max(0.0, timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_s

    def run_in_executor(self, _executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """At once and in this thread: a thread would make the order of things depend on the machine."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class LoopClock(Clock):
    """The clock of a virtual loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def monotonic_s(self) -> float:
        return self._loop.time()

    def time_s(self) -> float:
        return EPOCH_S + self._loop.time()


def run_virtually(main: Coroutine[Any, Any, T]) -> T:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()
