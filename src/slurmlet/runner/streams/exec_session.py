"""`kubectl exec`: a process in a container, its streams over the link byte for byte, its exact exit code."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import termios
from typing import TYPE_CHECKING, Any, List, Optional

from slurmlet.linux.event_loop import Loop, pipe
from slurmlet.protocol import wire
from slurmlet.runner.containers.container import Container
from slurmlet.runner.containers.container_runtime import Start
from slurmlet.runner.containers.pod_context import PodContext
from slurmlet.runner.streams.link_streams import Refused, Stream

if TYPE_CHECKING:
    from slurmlet.protocol.messages import OpenExec

_READ_BYTES = 32 << 10
_SIZE_WAIT_S = 0.1


class ExecSession:
    def __init__(self, context: PodContext, container: Container, message: OpenExec, stream: Stream) -> None:
        if not container.running:
            raise Refused(f"container {container.name} is not running", "Conflict")
        self._loop, self._stream = context.loop, stream
        self._tty = bool(message.get("tty"))
        self._wants = {name: bool(message.get(name)) for name in ("stdin", "stdout", "stderr")}
        self._for_child: List[int] = []
        self._input = _Input(self._loop, stream.grant)
        self._outputs: List[_Output] = []
        self._size: Optional[bytes] = None
        self._exit_code: Optional[int] = None
        self._gone = False
        self._argv = [str(word) for word in message["command"]]
        if not self._argv:
            raise Refused("the command is empty")
        self._runtime, self._container = context.runtime, container
        # The size of the client's terminal follows at once. Started with it, the program never sees another; set
        # later, it could be lost: crun reads and sets the size once more while it starts the program.
        self._awaiting_size = self._loop.later(_SIZE_WAIT_S, self._launch) if self._tty else None
        if not self._tty:
            self._launch()

    def _launch(self) -> None:
        self._awaiting_size = None
        if self._gone:
            return
        if not self._container.running:
            self._free()
            self._stream.finish(
                {"error": f"container {self._container.name} has ended", "reason": "Conflict"}
            )
            return
        size = struct.unpack("HH", self._size[:4]) if self._size is not None else None
        start = Start(self._stdio(), self._tty, self._started, self._exited, size)
        self._runtime.exec(self._container.container_id, self._argv, start)

    def _stdio(self) -> Any:
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        self._for_child.append(null)
        if self._tty:
            return (null, null, null)
        stdin = null
        if self._wants["stdin"]:
            stdin, writer = os.pipe2(os.O_CLOEXEC)
            self._for_child.append(stdin)
            self._input.open(writer)
        ends = [stdin]
        for name, channel in (("stdout", wire.STDOUT), ("stderr", wire.STDERR)):
            if not self._wants[name]:
                ends.append(null)
                continue
            reader, writer = pipe()
            self._for_child.append(writer)
            self._outputs.append(_Output(self._loop, reader, channel, self._stream, self._finish_if_over))
            ends.append(writer)
        return tuple(ends)

    def _started(self, _pid: int, master: int, error: str) -> None:
        for fd in self._for_child:
            os.close(fd)
        self._for_child = []
        if self._gone:
            if master >= 0:
                os.close(master)
            return
        if error:
            code = 127 if "not found" in error or "No such file" in error else 126
            self._free()
            self._stream.finish({"exit_code": code, "error": error, "reason": "ExecFailed"})
            return
        if master >= 0:
            self._input.open(os.dup(master))
            self._outputs.append(_Output(self._loop, master, wire.STDOUT, self._stream, self._finish_if_over))
            self._resize()
        self.more_credit()

    def _exited(self, code: int, _signal: int) -> None:
        self._exit_code = code
        if self._gone:
            return
        for output in self._outputs:
            output.drain()
        self._finish_if_over()

    def _finish_if_over(self) -> None:
        if self._gone or self._exit_code is None or any(not output.over for output in self._outputs):
            return
        self._free()
        self._stream.finish({"exit_code": self._exit_code})

    # From the hub.

    def received(self, channel: int, payload: bytes) -> None:
        if channel == wire.STDIN:
            self._input.feed(payload)
        elif channel == wire.END and payload[:1] == bytes((wire.STDIN,)):
            self._input.end(is_terminal=self._tty)
        elif channel == wire.RESIZE:
            size = json.loads(payload)
            rows, columns = (min(65535, max(0, int(size[name]))) for name in ("Height", "Width"))
            self._size = struct.pack("HHHH", rows, columns, 0, 0)
            self._resize()
            if self._awaiting_size is not None:
                self._awaiting_size.cancel()
                self._launch()

    def more_credit(self) -> None:
        for output in list(self._outputs):
            output.resume()

    def abandoned(self) -> None:
        """The client is gone. As with a kubelet the process is not killed, but it loses its streams."""
        self._free()

    def _resize(self) -> None:
        master = next((output.fd for output in self._outputs if not output.over), -1)
        if self._tty and self._size is not None and master >= 0:
            fcntl.ioctl(master, termios.TIOCSWINSZ, self._size)

    def _free(self) -> None:
        self._gone = True
        self._input.close()
        for output in self._outputs:
            output.close()


class _Output:
    """One stream of the process towards the hub; reads only what there is credit for."""

    def __init__(self, loop: Loop, fd: int, channel: int, stream: Stream, on_over: Any) -> None:
        self._loop, self._channel, self._stream, self._on_over = loop, channel, stream, on_over
        self.fd = fd
        self.over = False
        self._draining = False
        self._watched = False

    def resume(self) -> None:
        if self.over or self._stream.credit <= 0:
            return
        if self._draining:
            self.drain()
        elif not self._watched:
            self._watched = True
            self._loop.reading(self.fd, self._readable)

    def drain(self) -> None:
        """The process is gone: what lies in the pipe is all it wrote; others may hold the pipe open for ever."""
        self._draining = True
        while not self.over and self._stream.credit > 0:
            if not self._read():
                self.close()
        if self.over:
            self._on_over()

    def close(self) -> None:
        if not self.over:
            self.over = True
            self._loop.forget(self.fd)
            os.close(self.fd)

    def _readable(self) -> None:
        if self._stream.credit <= 0:
            self._watched = False
            self._loop.reading(self.fd, None)
            return
        self._read()

    def _read(self) -> bool:
        """False when there is nothing more for now."""
        try:
            received = os.read(self.fd, min(_READ_BYTES, self._stream.credit))
        except BlockingIOError:
            return False
        except OSError:
            # EIO: the last process has left the terminal.
            received = b""
        if not received:
            self.close()
            self._on_over()
            return False
        self._stream.data(self._channel, received)
        return True


class _Input:
    """Bytes from the hub towards the process; credit is given back as the process takes them."""

    def __init__(self, loop: Loop, grant: Any) -> None:
        self._loop, self._grant = loop, grant
        self._fd = -1
        self._buffer = bytearray()
        self._closed = False
        self._ended = False

    def open(self, fd: int) -> None:
        if self._closed:
            os.close(fd)
            return
        os.set_blocking(fd, False)
        self._fd = fd
        self._write()

    def feed(self, payload: bytes) -> None:
        if self._closed or self._ended:
            # Nobody will read it; the sender must not starve for credit all the same.
            self._grant(len(payload))
            return
        self._buffer += payload
        self._write()

    def end(self, *, is_terminal: bool) -> None:
        # A terminal has no half-close: end of input is its own character, as docker and CRI runtimes send it.
        if is_terminal:
            self.feed(b"\x04")
            return
        self._ended = True
        self._write()

    def close(self) -> None:
        self._closed = True
        self._shut()

    def _write(self) -> None:
        if self._fd < 0:
            return
        written = 0
        try:
            while self._buffer:
                count = os.write(self._fd, self._buffer[:_READ_BYTES])
                del self._buffer[:count]
                written += count
        except BlockingIOError:
            self._loop.writing(self._fd, self._write)
        except OSError:
            # The process closed its input.
            written += len(self._buffer)
            self._buffer.clear()
            self._ended = True
        if written:
            self._grant(written)
        if not self._buffer:
            self._loop.writing(self._fd, None)
            if self._ended:
                self._shut()

    def _shut(self) -> None:
        if self._fd >= 0:
            self._loop.forget(self._fd)
            os.close(self._fd)
            self._fd = -1
