"""The standard streams of a container's main process: pipes or a terminal, poured into its log."""

from __future__ import annotations

import os
from typing import Dict, List, Tuple

from slurmlet.runner.logfiles import STDERR, STDOUT, LogWriter
from slurmlet.runner.loop import Loop, pipe

_READ_BYTES = 64 << 10


class Outputs:
    """One run's streams. With a terminal there is one stream, and it counts as stdout (as in every CRI runtime)."""

    def __init__(self, loop: Loop, log: LogWriter, *, tty: bool, stdin: bool) -> None:
        self._loop, self._log = loop, log
        self._sources: Dict[int, bytes] = {}
        self._for_child: List[int] = []
        self._kept: List[int] = []
        if tty:
            null = self._open_null()
            self.stdio: Tuple[int, int, int] = (null, null, null)
            return
        out, out_end = pipe()
        err, err_end = pipe()
        self._for_child += [out_end, err_end]
        self.stdio = (self._stdin() if stdin else self._open_null(), out_end, err_end)
        self._watch(out, STDOUT)
        self._watch(err, STDERR)

    def started(self, master: int) -> None:
        """The runtime has taken its copies; with a terminal, its master arrives only now."""
        for fd in self._for_child:
            os.close(fd)
        self._for_child = []
        if master >= 0:
            self._watch(master, STDOUT)

    def finish(self) -> None:
        """The process is gone: take what it left in the pipes, then close."""
        self.started(-1)
        for fd in list(self._sources):
            while fd in self._sources and self._read(fd):
                pass
            self._drop(fd)
        for fd in self._kept:
            os.close(fd)
        self._kept = []
        self._log.close()

    def _stdin(self) -> int:
        # Nobody attaches yet: an open, silent stdin is what a kubelet gives before somebody does.
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._for_child.append(reader)
        self._kept.append(writer)
        return reader

    def _open_null(self) -> int:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._for_child.append(null)
        return null

    def _watch(self, fd: int, stream: bytes) -> None:
        self._sources[fd] = stream
        self._loop.reading(fd, lambda: self._pump(fd))

    def _pump(self, fd: int) -> None:
        self._read(fd)

    def _read(self, fd: int) -> bool:
        try:
            received = os.read(fd, _READ_BYTES)
        except BlockingIOError:
            return False
        except OSError:
            # A terminal whose last process is gone answers EIO.
            received = b""
        if not received:
            self._drop(fd)
            return False
        self._log.write(self._sources[fd], received)
        return True

    def _drop(self, fd: int) -> None:
        if self._sources.pop(fd, None) is not None:
            self._loop.forget(fd)
            os.close(fd)
