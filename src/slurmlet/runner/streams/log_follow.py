"""`kubectl logs` of a running pod, over a stream; wakes when the container writes, never polls."""

from __future__ import annotations

from typing import Optional

from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.protocol.log_files import LogOptions, LogReader, NoLog, log_path
from slurmlet.runner.containers.container import Container
from slurmlet.runner.streams.link_streams import Refused, Stream

_PIECE_BYTES = 32 << 10


class LogSession:
    def __init__(
        self, loop: Loop, container: Container, options: LogOptions, stream: Stream, pod_name: str
    ) -> None:
        self._loop, self._container, self._options, self._stream = loop, container, options, stream
        self._run = container.run if container.run >= 0 and container.container_id else -1
        self._reader: Optional[LogReader] = _open(container, options, pod_name)
        self._due = False
        container.log_listeners.append(self.more_credit)
        self.more_credit()

    def received(self, channel: int, payload: bytes) -> None:
        """Nothing is read on a log stream."""

    def more_credit(self) -> None:
        if not self._due:
            self._due = True
            self._loop.soon(self._pour)

    def abandoned(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None
            self._container.log_listeners.remove(self.more_credit)

    def _pour(self) -> None:
        self._due = False
        reader = self._reader
        if reader is None or self._stream.credit <= 0:
            return
        # Asked before reading: what is written in between is then still read.
        over = not self._options.follow or self._options.previous or not self._still_running()
        piece = reader.read(min(_PIECE_BYTES, self._stream.credit))
        if piece:
            self._stream.data(wire.STDOUT, piece)
            self.more_credit()
        elif over or reader.exhausted:
            self.abandoned()
            self._stream.finish(None)

    def _still_running(self) -> bool:
        """As with a kubelet, following ends with the run that was followed, not with the container."""
        return self._container.run == self._run and self._container.running


def _open(container: Container, options: LogOptions, pod_name: str) -> LogReader:
    name = container.name
    if options.previous and container.run < 1:
        raise Refused(f'previous terminated container "{name}" in pod "{pod_name}" not found')
    try:
        run = container.run if container.run >= 0 else None
        if (
            not options.previous
            and run is not None
            and not container.running
            and container.report["last"] is not None
        ):
            # Between two runs, the newest log there is.
            run = None
        path = log_path(container.log_dir, previous=options.previous, restart_count=run)
    except NoLog as missing:
        reason = container.report["reason"] or "ContainerCreating"
        message = f'container "{name}" in pod "{pod_name}" is waiting to start: {reason}'
        raise Refused(message) from missing
    return LogReader(path, options)
