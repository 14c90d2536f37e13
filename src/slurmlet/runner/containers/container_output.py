"""The standard streams of a container's main process: pipes or a terminal, poured into its log.

Attached clients listen to the outputs and feed the input; with or without them the process runs on.
"""

from __future__ import annotations

import fcntl
import os
import termios
from collections import deque

from slurmlet.linux.event_loop import Loop, pipe
from slurmlet.protocol.log_files import STDERR, STDOUT, LogWriter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Callable, Deque, Dict, List, Optional, Protocol, Set, Tuple

    class Listener(Protocol):
        """Somebody who sees what the process writes from now on."""

        def wrote(self, stream: bytes, data: bytes) -> None: ...

        def run_over(self) -> None: ...


_READ_BYTES = 64 << 10


class Inlet:
    """The process's input: one pipe or terminal, fed by any number of clients."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._fd = -1
        # What is to be written, and who is told how much of it was.
        self._waiting: Deque[Tuple[bytes, Callable[[int], None]]] = deque()
        self._ended = False

    def open(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._write()

    def feed(self, data: bytes, taken: Callable[[int], None]) -> None:
        self._waiting.append((data, taken))
        self._write()

    def end(self) -> None:
        """The process sees the end of its input after what was fed before; what comes later is thrown away."""
        self._ended = True
        self._write()

    def close(self) -> None:
        self._shut()
        self._ended = True
        self._write()

    def _write(self) -> None:
        try:
            while self._waiting and self._fd >= 0:
                data, taken = self._waiting[0]
                count = os.write(self._fd, data[:_READ_BYTES])
                if count == len(data):
                    self._waiting.popleft()
                else:
                    self._waiting[0] = (data[count:], taken)
                taken(count)
        except BlockingIOError:
            self._loop.writing(self._fd, self._write)
            return
        except OSError:
            # The process closed its input, or is gone.
            self._ended = True
        if self._fd >= 0:
            self._loop.writing(self._fd, None)
        if self._ended:
            self._shut()
            while self._waiting:
                data, taken = self._waiting.popleft()
                taken(len(data))

    def _shut(self) -> None:
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1


class Outputs:
    """One run's streams. With a terminal there is one stream, and it counts as stdout (as in every CRI runtime)."""

    def __init__(self, loop: Loop, log: LogWriter, *, tty: bool, stdin: bool) -> None:
        self._loop, self._log = loop, log
        self._sources: Dict[int, bytes] = {}
        self._for_child: List[int] = []
        self._listeners: List[Listener] = []
        self._holding: Set[Listener] = set()
        self._master = -1
        self.input: Optional[Inlet] = Inlet(loop) if stdin else None
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
            self._master = master
            if self.input is not None:
                self.input.open(os.dup(master))
            self._watch(master, STDOUT)

    def finish(self) -> None:
        """The process is gone: take what it left in the pipes, then close."""
        self.started(-1)
        for fd in list(self._sources):
            while fd in self._sources and self._read(fd):
                pass
            self._drop(fd)
        if self.input is not None:
            self.input.close()
        self._log.close()
        for listener in list(self._listeners):
            listener.run_over()

    # Attached clients.

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def leave(self, listener: Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)
        self.hold(listener, False)

    def hold(self, listener: Listener, held: bool) -> None:
        """While anybody holds, nothing is read, and the process waits when its pipe is full."""
        before = bool(self._holding)
        (self._holding.add if held else self._holding.discard)(listener)
        if bool(self._holding) != before:
            for fd in self._sources:
                self._listen_to(fd)

    def resize(self, size: bytes) -> None:
        if self._master in self._sources:
            fcntl.ioctl(self._master, termios.TIOCSWINSZ, size)

    def _stdin(self) -> int:
        # An open, silent stdin is what a kubelet gives until somebody attaches.
        assert self.input is not None
        reader, writer = os.pipe2(os.O_CLOEXEC)
        self._for_child.append(reader)
        self.input.open(writer)
        return reader

    def _open_null(self) -> int:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._for_child.append(null)
        return null

    def _watch(self, fd: int, stream: bytes) -> None:
        self._sources[fd] = stream
        self._listen_to(fd)

    def _listen_to(self, fd: int) -> None:
        self._loop.reading(fd, None if self._holding else lambda: self._pump(fd))

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
        stream = self._sources[fd]
        self._log.write(stream, received)
        for listener in list(self._listeners):
            listener.wrote(stream, received)
        return True

    def _drop(self, fd: int) -> None:
        if self._sources.pop(fd, None) is not None:
            self._loop.forget(fd)
            os.close(fd)
