"""The little of DNS messages that a relay must know: names asked for, sizes, truncation, addresses of an answer. Pure."""

from __future__ import annotations

import struct

_HEAD = struct.Struct(">HHHHHH")
_FIXED = struct.Struct(">HHIH")
HEAD_BYTES = _HEAD.size
_TRUNCATED, _RECURSION_DESIRED, _RESPONSE = 0x0200, 0x0100, 0x8000
_RCODE = 0x000F
NXDOMAIN, SERVFAIL = 3, 2
A, OPT = 1, 41
_LEAST_UDP_BYTES = 512
_INTERNET = 1


class Malformed(ValueError):
    """Bytes that are no DNS message."""


def query(number: int, name: str, kind: int = A) -> bytes:
    labels = [label.encode("idna") for label in name.rstrip(".").split(".")]
    if not all(0 < len(label) < 64 for label in labels) or sum(map(len, labels)) + len(labels) > 254:
        raise Malformed(f"{name!r} is not a valid name")
    question = b"".join(bytes((len(label),)) + label for label in labels) + b"\0"
    return _HEAD.pack(number, _RECURSION_DESIRED, 1, 0, 0, 0) + question + kind.to_bytes(2, "big") + b"\0\x01"


def renumbered(message: bytes, number: int) -> bytes:
    return number.to_bytes(2, "big") + message[2:]


def number_of(message: bytes) -> int:
    return int.from_bytes(message[:2], "big")


def rcode(message: bytes) -> int:
    return int(_HEAD.unpack_from(message)[1]) & _RCODE


def is_query(message: bytes) -> bool:
    return len(message) > HEAD_BYTES and not message[2] & 0x80


def asks_within(message: bytes, domain: bytes) -> bool:
    """Whether the first question is for a name in `domain` (in wire format)."""
    end = _question_end(message) - 4
    return message[HEAD_BYTES:end].lower().endswith(domain)


def wire_name(name: str) -> bytes:
    return b"".join(bytes((len(label),)) + label.encode() for label in name.split(".")) + b"\0"


def failure(message: bytes, code: int) -> bytes:
    """An answer that says no more than a code."""
    number, flags, *_ = _HEAD.unpack_from(message)
    end = _question_end(message)
    return _HEAD.pack(number, _RESPONSE | (flags & ~_RCODE) | code, 1, 0, 0, 0) + message[HEAD_BYTES:end]


def udp_limit(message: bytes) -> int:
    """How large an answer the asker takes in one datagram: what its EDNS record says, or 512 bytes."""
    try:
        at = _question_end(message)
        for _ in range(_HEAD.unpack_from(message)[5]):
            at = _skip_name(message, at)
            kind, size, _, length = _FIXED.unpack_from(message, at)
            if kind == OPT:
                return max(_LEAST_UDP_BYTES, int(size))
            at += _FIXED.size + length
    except (Malformed, struct.error, IndexError):
        pass
    return _LEAST_UDP_BYTES


def for_udp(answer: bytes, limit_bytes: int) -> bytes:
    """The answer, or an empty one that sends the asker to TCP."""
    if len(answer) <= limit_bytes:
        return answer
    number, flags, *_ = _HEAD.unpack_from(answer)
    end = _question_end(answer)
    return _HEAD.pack(number, flags | _TRUNCATED, 1, 0, 0, 0) + answer[HEAD_BYTES:end]


def addresses_of(answer: bytes) -> list[int]:
    """The IPv4 addresses of an answer."""
    found = []
    try:
        at = _question_end(answer)
        for _ in range(_HEAD.unpack_from(answer)[3]):
            at = _skip_name(answer, at)
            kind, network, _, length = _FIXED.unpack_from(answer, at)
            at += _FIXED.size
            if at + length > len(answer):
                raise Malformed("an answer that ends too soon")
            if kind == A and network == _INTERNET and length == 4:
                found.append(int.from_bytes(answer[at : at + 4], "big"))
            at += length
    except (struct.error, IndexError) as error:
        raise Malformed("an answer that ends too soon") from error
    return found


def _question_end(message: bytes) -> int:
    if len(message) < HEAD_BYTES or _HEAD.unpack_from(message)[2] != 1:
        raise Malformed("not one question")
    end = _skip_name(message, HEAD_BYTES) + 4
    if end > len(message):
        raise Malformed("a question that ends too soon")
    return end


def _skip_name(message: bytes, at: int) -> int:
    try:
        while True:
            length = message[at]
            if length & 0xC0:
                return at + 2
            at += 1 + length
            if length == 0:
                return at
    except IndexError as error:
        raise Malformed("a name that ends too soon") from error
