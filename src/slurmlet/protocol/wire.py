"""The protocol between runner and hub: frames, message types, flow control. Written once, used by both ends.

A runner dials the hub over TLS, both sides prove themselves by certificate, then frames go both ways:

    length u32 | kind u8 | stream u32 | payload (length bytes, at most MAX_PAYLOAD)

- CONTROL (stream 0): a JSON object with a "type".
- DATA (stream > 0): first payload byte is the channel, the rest are its bytes. Channels are Kubernetes' own.
- WINDOW (stream > 0): u32, how many more DATA bytes (channel byte not counted) the sender of this frame will take on
  that stream. Both ends start with INITIAL_WINDOW. Only STDIN, STDOUT and STDERR bytes consume credit.
- CLOSE (stream > 0): the sender is done with the stream; the receiver frees it and answers nothing.

Streams are opened by the hub (type "open") with numbers it never reuses on one connection. The control messages are the
types of `protocol/messages.py`, shown in docs/protocol.md; `protocol/version.py` says which versions understand each other.
"""

from __future__ import annotations

import json
import struct

from slurmlet.linux.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


if TYPE_CHECKING:
    from slurmlet.protocol.messages import Message

# The version of messages and plans, in every hello. MINOR rises with each field or type that a peer may rely on, MAJOR
# when peers of the last one would misunderstand.
MAJOR, MINOR = 1, 1
MAX_PAYLOAD = 1 << 20
INITIAL_WINDOW = 256 << 10

CONTROL, DATA, WINDOW, CLOSE = 0, 1, 2, 3
# DATA channels; the numbers are those of Kubernetes' v5.channel.k8s.io.
STDIN, STDOUT, STDERR, STATUS, RESIZE, END = 0, 1, 2, 3, 4, 255
# STATUS carries JSON {"exit_code": int} or {"error": str, "reason": str}; RESIZE carries {"Width": int, "Height": int};
# END carries one byte: the channel that is finished (STDIN: end of input).

_HEADER = struct.Struct("!IBI")
HEADER_BYTES = _HEADER.size
# Messages are made here and hold no rings; tables of many pods make looking for them felt.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


class ProtocolError(Exception):
    """The peer broke the framing; the connection cannot go on."""


class Frame(Record):
    kind: int
    stream: int
    payload: bytes


def pack(kind: int, stream: int, payload: bytes = b"") -> bytes:
    return _HEADER.pack(len(payload), kind, stream) + payload


def control(message: Message) -> bytes:
    return pack(CONTROL, 0, _encode(message).encode())


def parse(payload: bytes) -> Any:
    """The message of a CONTROL frame: an object with a type, whatever its fields. Raises ProtocolError."""
    try:
        message = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"bad control message: {error}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("bad control message: no object with a type")
    return message


def data(stream: int, channel: int, payload: bytes) -> bytes:
    return pack(DATA, stream, bytes((channel,)) + payload)


def window(stream: int, credit: int) -> bytes:
    return pack(WINDOW, stream, struct.pack("!I", credit))


def parse_header(header: bytes) -> tuple[int, int, int]:
    """(length, kind, stream) of a header of HEADER_BYTES."""
    length, kind, stream = _HEADER.unpack(header)
    if kind > CLOSE or (length > MAX_PAYLOAD and kind != CONTROL) or length > 64 * MAX_PAYLOAD:
        raise ProtocolError(f"bad frame: kind {kind}, {length} bytes")
    return length, kind, stream


class Decoder:
    """Turns bytes as they arrive into frames; keeps what is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> Iterator[Frame]:
        self._buffer += received
        while len(self._buffer) >= HEADER_BYTES:
            length, kind, stream = parse_header(bytes(self._buffer[:HEADER_BYTES]))
            if len(self._buffer) < HEADER_BYTES + length:
                return
            payload = bytes(self._buffer[HEADER_BYTES : HEADER_BYTES + length])
            del self._buffer[: HEADER_BYTES + length]
            yield Frame(kind, stream, payload)
