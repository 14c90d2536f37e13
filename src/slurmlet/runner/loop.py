"""The runner's one event loop: file descriptors, timers, signals, all in the main thread.

asyncio is not used: importing it costs 40 ms in every job. Callbacks must not block for long; work that takes time
is a child process (children.py). A callback that raises is a bug of ours: it is reported on stderr and ends the
process, because a runner that limps on would report a state that is not true.
"""

from __future__ import annotations

import heapq
import os
import selectors
import signal
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

Callback = Callable[[], None]


class Timer:
    """A callback due at a time of the monotonic clock, until cancelled."""

    __slots__ = ("callback", "due_s")

    def __init__(self, due_s: float, callback: Callback) -> None:
        self.due_s = due_s
        self.callback: Optional[Callback] = callback

    def cancel(self) -> None:
        self.callback = None

    def __lt__(self, other: Timer) -> bool:
        return self.due_s < other.due_s


class Loop:
    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: List[Timer] = []
        self._soon: List[Callback] = []
        self._signals: Dict[int, Callback] = {}
        self._running = True
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self.reading(self._woken, self._deliver_signals)

    # File descriptors: one callback for each direction.

    def reading(self, fd: int, callback: Optional[Callback]) -> None:
        """Call back whenever fd is readable (level-triggered); None stops it."""
        self._watch(fd, selectors.EVENT_READ, callback)

    def writing(self, fd: int, callback: Optional[Callback]) -> None:
        self._watch(fd, selectors.EVENT_WRITE, callback)

    def forget(self, fd: int) -> None:
        """Must come before fd is closed, or a reused number would inherit the callbacks."""
        try:
            self._selector.unregister(fd)
        except KeyError:
            pass

    def _watch(self, fd: int, event: int, callback: Optional[Callback]) -> None:
        try:
            key = self._selector.get_key(fd)
            events, callbacks = key.events, dict(key.data)
        except KeyError:
            events, callbacks = 0, {}
        if callback is None:
            wanted = events & ~event
            callbacks.pop(event, None)
        else:
            wanted = events | event
            callbacks[event] = callback
        if not wanted:
            self.forget(fd)
        elif events:
            self._selector.modify(fd, wanted, callbacks)
        else:
            self._selector.register(fd, wanted, callbacks)

    # Time and signals.

    def soon(self, callback: Callback) -> None:
        self._soon.append(callback)

    def later(self, delay_s: float, callback: Callback) -> Timer:
        timer = Timer(time.monotonic() + delay_s, callback)
        heapq.heappush(self._timers, timer)
        return timer

    def on_signal(self, number: int, callback: Callback) -> None:
        self._signals[number] = callback
        # Python writes the number to the wakeup fd only for signals with a Python handler.
        signal.signal(number, _noted)

    def _deliver_signals(self) -> None:
        try:
            numbers = set(os.read(self._woken, 4096))
        except BlockingIOError:
            return
        for number in numbers:
            callback = self._signals.get(number)
            if callback is not None:
                callback()

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            self._turn()

    def run_until(self, done: Callable[[], bool], timeout_s: float) -> bool:
        """Turn the loop until done() or the time is over; for the last steps before the process ends."""
        guard = self.later(timeout_s, lambda: None)
        while not done() and time.monotonic() < guard.due_s:
            self._turn()
        guard.cancel()
        return done()

    def _turn(self) -> None:
        for key, events in self._selector.select(self._wait_s()):
            for event in (selectors.EVENT_READ, selectors.EVENT_WRITE):
                if events & event:
                    self._call_if_still_wanted(key.fd, event)
        now_s = time.monotonic()
        while self._timers and self._timers[0].due_s <= now_s:
            callback = heapq.heappop(self._timers).callback
            if callback is not None:
                callback()
        ready, self._soon = self._soon, []
        for callback in ready:
            callback()

    def _call_if_still_wanted(self, fd: int, event: int) -> None:
        # An earlier callback of the same turn may have closed this one.
        try:
            callbacks: Dict[int, Callback] = self._selector.get_key(fd).data
        except KeyError:
            return
        callback = callbacks.get(event)
        if callback is not None:
            callback()

    def _wait_s(self) -> Optional[float]:
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        if self._soon:
            return 0
        if not self._timers:
            return None
        return max(0.0, self._timers[0].due_s - time.monotonic())


def _noted(_number: int, _frame: Any) -> None:
    """The wakeup fd carries the news; the loop acts on it between callbacks, never inside one."""


def pipe() -> Tuple[int, int]:
    """(read end, write end), close-on-exec, the read end non-blocking."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(reader, False)
    return reader, writer
