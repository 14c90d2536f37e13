"""Writes the hub's log in a thread of its own: it is a file in the home, and a stalled home must not stop the event loop.

What does not fit into the queue meanwhile is left out, and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from logging.handlers import QueueHandler

_MOST = 10_000


class LogThread(QueueHandler):
    """A handler before `writer`, for the root logger."""

    def __init__(self, writer: logging.Handler, most: int = _MOST) -> None:
        self._records: queue.Queue[logging.LogRecord | None] = queue.Queue(most)
        super().__init__(self._records)
        self._writer = writer
        self._left_out = 0
        # A daemon: a home that hangs must not keep the hub from ending.
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._records.put_nowait(record)
        except queue.Full:
            self._left_out += 1

    def finish(self, timeout_s: float) -> None:
        """Have written what there is, unless the home hangs."""
        try:
            self._records.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _write(self) -> None:
        while (record := self._records.get()) is not None:
            self._writer.handle(record)
            if self._records.empty():
                self._tell_left_out()
        self._tell_left_out()

    def _tell_left_out(self) -> None:
        left_out, self._left_out = self._left_out, 0
        if left_out:
            text = f"{left_out} lines were left out of this log: the home did not take them"
            self._writer.handle(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None))
