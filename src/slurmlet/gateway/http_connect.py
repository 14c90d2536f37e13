"""HTTP CONNECT on a unix socket: the way in for the API server (its egress selector) and for `slurmlet proxy`.

The socket is 0600 in a directory that is 0700, and a peer of another user is turned away besides.
Two headers are ours: `slurmlet-search` (domains for short names) and `slurmlet-only: cluster`.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Callable
from pathlib import Path

from slurmlet.gateway.destinations import Destination, OnReached, Refusal
from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet.socket_relay import Relay

SEARCH, ONLY = "slurmlet-search", "slurmlet-only"
_HEAD_BYTES = 16 << 10
_HEAD_TIMEOUT_S = 10.0
_BACKLOG = 256
_UCRED = struct.Struct("3i")
_REASONS = {
    400: "Bad Request", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    502: "Bad Gateway", 503: "Service Unavailable", 504: "Gateway Timeout",
}  # fmt: skip
Reach = Callable[[Destination, OnReached], None]


class ConnectServer:
    def __init__(self, loop: Loop, path: Path, reach: Reach) -> None:
        self._loop, self._reach = loop, reach
        self._socket = _listen(path)
        loop.reading(self._socket.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            client, _ = self._socket.accept()
        except OSError:
            return
        client.setblocking(False)
        if peer_uid(client) != os.getuid():
            print(
                "another user came to the gateway's socket and was turned away", file=sys.stderr, flush=True
            )
            client.close()
            return
        _Session(self._loop, client, self._reach)


class _Session:
    def __init__(self, loop: Loop, client: socket.socket, reach: Reach) -> None:
        self._loop, self._client, self._reach = loop, client, reach
        self._in = bytearray()
        self._timer: Timer = loop.later(_HEAD_TIMEOUT_S, self._close)
        loop.reading(client.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            received = self._client.recv(_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        self._in += received
        end = self._in.find(b"\r\n\r\n")
        if end >= 0:
            self._timer.cancel()
            self._loop.reading(self._client.fileno(), None)
            self._asked(bytes(self._in[:end]), bytes(self._in[end + 4 :]))
        elif not received or len(self._in) > _HEAD_BYTES:
            self._close()

    def _asked(self, head: bytes, rest: bytes) -> None:
        destination = parse(head)
        if isinstance(destination, Refusal):
            self._refuse(destination)
            return

        def reached(made: socket.socket | None, refusal: Refusal | None) -> None:
            if made is None:
                self._refuse(refusal or Refusal(502, "no connection"))
                return
            try:
                self._client.send(b"HTTP/1.1 200 Connection established\r\n\r\n")
                if rest:
                    # A new connection has room for what one head's buffer may hold.
                    made.send(rest)
            except OSError:
                made.close()
                self._close()
                return
            Relay(self._loop, self._client, made)

        self._reach(destination, reached)

    def _refuse(self, refusal: Refusal) -> None:
        try:
            self._client.send(answer(refusal))
        except OSError:
            pass
        self._close()

    def _close(self) -> None:
        self._timer.cancel()
        if self._client.fileno() >= 0:
            self._loop.forget(self._client.fileno())
            self._client.close()


def answer(refusal: Refusal) -> bytes:
    """The reason stands in the status line too: that is all that the API server repeats."""
    why = refusal.why.encode("ascii", "replace").replace(b"\r", b" ").replace(b"\n", b" ")
    reason = _REASONS.get(refusal.status, "Error").encode()
    return (
        b"HTTP/1.1 %d %s: %s\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s\n"
        % (refusal.status, reason, why, len(why) + 1, why)
    )


def parse(head: bytes) -> Destination | Refusal:
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        return Refusal(400, "not an HTTP request")
    if words[0] != "CONNECT":
        return Refusal(405, "only CONNECT is supported")
    host, _, port = words[1].rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        return Refusal(400, f"{words[1]!r} is not HOST:PORT")
    headers = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
    }
    return Destination(
        host.strip("[]"), int(port), tuple(headers.get(SEARCH, "").split()), headers.get(ONLY) == "cluster"
    )


def peer_uid(client: socket.socket) -> int:
    raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    return int(_UCRED.unpack(raw)[1])


def _listen(path: Path) -> socket.socket:
    """In place of what an earlier gateway left; there is one supervisor, so there is one gateway."""
    temporary = path.with_name(f".{path.name[:4]}{os.getpid()}")
    temporary.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.setblocking(False)
    old = os.umask(0o177)
    try:
        made.bind(str(temporary))
    finally:
        os.umask(old)
    made.listen(_BACKLOG)
    # Whoever connects finds the old one or the new one, and the new one listens already.
    temporary.replace(path)
    return made
