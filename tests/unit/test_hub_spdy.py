"""SPDY/3.1 frames: the bytes of the specification, and bytes that no honest peer sends."""

from __future__ import annotations

import struct
import zlib

import pytest

from slurmlet.hub.kubelet import spdy

FRAMES = [
    spdy.SynStream(1, {"streamtype": "error", "port": "80", "requestid": "0"}),
    spdy.SynStream(3, {"streamtype": "data", "port": "80", "requestid": "0"}, fin=True, unidirectional=True),
    spdy.SynReply(1, {}),
    spdy.SynReply(3, {"status": "200 OK"}, fin=True),
    spdy.Headers(3, {"later": "wörds"}),
    spdy.Data(3, b"\x00\xff" * 1000),
    spdy.Data(3, b"", fin=True),
    spdy.RstStream(1, spdy.CANCEL),
    spdy.Settings({spdy.SETTING_INITIAL_WINDOW: 1 << 20, 4: 100}),
    spdy.Ping(7),
    spdy.GoAway(3, spdy.GOAWAY_OK),
    spdy.WindowUpdate(3, 65536),
]


def test_the_dictionary_is_that_of_the_specification() -> None:
    assert (len(spdy.DICTIONARY), zlib.adler32(spdy.DICTIONARY)) == (1423, 0xE3C6A7C2)


@pytest.mark.parametrize("step", [1, 3, 7, 1 << 20])
def test_frames_survive_the_way_however_they_are_cut(step: int) -> None:
    encoder, decoder = spdy.Encoder(), spdy.Decoder()
    sent = b"".join(encoder.encode(frame) for frame in FRAMES)
    came = [frame for at in range(0, len(sent), step) for frame in decoder.feed(sent[at : at + step])]
    assert came == FRAMES


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (spdy.Data(5, b"ab", fin=True), "00000005 01000002 6162"),
        (spdy.RstStream(5, spdy.REFUSED_STREAM), "80030003 00000008 00000005 00000003"),
        (spdy.Ping(1), "80030006 00000004 00000001"),
        (spdy.GoAway(7, 0), "80030007 00000008 00000007 00000000"),
        (spdy.WindowUpdate(5, 4096), "80030009 00000008 00000005 00001000"),
        (spdy.Settings({7: 65536}), "80030004 0000000c 00000001 00000007 00010000"),
    ],
)
def test_the_bytes_on_the_wire(frame: spdy.Frame, expected: str) -> None:
    assert spdy.Encoder().encode(frame).hex() == expected.replace(" ", "")


def test_header_blocks_are_one_zlib_stream_with_the_dictionary() -> None:
    encoder = spdy.Encoder()
    first, second = (encoder.encode(spdy.SynReply(number, {"Name": "value"})) for number in (1, 3))
    inflate = zlib.decompressobj(zdict=spdy.DICTIONARY)
    plain = struct.pack("!II4sI5s", 1, 4, b"name", 5, b"value")
    assert inflate.decompress(first[12:]) == plain
    # Only with the state of the first can the second be read.
    assert inflate.decompress(second[12:]) == plain
    assert len(second) < len(first)


def test_frames_as_spdystream_writes_them() -> None:
    """kubectl's first forwarded connection: best compression, a block flushed per frame, an error stream closed at once."""
    compress = zlib.compressobj(level=9, zdict=spdy.DICTIONARY)
    headers = {"Port": "80", "Requestid": "0", "Streamtype": "error"}
    plain = struct.pack("!I", len(headers)) + b"".join(
        struct.pack("!I", len(text)) + text.lower().encode() for pair in headers.items() for text in pair
    )
    block = compress.compress(plain) + compress.flush(zlib.Z_SYNC_FLUSH)
    payload = struct.pack("!IIBB", 1, 0, 0, 0) + block
    sent = struct.pack("!II", 0x80030001, len(payload)) + payload + bytes.fromhex("0000000101000000")
    assert list(spdy.Decoder().feed(sent)) == [
        spdy.SynStream(1, {"port": "80", "requestid": "0", "streamtype": "error"}),
        spdy.Data(1, b"", fin=True),
    ]


def test_control_frames_nobody_knows_are_left_alone() -> None:
    unknown = bytes.fromhex("8003000b 00000003 616263".replace(" ", ""))
    assert list(spdy.Decoder().feed(unknown + spdy.Encoder().encode(spdy.Ping(1)))) == [spdy.Ping(1)]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(bytes.fromhex("8002000600000004") + b"\0\0\0\1", id="another version"),
        pytest.param(bytes.fromhex("8003000600000002") + b"\0\1", id="a ping too short"),
        pytest.param(
            bytes.fromhex("800300010000000e0000000100000000000061626364"), id="headers not compressed"
        ),
        pytest.param(bytes.fromhex("0000000000000001") + b"a", id="data of stream 0"),
        pytest.param(bytes.fromhex("80030001 00ffffff".replace(" ", "")), id="a control frame of 16 MiB"),
        pytest.param(
            bytes.fromhex("8003000400000008 0000000900000000".replace(" ", "")), id="settings cut off"
        ),
    ],
)
def test_what_breaks_the_protocol_ends_it(sent: bytes) -> None:
    with pytest.raises(spdy.SpdyError):
        list(spdy.Decoder().feed(sent))


@pytest.mark.parametrize(
    "plain",
    [
        pytest.param(b"\0" * (64 << 20), id="a bomb"),
        pytest.param(struct.pack("!II", 1, 1 << 30), id="a name longer than its block"),
        pytest.param(struct.pack("!I", 1000), id="more headers than there are"),
    ],
)
def test_hostile_headers_are_refused(plain: bytes) -> None:
    compress = zlib.compressobj(zdict=spdy.DICTIONARY)
    block = compress.compress(plain) + compress.flush(zlib.Z_SYNC_FLUSH)
    payload = struct.pack("!I", 1) + block
    with pytest.raises(spdy.SpdyError):
        list(spdy.Decoder().feed(struct.pack("!II", 0x80030002, len(payload)) + payload))
