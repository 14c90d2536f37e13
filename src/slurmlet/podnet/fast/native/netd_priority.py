"""netd lets a program go first that makes many connections.

A call that is answered with a descriptor wakes netd up once more, when the program has taken it. There is nothing to do
then that could not wait for the program's next call, but an ordinary process takes the processor at once, for two more
switches in each connection. SCHED_BATCH is the kernel's word for one that does not (3 to 6 % more connections on two
processors). Only where both take turns on one processor: elsewhere netd would wait for a program that computes on its own.
And only while calls are many: a packet of the slow path should not wait for such a program either.
"""

from __future__ import annotations

import contextlib
import os
from typing import Optional

from slurmlet.linux.event_loop import Loop, Timer

_LOOK_EVERY_S = 0.1
_MANY = 100  # calls, between two looks


class Yielding:
    def __init__(self, loop: Loop, shares_processor: bool) -> None:
        self._loop = loop
        self._calls = 0
        self._looking: Optional[Timer] = None
        # Somebody else's choice for this process, such as SCHED_IDLE, stays.
        self._may = shares_processor and os.sched_getscheduler(0) == os.SCHED_OTHER
        self._yields = False

    def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._yield(False)

    def heard(self, calls: int) -> None:
        self._calls += calls
        if self._may and self._looking is None:
            self._looking = self._loop.later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        many = self._calls >= _MANY
        # While there are few, nobody looks: the next call asks for it.
        self._looking = self._loop.later(_LOOK_EVERY_S, self._look) if many else None
        self._calls = 0
        self._yield(many)

    def _yield(self, yields: bool) -> None:
        if yields == self._yields:
            return
        self._yields = yields
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH if yields else os.SCHED_OTHER, os.sched_param(0))
