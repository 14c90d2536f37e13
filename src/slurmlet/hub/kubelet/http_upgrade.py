"""An HTTP connection that becomes something else: the way to SPDY/3.1, which aiohttp does not know.

aiohttp's server hands over a connection to its own WebSockets only. The same entry is used here, and nowhere else: a
response with status 101 whose `set_parser` takes all further bytes of the connection. That leaves TLS, write limits and
the end of the connection to aiohttp, where `transport.set_protocol` would leave a request handler behind that still uses
the connection. Bytes must never come before the parser is set, so it is set before the 101 is written.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from aiohttp import web

SPDY = "SPDY/3.1"
_PROTOCOL = "X-Stream-Protocol-Version"
_ACCEPTED = "X-Accepted-Stream-Protocol-Versions"
_MAX_UNREAD_BYTES = 256 << 10


def asks_for_spdy(request: web.Request) -> bool:
    upgrade, connection = request.headers.get("Upgrade", ""), request.headers.get("Connection", "")
    return SPDY.lower() in upgrade.lower() and "upgrade" in connection.lower()


def negotiate(request: web.Request, supported: tuple[str, ...]) -> str:
    """The first of the client's protocols that is supported, or the kubelet's refusal."""
    wanted = [name.strip() for line in request.headers.getall(_PROTOCOL, []) for name in line.split(",")]
    if not wanted:
        raise web.HTTPBadRequest(
            text=f"unable to upgrade: header {_PROTOCOL} does not exist in request "
            f"with {len(request.headers)} headers\n"
        )
    for name in wanted:
        if name in supported:
            return name
    refusal = web.HTTPForbidden(
        text="unable to upgrade: unable to negotiate protocol: "
        f"client supports [{' '.join(wanted)}], server accepts [{' '.join(supported)}]\n"
    )
    for name in supported:
        refusal.headers.add(_ACCEPTED, name)
    raise refusal


class UpgradedConnection(web.StreamResponse):
    """The bytes of a connection after its upgrade (a ByteTransport). The handler returns it when all is done."""

    def __init__(self, protocol: str) -> None:
        headers = {"Connection": "Upgrade", "Upgrade": SPDY, _PROTOCOL: protocol}
        super().__init__(status=101, headers=headers)
        self.force_close()
        self._received = bytearray()
        self._came = asyncio.Event()
        self._ended = False
        self._source: asyncio.Transport | None = None

    async def take_over(self, request: web.Request) -> None:
        # Not the protocol's pause and resume: those are the HTTP parser's, which is out of the play from here on.
        self._source = request.transport
        # Typed for aiohttp's own parser, which is duck-typed where it is called: feed_data and feed_eof.
        request.protocol.set_parser(cast(Any, self))
        request.protocol.keep_alive(False)
        await self.prepare(request)

    async def read(self) -> bytes:
        while not self._received and not self._ended:
            self._came.clear()
            await self._came.wait()
        data = bytes(self._received)
        self._received.clear()
        if self._source is not None and not self._ended:
            self._source.resume_reading()
        return data

    # For aiohttp.

    def feed_data(self, data: bytes) -> tuple[bool, bytes]:
        self._received += data
        self._came.set()
        if self._source is not None and len(self._received) > _MAX_UNREAD_BYTES:
            self._source.pause_reading()
        return False, b""

    def feed_eof(self) -> None:
        self._ended = True
        self._came.set()
