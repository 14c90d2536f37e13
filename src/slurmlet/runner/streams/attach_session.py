"""`kubectl attach`: a client at the streams of a container's main process, from now on, beside any others.

The process must not suffer from its watchers: one that does not take its output holds the process up for a while, as a
slow terminal would, and is then cut off. Only what `stdinOnce` asks for outlives a client: the end of its input is then
the end of the container's.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from typing import TYPE_CHECKING, Deque, Optional, Tuple

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.protocol import wire
from slurmlet.protocol.log_files import STDOUT
from slurmlet.runner.containers.container import Container
from slurmlet.runner.streams.link_streams import Refused, Stream

if TYPE_CHECKING:
    from slurmlet.protocol.messages import OpenAttach

STALLED_S = 10.0
# The answer to a client's last line comes after the end of its input.
LAST_ANSWER_S = 1.0


class AttachSession:
    def __init__(self, loop: Loop, container: Container, message: OpenAttach, stream: Stream) -> None:
        outputs = container.outputs
        if outputs is None:
            raise Refused(f"container {container.name} is not running", "Conflict")
        self._loop, self._stream, self._outputs = loop, stream, outputs
        self._wants = {name: bool(message.get(name)) for name in ("stdin", "stdout", "stderr")}
        self._is_terminal = bool(container.plan.get("tty"))
        self._input = outputs.input if self._wants["stdin"] else None
        self._owns_input = bool(container.plan.get("stdin_once")) and not self._is_terminal
        self._waiting: Deque[Tuple[int, bytes]] = deque()
        self._timer: Optional[Timer] = None
        self._ending = False
        self._gone = False
        outputs.listen(self)

    # From the process.

    def wrote(self, stream: bytes, data: bytes) -> None:
        channel = wire.STDOUT if stream == STDOUT else wire.STDERR
        if self._wants["stdout" if channel == wire.STDOUT else "stderr"]:
            self._waiting.append((channel, data))
            self._pour()

    def run_over(self) -> None:
        self._ending = True
        self._pour()

    # From the hub.

    def received(self, channel: int, payload: bytes) -> None:
        if channel == wire.STDIN:
            if self._input is None:
                self._taken(len(payload))
            else:
                self._input.feed(payload, self._taken)
        elif channel == wire.END and payload[:1] == bytes((wire.STDIN,)):
            self._input_over()
        elif channel == wire.RESIZE:
            size = json.loads(payload)
            rows, columns = (min(65535, max(0, int(size[name]))) for name in ("Height", "Width"))
            self._outputs.resize(struct.pack("HHHH", rows, columns, 0, 0))

    def more_credit(self) -> None:
        self._pour()

    def abandoned(self) -> None:
        self._free()
        if self._input is not None and self._owns_input:
            self._input.end()

    def _input_over(self) -> None:
        if self._input is None:
            return
        if self._owns_input:
            # As container runtimes do it: the process sees the end of its input, the client all that is still written.
            self._input.end()
        elif not self._ending:
            self._loop.later(LAST_ANSWER_S, self._detach)

    def _detach(self) -> None:
        if not self._gone:
            self._outputs.leave(self)
            self.run_over()

    def _taken(self, count: int) -> None:
        if not self._gone:
            self._stream.grant(count)

    # To the hub.

    def _pour(self) -> None:
        while self._waiting and self._stream.credit > 0 and not self._gone:
            channel, data = self._waiting.popleft()
            count = min(len(data), self._stream.credit)
            self._stream.data(channel, data[:count])
            if count < len(data):
                self._waiting.appendleft((channel, data[count:]))
            self._watch_for_a_stall(False)
        if self._gone:
            return
        if self._waiting:
            self._watch_for_a_stall(True)
        elif self._ending:
            self._free()
            self._stream.finish({"exit_code": 0})

    def _watch_for_a_stall(self, waiting: bool) -> None:
        self._outputs.hold(self, waiting)
        if waiting and self._timer is None:
            self._timer = self._loop.later(STALLED_S, self._stalled)
        elif not waiting and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stalled(self) -> None:
        self._free()
        told = f"attach: no output was taken for {STALLED_S:.0f} s"
        self._stream.finish({"error": told, "reason": "InternalError"})

    def _free(self) -> None:
        self._gone = True
        self._outputs.leave(self)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
