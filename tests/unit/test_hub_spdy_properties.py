"""SPDY holds for every frame and order: what is encoded comes back, garbage ends in SpdyError, accounts add up."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from slurmlet.hub.kubelet import spdy, spdy_streams
from slurmlet.hub.kubelet.spdy_streams import SpdySession, SpdyStream, StreamReset
from tests.unit.strategies import cut, splits

NUMBERS = st.integers(1, 2**31 - 1)
WORDS = st.integers(0, 2**32 - 1)
HEADERS = st.dictionaries(
    # Lower case has no single form in all of Unicode; names of headers are ASCII.
    st.text("abcdefghijklmnopqrstuvwxyz-:", min_size=1, max_size=20),
    st.text(st.characters(codec="utf-8"), max_size=40),
    max_size=6,
)
FRAMES = st.lists(
    st.one_of(
        st.builds(spdy.SynStream, NUMBERS, HEADERS, st.booleans(), st.booleans()),
        st.builds(spdy.SynReply, NUMBERS, HEADERS, st.booleans()),
        st.builds(spdy.Headers, NUMBERS, HEADERS, st.booleans()),
        st.builds(spdy.Data, NUMBERS, st.binary(max_size=300), st.booleans()),
        st.builds(spdy.RstStream, NUMBERS, WORDS),
        st.builds(spdy.Settings, st.dictionaries(st.integers(0, 2**24 - 1), WORDS, max_size=4)),
        st.builds(spdy.Ping, WORDS),
        st.builds(spdy.GoAway, st.integers(0, 2**31 - 1), WORDS),
        st.builds(spdy.WindowUpdate, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1)),
    ),
    max_size=8,
)


@given(FRAMES, splits())
def test_frames_come_back_however_the_bytes_are_cut(frames: list[spdy.Frame], at: list[float]) -> None:
    encoder, decoder = spdy.Encoder(), spdy.Decoder()
    sent = b"".join(encoder.encode(frame) for frame in frames)
    assert [frame for piece in cut(sent, at) for frame in decoder.feed(piece)] == frames


def fed(garbage: bytes, at: list[float]) -> None:
    decoder = spdy.Decoder()
    try:
        for piece in cut(garbage, at):
            for _ in decoder.feed(piece):
                pass
    except spdy.SpdyError:
        pass


@given(st.binary(max_size=1000), splits())
def test_garbage_ends_in_a_declared_error(garbage: bytes, at: list[float]) -> None:
    fed(garbage, at)


@given(st.integers(0, 12), st.integers(0, 255), st.binary(max_size=120), splits())
def test_a_control_frame_with_any_payload_ends_in_a_declared_error(
    kind: int, flags: int, payload: bytes, at: list[float]
) -> None:
    head = (0x8003 << 16 | kind).to_bytes(4, "big") + (flags << 24 | len(payload)).to_bytes(4, "big")
    fed(head + payload, at)


@given(FRAMES, st.integers(0, 10**6), st.integers(1, 255), splits())
def test_one_damaged_byte_ends_in_frames_or_a_declared_error(
    frames: list[spdy.Frame], place: int, flip: int, at: list[float]
) -> None:
    encoder = spdy.Encoder()
    sent = bytearray(b"".join(encoder.encode(frame) for frame in frames))
    if sent:
        sent[place % len(sent)] ^= flip
    fed(bytes(sent), at)


class Transport:
    """What the server is sent, then the end; what it says is decoded as a client would."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = [piece for piece in pieces if piece]
        self._decoder = spdy.Decoder()
        self.heard: list[spdy.Frame] = []

    async def read(self) -> bytes:
        await asyncio.sleep(0)
        return self._pieces.pop(0) if self._pieces else b""

    async def write(self, data: bytes) -> None:
        self.heard += self._decoder.feed(data)
        await asyncio.sleep(0)


# Few numbers, so that frames meet streams that are open, over, refused or not there yet.
SMALL = st.integers(1, 6)
CONVERSATION = st.lists(
    st.one_of(
        st.builds(spdy.SynStream, SMALL, HEADERS, st.booleans(), st.booleans()),
        st.builds(spdy.Headers, SMALL, HEADERS, st.booleans()),
        st.builds(spdy.Data, SMALL, st.binary(max_size=50), st.booleans()),
        st.builds(spdy.RstStream, SMALL, st.integers(1, 11)),
        st.builds(spdy.Settings, st.dictionaries(st.just(spdy.SETTING_INITIAL_WINDOW), WORDS, max_size=1)),
        st.builds(spdy.Ping, st.integers(0, 9)),
        st.builds(spdy.WindowUpdate, st.integers(0, 6), st.integers(0, 2**31 - 1)),
    ),
    max_size=30,
)


@given(CONVERSATION, splits(), st.integers(0, 10))
def test_any_conversation_ends_with_every_byte_accounted_for(
    frames: list[spdy.Frame], at: list[float], refuse_every: int
) -> None:
    asyncio.run(asyncio.wait_for(_converse(frames, at, refuse_every), 10))


async def _converse(frames: list[spdy.Frame], at: list[float], refuse_every: int) -> None:
    encoder = spdy.Encoder()
    transport = Transport(cut(b"".join(encoder.encode(frame) for frame in frames), at))
    readers: list[asyncio.Task[bytes]] = []
    offered: list[SpdyStream] = []

    def on_stream(stream: SpdyStream) -> None:
        offered.append(stream)
        if refuse_every and len(offered) % refuse_every == 0:
            raise spdy_streams.Refused("not this one")
        readers.append(asyncio.create_task(_echo(stream)))

    session = SpdySession(transport, on_stream)
    await session.serve()
    taken = await asyncio.gather(*readers)
    assert session._unread_bytes == 0
    assert session._streams == {}
    # Numbers of streams only rise, and each is answered once.
    numbers = [stream.number for stream in offered]
    assert numbers == sorted(set(numbers))
    answered = [frame.stream for frame in transport.heard if isinstance(frame, spdy.SynReply)]
    assert answered == sorted(set(answered))
    # Nobody hears a byte that nobody sent.
    for stream, received in zip([s for s in offered if s.number in answered], taken, strict=True):
        assert _sent_to(stream.number, frames).startswith(received)


def _sent_to(number: int, frames: list[spdy.Frame]) -> bytes:
    """What came for a stream after it was opened."""
    opened = next(
        at for at, frame in enumerate(frames) if isinstance(frame, spdy.SynStream) and frame.stream == number
    )
    later = [frame for frame in frames[opened:] if isinstance(frame, spdy.Data) and frame.stream == number]
    return b"".join(frame.data for frame in later)


async def _echo(stream: SpdyStream) -> bytes:
    received = b""
    try:
        while (data := await stream.receive()) is not None:
            received += data
            await stream.send(data)
        await stream.finish()
    except StreamReset:
        pass
    return received
