"""Access to the home in a thread of its own, for a process that must go on when the shared file system hangs.

One thing is done after another, in the order in which it was asked for. Of two requests under one name the later one
counts, if the first has not begun: a home that hangs for an hour finds no heap of them when it is back. The thread must
never start a process: the kernel ends children with the thread that made them (PR_SET_PDEATHSIG). Others may: what runs
between their fork and exec takes no lock that this thread could hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# A home that answers at all mostly does so in milliseconds; whoever waits this long has better things to do.
_PATIENCE_S = 1.0


class HomeThread:
    def __init__(self, patience_s: float = _PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._waiting: dict[str, Callable[[], object]] = {}
        self._since_s: float | None = None  # when what is being done began
        self._error: Exception | None = None
        # A daemon: one that hangs must not hold up the end of the process.
        threading.Thread(target=self._work, name="home", daemon=True).start()

    def ask(self, name: str, work: Callable[[], object]) -> None:
        """Have it done; never waits."""
        with self._changed:
            self._waiting[name] = work
            self._changed.notify_all()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait a little until all is done; False where the home hangs. Raises what something that was asked for raised."""
        with self._changed:
            # Once it hangs, nobody waits for it again and again.
            wait_s = 0.0 if self.silent_s() > self._patience_s else self._patience_s
            self._changed.wait_for(self._is_idle, wait_s if timeout_s is None else timeout_s)
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._is_idle()

    def answer(self, work: Callable[[], T], default: T) -> T:
        """What `work` returns; `default` where the home hangs."""
        found: list[T] = []
        self.ask("answer", lambda: found.append(work()))
        self.settle()
        return found[0] if found else default

    def silent_s(self) -> float:
        """For how long the home has not answered."""
        since_s = self._since_s
        return time.monotonic() - since_s if since_s is not None else 0.0

    def _is_idle(self) -> bool:
        return not self._waiting and self._since_s is None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                work = self._waiting.pop(next(iter(self._waiting)))
                self._since_s = time.monotonic()
            error: Exception | None = None
            try:
                work()
            except Exception as raised:  # whoever asked gets it, in `settle`
                error = raised
            with self._changed:
                self._since_s = None
                self._error = self._error or error
                self._changed.notify_all()
