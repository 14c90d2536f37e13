"""SPDY/3.1 frames as bytes and back: what old Kubernetes clients speak, and what port-forward wraps in WebSockets.

Pure: no I/O, no streams, no policy; `spdystreams.py` has those. One Encoder and one Decoder belong to one connection,
because header blocks are compressed with a state that runs through all of them: every header frame made must be sent,
in the order made.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

FIN = 0x01
UNIDIRECTIONAL = 0x02
# RST_STREAM
(
    PROTOCOL_ERROR,
    INVALID_STREAM,
    REFUSED_STREAM,
    UNSUPPORTED_VERSION,
    CANCEL,
    INTERNAL_ERROR,
    FLOW_CONTROL_ERROR,
) = range(1, 8)
# GOAWAY
GOAWAY_OK, GOAWAY_PROTOCOL_ERROR, GOAWAY_INTERNAL_ERROR = range(3)
SETTING_INITIAL_WINDOW = 7
INITIAL_WINDOW = 64 << 10
MAX_WINDOW = (1 << 31) - 1

_VERSION = 3
_SYN_STREAM, _SYN_REPLY, _RST_STREAM, _SETTINGS, _PING, _GOAWAY, _HEADERS, _WINDOW_UPDATE = (
    1,
    2,
    3,
    4,
    6,
    7,
    8,
    9,
)
_HEAD = struct.Struct("!II")
_CONTROL_BIT = 1 << 31
_ID_MASK = _CONTROL_BIT - 1
_LENGTH_MASK = (1 << 24) - 1
# Ours to choose: streams of Kubernetes carry four short headers.
_MAX_CONTROL_BYTES = 64 << 10
_MAX_HEADERS_BYTES = 64 << 10

# The words of the specification's compression dictionary, each preceded there by its length; then its tail.
_WORDS = (
    "options head post put delete trace accept accept-charset accept-encoding accept-language accept-ranges age allow "
    "authorization cache-control connection content-base content-encoding content-language content-length "
    "content-location content-md5 content-range content-type date etag expect expires from host if-match "
    "if-modified-since if-none-match if-range if-unmodified-since last-modified location max-forwards pragma "
    "proxy-authenticate proxy-authorization range referer retry-after server te trailer transfer-encoding upgrade "
    "user-agent vary via warning www-authenticate method get status 200_OK version HTTP/1.1 url public set-cookie "
    "keep-alive origin"
)
_TAIL = (
    "100101201202205206300302303304305306307402405406407408409410411412413414415416417502504505"
    "203 Non-Authoritative Information204 No Content301 Moved Permanently400 Bad Request401 Unauthorized403 Forbidden"
    "404 Not Found500 Internal Server Error501 Not Implemented503 Service UnavailableJan Feb Mar Apr May Jun Jul Aug "
    "Sept Oct Nov Dec 00:00:00 Mon, Tue, Wed, Thu, Fri, Sat, Sun, GMTchunked,text/html,image/png,image/jpg,image/gif,"
    "application/xml,application/xhtml+xml,text/plain,text/javascript,publicprivatemax-age=gzip,deflate,sdch"
    "charset=utf-8charset=iso-8859-1,utf-,*,enq=0."
)


def _sized(word: bytes) -> bytes:
    return struct.pack("!I", len(word)) + word


DICTIONARY = b"".join(_sized(word.replace("_", " ").encode()) for word in _WORDS.split()) + _TAIL.encode()


class SpdyError(Exception):
    """The peer broke the protocol; the connection cannot go on."""


@dataclass(frozen=True)
class SynStream:
    stream: int
    headers: Mapping[str, str]
    fin: bool = False
    unidirectional: bool = False


@dataclass(frozen=True)
class SynReply:
    stream: int
    headers: Mapping[str, str]
    fin: bool = False


@dataclass(frozen=True)
class Headers:
    stream: int
    headers: Mapping[str, str]
    fin: bool = False


@dataclass(frozen=True)
class Data:
    stream: int
    data: bytes
    fin: bool = False


@dataclass(frozen=True)
class RstStream:
    stream: int
    status: int


@dataclass(frozen=True)
class Settings:
    values: Mapping[int, int]


@dataclass(frozen=True)
class Ping:
    number: int


@dataclass(frozen=True)
class GoAway:
    last_good_stream: int
    status: int


@dataclass(frozen=True)
class WindowUpdate:
    stream: int
    delta_bytes: int


Frame = SynStream | SynReply | Headers | Data | RstStream | Settings | Ping | GoAway | WindowUpdate


class Encoder:
    def __init__(self) -> None:
        self._compress = zlib.compressobj(zdict=DICTIONARY)

    def encode(self, frame: Frame) -> bytes:
        match frame:
            case Data(stream, data, fin):
                return _HEAD.pack(stream, (FIN if fin else 0) << 24 | len(data)) + data
            case SynStream(stream, headers, fin, unidirectional):
                flags = (FIN if fin else 0) | (UNIDIRECTIONAL if unidirectional else 0)
                return _control(
                    _SYN_STREAM, flags, struct.pack("!IIBB", stream, 0, 0, 0) + self._block(headers)
                )
            case SynReply(stream, headers, fin):
                return _control(
                    _SYN_REPLY, FIN if fin else 0, struct.pack("!I", stream) + self._block(headers)
                )
            case Headers(stream, headers, fin):
                return _control(_HEADERS, FIN if fin else 0, struct.pack("!I", stream) + self._block(headers))
            case RstStream(stream, status):
                return _control(_RST_STREAM, 0, struct.pack("!II", stream, status))
            case Settings(values):
                pairs = b"".join(struct.pack("!II", key, value) for key, value in values.items())
                return _control(_SETTINGS, 0, struct.pack("!I", len(values)) + pairs)
            case Ping(number):
                return _control(_PING, 0, struct.pack("!I", number))
            case GoAway(last, status):
                return _control(_GOAWAY, 0, struct.pack("!II", last, status))
            case WindowUpdate(stream, delta_bytes):
                return _control(_WINDOW_UPDATE, 0, struct.pack("!II", stream, delta_bytes))

    def _block(self, headers: Mapping[str, str]) -> bytes:
        plain = struct.pack("!I", len(headers)) + b"".join(
            _sized(name.lower().encode()) + _sized(value.encode()) for name, value in headers.items()
        )
        return self._compress.compress(plain) + self._compress.flush(zlib.Z_SYNC_FLUSH)


def _control(kind: int, flags: int, payload: bytes) -> bytes:
    return _HEAD.pack(_CONTROL_BIT | _VERSION << 16 | kind, flags << 24 | len(payload)) + payload


class Decoder:
    """Turns bytes as they arrive into frames; keeps what is incomplete."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._decompress = zlib.decompressobj(zdict=DICTIONARY)

    def feed(self, received: bytes) -> Iterator[Frame]:
        self._buffer += received
        while len(self._buffer) >= _HEAD.size:
            first, second = _HEAD.unpack_from(self._buffer)
            size = second & _LENGTH_MASK
            if first & _CONTROL_BIT and size > _MAX_CONTROL_BYTES:
                raise SpdyError(f"a control frame of {size} bytes")
            if len(self._buffer) < _HEAD.size + size:
                return
            payload = bytes(self._buffer[_HEAD.size : _HEAD.size + size])
            del self._buffer[: _HEAD.size + size]
            frame = self._parse(first, second >> 24, payload)
            if frame is not None:
                yield frame

    def _parse(self, first: int, flags: int, payload: bytes) -> Frame | None:
        if not first & _CONTROL_BIT:
            return Data(_stream(first), payload, bool(flags & FIN))
        version, kind = first >> 16 & 0x7FFF, first & 0xFFFF
        if version != _VERSION:
            raise SpdyError(f"version {version} of SPDY")
        try:
            return self._parse_control(kind, flags, payload)
        except (struct.error, zlib.error, UnicodeDecodeError) as error:
            raise SpdyError(f"a bad control frame of kind {kind}: {error}") from error

    def _parse_control(self, kind: int, flags: int, payload: bytes) -> Frame | None:
        fin = bool(flags & FIN)
        if kind == _SYN_STREAM:
            (first,) = struct.unpack_from("!I", payload)
            return SynStream(_stream(first), self._headers(payload[10:]), fin, bool(flags & UNIDIRECTIONAL))
        if kind in (_SYN_REPLY, _HEADERS):
            (first,) = struct.unpack_from("!I", payload)
            return (SynReply if kind == _SYN_REPLY else Headers)(
                _stream(first), self._headers(payload[4:]), fin
            )
        if kind == _RST_STREAM:
            first, status = struct.unpack("!II", payload)
            return RstStream(_stream(first), status)
        if kind == _SETTINGS:
            return _settings(payload)
        if kind == _PING:
            return Ping(*struct.unpack("!I", payload))
        if kind == _GOAWAY:
            first, status = struct.unpack("!II", payload)
            return GoAway(first & _ID_MASK, status)
        if kind == _WINDOW_UPDATE:
            first, delta_bytes = struct.unpack("!II", payload)
            return WindowUpdate(first & _ID_MASK, delta_bytes & _ID_MASK)
        # "A receiver must ignore control frames of a type it does not know."
        return None

    def _headers(self, block: bytes) -> dict[str, str]:
        # A few bytes can decompress to gigabytes; the limit ends that before it begins.
        plain = self._decompress.decompress(block, _MAX_HEADERS_BYTES)
        if self._decompress.unconsumed_tail:
            raise SpdyError("headers are too large")
        (count,) = struct.unpack_from("!I", plain)
        at, found = 4, {}
        for _ in range(count):
            name, at = _text(plain, at)
            found[name.lower()], at = _text(plain, at)
        return found


def _stream(word: int) -> int:
    number = word & _ID_MASK
    if number == 0:
        raise SpdyError("a frame of stream 0")
    return number


def _text(plain: bytes, at: int) -> tuple[str, int]:
    (size,) = struct.unpack_from("!I", plain, at)
    end = at + 4 + size
    if end > len(plain):
        raise SpdyError("a header longer than its block")
    return plain[at + 4 : end].decode(), end


def _settings(payload: bytes) -> Settings:
    (count,) = struct.unpack_from("!I", payload)
    if len(payload) != 4 + 8 * count:
        raise SpdyError("settings of the wrong length")
    words = struct.unpack(f"!{2 * count}I", payload[4:])
    return Settings({words[i] & _LENGTH_MASK: words[i + 1] for i in range(0, 2 * count, 2)})
