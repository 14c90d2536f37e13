"""A queue of keys for controllers, with client-go's rules.

A key that waits is there once, however often it was added. A key that is being worked on is not given to a second worker; if
it is added meanwhile, it comes again after `done`. Time is the event loop's alone, so that tests may bend it.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Backoff:
    """How long to wait after so many failures in a row: doubling, never beyond `most_s`, spread by a tenth."""

    first_s: float = 0.2
    most_s: float = 300.0
    factor: float = 2.0

    def delay_s(self, failures: int) -> float:
        # The exponent is bounded first: a float overflows after a thousand failures.
        delay_s = min(self.most_s, self.first_s * self.factor ** min(max(failures - 1, 0), 64))
        return delay_s * random.uniform(0.9, 1.1)  # noqa: S311


class WorkQueue(Generic[Key]):
    def __init__(self, backoff: Backoff = Backoff()) -> None:  # noqa: B008 - frozen
        self._backoff = backoff
        self._waiting: deque[Key] = deque()
        self._dirty: set[Key] = set()  # waiting, or added again while being worked on
        self._working: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, key: Key) -> None:
        """Work on it as soon as a worker is free; a later time that it had is taken back."""
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if key in self._dirty:
            return
        self._dirty.add(key)
        if key not in self._working:
            self._put(key)

    def add_after(self, key: Key, delay_s: float) -> None:
        """Not before `delay_s`, unless somebody wants it sooner; of two times the earlier one holds."""
        if delay_s <= 0:
            self.add(key)
            return
        loop = asyncio.get_running_loop()
        known = self._timers.get(key)
        if key in self._dirty or (known is not None and known.when() <= loop.time() + delay_s):
            return
        if known is not None:
            known.cancel()
        self._timers[key] = loop.call_later(delay_s, self._due, key)

    def add_failed(self, key: Key) -> float:
        """Once more, later with each failure in a row; returns when, in seconds."""
        self._failures[key] = self._failures.get(key, 0) + 1
        delay_s = self._backoff.delay_s(self._failures[key])
        self.add_after(key, delay_s)
        return delay_s

    def failures(self, key: Key) -> int:
        return self._failures.get(key, 0)

    def forget(self, key: Key) -> None:
        """It succeeded: the next failure is the first one again."""
        self._failures.pop(key, None)

    async def get(self) -> Key:
        """The key that waited longest; `done` must follow."""
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        key = self._waiting.popleft()
        self._dirty.discard(key)
        self._working.add(key)
        return key

    def done(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._dirty:
            self._put(key)

    def close(self) -> None:
        """Forget what waits for its time: nobody will ask again."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _due(self, key: Key) -> None:
        del self._timers[key]
        self.add(key)

    def _put(self, key: Key) -> None:
        self._waiting.append(key)
        self._filled.set()
