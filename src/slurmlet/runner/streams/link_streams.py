"""Streams over the link: exec, attach, forwarded ports and logs, each with credit in both directions."""

from __future__ import annotations

import json
import struct
import sys

from slurmlet.protocol import wire

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Optional, Protocol

    from slurmlet.protocol.messages import Open

    Send = Callable[[bytes], None]

    class Session(Protocol):
        """What serves a stream."""

        def received(self, channel: int, payload: bytes) -> None: ...

        def more_credit(self) -> None: ...

        def abandoned(self) -> None:
            """The hub closed the stream or went away: free everything, say nothing."""
            ...


class Refused(Exception):
    """The stream cannot be served; the message is for the person at kubectl."""

    def __init__(self, message: str, reason: str = "BadRequest") -> None:
        super().__init__(message)
        self.reason = reason


class Stream:
    """Our end of one stream: what may still be sent, and the way out."""

    def __init__(self, number: int, send: Send, on_closed: Callable[[int], None]) -> None:
        self._number, self._send, self._on_closed = number, send, on_closed
        self.credit = wire.INITIAL_WINDOW

    def data(self, channel: int, payload: bytes) -> None:
        self.credit -= len(payload)
        self._send(wire.data(self._number, channel, payload))

    def end(self, channel: int) -> None:
        """Nothing more comes on that channel; the stream goes on."""
        self._send(wire.data(self._number, wire.END, bytes((channel,))))

    def grant(self, credit: int) -> None:
        self._send(wire.window(self._number, credit))

    def finish(self, status: Optional[Dict[str, Any]]) -> None:
        if status is not None:
            self._send(wire.data(self._number, wire.STATUS, json.dumps(status).encode()))
        self._send(wire.pack(wire.CLOSE, self._number))
        self._on_closed(self._number)


class Streams:
    def __init__(self, send: Send, open_session: Callable[[Open, Stream], Session]) -> None:
        self._send, self._open_session = send, open_session
        self._streams: Dict[int, Stream] = {}
        self._sessions: Dict[int, Session] = {}

    def open(self, message: Open) -> None:
        number = int(message["stream"])
        stream = Stream(number, self._send, self._closed)
        self._streams[number] = stream
        try:
            session = self._open_session(message, stream)
        except Refused as refusal:
            stream.finish({"error": str(refusal), "reason": refusal.reason})
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"stream {number}: {error!r}", file=sys.stderr, flush=True)
            stream.finish({"error": str(error), "reason": "InternalError"})
            return
        if number in self._streams:
            self._sessions[number] = session

    def frame(self, frame: wire.Frame) -> None:
        session, stream = self._sessions.get(frame.stream), self._streams.get(frame.stream)
        # A frame may cross our own CLOSE on the way: that is no fault.
        if session is None or stream is None:
            return
        if frame.kind == wire.DATA and frame.payload:
            session.received(frame.payload[0], frame.payload[1:])
        elif frame.kind == wire.WINDOW and len(frame.payload) == 4:
            stream.credit += struct.unpack("!I", frame.payload)[0]
            session.more_credit()
        elif frame.kind == wire.CLOSE:
            self._closed(frame.stream)
            session.abandoned()

    def abandon_all(self) -> None:
        sessions = list(self._sessions.values())
        self._sessions.clear()
        self._streams.clear()
        for session in sessions:
            session.abandoned()

    @property
    def busy(self) -> bool:
        return bool(self._sessions)

    def _closed(self, number: int) -> None:
        self._streams.pop(number, None)
        self._sessions.pop(number, None)
