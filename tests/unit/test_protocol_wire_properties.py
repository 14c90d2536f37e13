"""The framing between runner and hub holds for every frame and every way the network may cut the bytes."""

from __future__ import annotations

import json
import struct
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from slurmlet.protocol import wire
from tests.unit.strategies import cut, splits

FRAMES = st.lists(
    st.builds(
        wire.Frame,
        st.sampled_from((wire.CONTROL, wire.DATA, wire.WINDOW, wire.CLOSE)),
        st.integers(0, 2**32 - 1),
        st.binary(max_size=300),
    ),
    max_size=8,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)


def decoded(pieces: list[bytes]) -> list[wire.Frame]:
    decoder = wire.Decoder()
    return [frame for piece in pieces for frame in decoder.feed(piece)]


@given(FRAMES, splits())
def test_frames_arrive_whole_however_the_bytes_are_cut(frames: list[wire.Frame], at: list[float]) -> None:
    sent = b"".join(wire.pack(*frame) for frame in frames)
    assert decoded(cut(sent, at)) == frames


@given(FRAMES, st.binary(max_size=200), splits())
def test_what_is_incomplete_is_kept_and_never_becomes_a_frame(
    frames: list[wire.Frame], payload: bytes, at: list[float]
) -> None:
    whole = b"".join(wire.pack(*frame) for frame in frames)
    torn = wire.pack(wire.DATA, 7, payload)[:-1]
    assert decoded(cut(whole + torn, at)) == frames


@given(st.binary(max_size=2000), splits())
def test_garbage_is_frames_or_a_protocol_error_and_nothing_else(garbage: bytes, at: list[float]) -> None:
    decoder = wire.Decoder()
    consumed = 0
    try:
        for piece in cut(garbage, at):
            for frame in decoder.feed(piece):
                assert frame.kind <= wire.CLOSE
                consumed += wire.HEADER_BYTES + len(frame.payload)
    except wire.ProtocolError:
        pass
    assert consumed <= len(garbage)


@given(st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_header_that_announces_too_much_is_refused_before_its_payload_comes(
    kind: int, stream: int, length: int
) -> None:
    limit = {
        wire.CONTROL: 64 * wire.MAX_PAYLOAD,
        wire.DATA: wire.MAX_PAYLOAD,
        wire.WINDOW: wire.MAX_PAYLOAD,
        wire.CLOSE: wire.MAX_PAYLOAD,
    }.get(kind, -1)
    header = struct.pack("!IBI", length, kind, stream)
    try:
        assert wire.parse_header(header) == (length, kind, stream)
        assert length <= limit
    except wire.ProtocolError:
        assert length > limit


@given(st.text(min_size=1), st.dictionaries(st.text(min_size=1), JSON, max_size=5))
def test_a_control_message_says_what_was_put_into_it(kind: str, fields: dict[str, Any]) -> None:
    message: Any = {**fields, "type": kind}
    (frame,) = decoded([wire.control(message)])
    assert wire.parse(frame.payload) == message


@given(st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b"[" * 100_000)
@example(b'{"type":' + b"9" * 5000 + b"}")
def test_any_payload_is_a_message_with_a_type_or_a_protocol_error(payload: bytes) -> None:
    try:
        message = wire.parse(payload)
    except wire.ProtocolError:
        return
    assert isinstance(message["type"], str)


@given(st.integers(1, 2**32 - 1), st.integers(0, 255), st.binary(max_size=300))
def test_data_carries_its_channel_first(stream: int, channel: int, payload: bytes) -> None:
    (frame,) = decoded([wire.data(stream, channel, payload)])
    assert (frame.kind, frame.stream, frame.payload[0], frame.payload[1:]) == (
        wire.DATA,
        stream,
        channel,
        payload,
    )
