"""The runner's one event loop: file descriptors, timers, signals, all in the main thread.

asyncio is not used: importing it costs 40 ms in every job. Callbacks must not block for long; work that takes time
is a child process (children.py). A callback that raises is a bug of ours: it is reported on stderr and ends the
process, because a runner that limps on would report a state that is not true.
"""

from __future__ import annotations

import heapq
import os
import select
import signal
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Optional, Set, Tuple

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
        # epoll itself and not `selectors`: netd turns this loop for each trapped call of a pod.
        self._epoll = select.epoll()
        self._readers: Dict[int, Callback] = {}
        self._writers: Dict[int, Callback] = {}
        # Forgotten in this turn: the kernel's news of them are of no use to whoever has the number next.
        self._stale: Set[int] = set()
        # What the kernel said of the descriptor whose callback runs.
        self.events = 0
        # Waits in our place, also for fileno(): whoever has more to watch than callbacks. Gets the longest time.
        self.sleeper: Optional[Callable[[Optional[float]], None]] = None
        self._timers: List[Timer] = []
        self._soon: List[Callback] = []
        self._signals: Dict[int, Callback] = {}
        self._running = True
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self.reading(self._woken, self._deliver_signals)

    def fileno(self) -> int:
        """Readable when a descriptor has news."""
        return self._epoll.fileno()

    def close(self) -> None:
        """For whoever goes on without it; a process that ends needs no such thing."""
        self._epoll.close()
        os.close(self._woken)
        os.close(self._wake)

    # File descriptors: one callback for each direction.

    def reading(self, fd: int, callback: Optional[Callback]) -> None:
        """Call back whenever fd is readable (level-triggered); None stops it."""
        self._watch(fd, self._readers, callback)

    def writing(self, fd: int, callback: Optional[Callback]) -> None:
        self._watch(fd, self._writers, callback)

    def forget(self, fd: int) -> None:
        """Must come before fd is closed, or a reused number would inherit the callbacks."""
        reader, writer = self._readers.pop(fd, None), self._writers.pop(fd, None)
        if reader is not None or writer is not None:
            self._stale.add(fd)
            try:
                self._epoll.unregister(fd)
            except OSError:
                # Closed too early by its owner; the kernel has forgotten it already.
                pass

    def _watch(self, fd: int, callbacks: Dict[int, Callback], callback: Optional[Callback]) -> None:
        before = self._mask(fd)
        if callback is not None:
            callbacks[fd] = callback
        else:
            callbacks.pop(fd, None)
        wanted = self._mask(fd)
        if not wanted:
            if before:
                self._stale.add(fd)
                self._epoll.unregister(fd)
        elif not before:
            try:
                self._epoll.register(fd, wanted)
            except OSError:
                callbacks.pop(fd, None)
                raise
        elif wanted != before:
            self._epoll.modify(fd, wanted)

    def _mask(self, fd: int) -> int:
        return (select.EPOLLIN if fd in self._readers else 0) | (
            select.EPOLLOUT if fd in self._writers else 0
        )

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
        stale = self._stale
        stale.clear()
        wait_s = self._wait_s()
        if self.sleeper is not None:
            self.sleeper(wait_s)
            wait_s = 0
        for fd, events in self._epoll.poll(wait_s):
            self.events = events
            # Errors and hang-ups are news for both.
            if events & ~select.EPOLLOUT and fd not in stale:
                callback = self._readers.get(fd)
                if callback is not None:
                    callback()
            if events & ~select.EPOLLIN and fd not in stale:
                callback = self._writers.get(fd)
                if callback is not None:
                    callback()
        if self._timers:
            self._call_due()
        if self._soon:
            ready, self._soon = self._soon, []
            for callback in ready:
                callback()

    def _call_due(self) -> None:
        now_s = time.monotonic()
        while self._timers and self._timers[0].due_s <= now_s:
            callback = heapq.heappop(self._timers).callback
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
