"""What programs say to a proxy: SOCKS5 (RFC 1928), HTTP CONNECT and plain HTTP. Pure: bytes in, a request or None out."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlsplit

from slurmlet.gateway.destinations import Refusal
from slurmlet.gateway.http_connect import answer

SOCKS5 = 5
LONGEST_BYTES = 64 << 10
_NO_PASSWORD, _NONE_OF_THEM = b"\x05\x00", b"\x05\xff"
_CONNECT = 1
_IPV4, _NAME, _IPV6 = 1, 3, 4
_SUCCEEDED, _FAILED, _NOT_ALLOWED, _UNREACHABLE, _REFUSED, _UNSUPPORTED, _BAD_ADDRESS = 0, 1, 2, 4, 5, 7, 8
_SOCKS_CODES = {403: _NOT_ALLOWED, 404: _UNREACHABLE, 502: _REFUSED, 504: _UNREACHABLE}
# Nothing else may reach the head that is sent to the gateway.
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}")
# As int() would have it, without the digits of other scripts and without end.
_PORT = re.compile(r"[0-9]{1,5}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HOP_HEADERS = ("proxy-connection", "proxy-authorization", "keep-alive", "te", "trailer")
ABOUT = b"This is `slurmlet proxy`. Name it as the HTTP or SOCKS5 proxy of a browser or of curl.\n"


class Unusable(Exception):
    """The client gets `reply`, then the end of the connection."""

    def __init__(self, reply: bytes) -> None:
        super().__init__()
        self.reply = reply


@dataclass(frozen=True)
class Request:
    host: str
    port: int
    # What the server behind is to get before the client's next bytes.
    first: bytes
    # What the client is told when the connection stands, and when it does not.
    accepted: bytes
    refused: Callable[[Refusal], bytes]


class Reader:
    """Feed it what the client says; it returns a request once there is one. `replies` is to be sent meanwhile."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._greeted = False
        self.replies = b""

    def feed(self, received: bytes) -> Request | None:
        """Raises Unusable."""
        self._bytes += received
        if not self._bytes:
            return None
        if self._bytes[0] != SOCKS5:
            return self._http()
        if not self._greeted and not self._greet():
            return None
        return self._socks() if self._greeted else None

    # SOCKS5.

    def _greet(self) -> bool:
        if len(self._bytes) < 2 or len(self._bytes) < 2 + self._bytes[1]:
            return False
        methods = self._bytes[2 : 2 + self._bytes[1]]
        if 0 not in methods:
            raise Unusable(_NONE_OF_THEM)
        del self._bytes[: 2 + len(methods)]
        self._greeted = True
        self.replies += _NO_PASSWORD
        # A request may follow; it starts with the same byte as a greeting.
        return bool(self._bytes)

    def _socks(self) -> Request | None:
        said = bytes(self._bytes)
        if len(said) < 5:
            return None
        size = {_IPV4: 4, _IPV6: 16, _NAME: 1 + said[4]}.get(said[3])
        if size is None:
            raise Unusable(_socks_reply(_BAD_ADDRESS))
        if len(said) < 6 + size:
            return None
        if said[1] != _CONNECT:
            raise Unusable(_socks_reply(_UNSUPPORTED))
        raw, port = said[4 : 4 + size], int.from_bytes(said[4 + size : 6 + size], "big")
        host = _spelled(said[3], raw)
        if not _usable(host, port):
            raise Unusable(_socks_reply(_BAD_ADDRESS))
        return Request(
            host,
            port,
            said[6 + size :],
            _socks_reply(_SUCCEEDED),
            lambda refusal: _socks_reply(_SOCKS_CODES.get(refusal.status, _FAILED)),
        )

    # HTTP.

    def _http(self) -> Request | None:
        end = self._bytes.find(b"\r\n\r\n")
        if end < 0:
            if len(self._bytes) > LONGEST_BYTES:
                raise Unusable(answer(Refusal(400, "the request headers are too long")))
            return None
        lines = bytes(self._bytes[:end]).split(b"\r\n")
        rest = bytes(self._bytes[end + 4 :])
        words = lines[0].decode("latin-1").split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Unusable(answer(Refusal(400, "not a proxy request")))
        if words[0] == "CONNECT":
            return _connect(words[1], rest)
        return _plain(words, lines[1:], rest)


def _connect(target: str, rest: bytes) -> Request:
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    if not _PORT.fullmatch(port) or not _usable(host, int(port)):
        raise Unusable(answer(Refusal(400, "CONNECT needs HOST:PORT")))
    return Request(host, int(port), rest, b"HTTP/1.1 200 Connection established\r\n\r\n", answer)


def _plain(words: list[str], headers: list[bytes], rest: bytes) -> Request:
    """One request to one server. The connection ends with it: the next may be for another server."""
    if not words[1].startswith("http://"):
        raise Unusable(_about())
    if _CONTROL.search(" ".join(words)):
        # urlsplit leaves some of them out, and a server may take one for the end of the line.
        raise Unusable(answer(Refusal(400, "the request line has control characters")))
    try:
        url = urlsplit(words[1])
        host, port = url.hostname or "", url.port or 80
    except ValueError:
        host, port = "", 0
    if not _usable(host, port):
        raise Unusable(answer(Refusal(400, "not a valid address")))
    path = words[1][len("http://") + len(url.netloc) :]
    kept = [
        line
        for line in headers
        if line.partition(b":")[0].strip().lower().decode("latin-1") not in _HOP_HEADERS
    ]
    upgrades = any(line.lower().startswith(b"upgrade:") for line in kept)
    if not upgrades:
        kept = [line for line in kept if not line.lower().startswith(b"connection:")] + [b"Connection: close"]
    first = f"{words[0]} {path if path.startswith('/') else '/' + path} {words[2]}".encode("latin-1")
    return Request(host, port, b"\r\n".join([first, *kept, b"", b""]) + rest, b"", answer)


def _usable(host: str, port: int) -> bool:
    return 0 < port < 65536 and _HOST.fullmatch(host) is not None


def _spelled(kind: int, raw: bytes) -> str:
    if kind == _NAME:
        return raw[1:].decode("latin-1")
    return socket.inet_ntop(socket.AF_INET if kind == _IPV4 else socket.AF_INET6, raw)


def _socks_reply(code: int) -> bytes:
    return bytes((SOCKS5, code, 0, _IPV4)) + bytes(6)


def _about() -> bytes:
    return (
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % len(ABOUT)
    ) + ABOUT
