"""TCP at the gateway's own address: the server half of "How one pod's TCP reaches another's" (docs/network.md).

A connection that nobody of this cluster announced is asked after for a second, then reset; no byte of it is read.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.encryption.sealer import Sealer
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import Announcement, Key, Overlay
from slurmlet.podnet.socket_relay import is_over, reset

_PATIENCE_S = 1.0
_MAX_ASIDE = 256
_BACKLOG = 256
OnConnection = Callable[[socket.socket, Announcement], None]


class Accepting:
    """Listens for `port` of the gateway's address; `host_port` is where, for the tables of all others."""

    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        overlay: Overlay,
        port: int,
        wanted_port: int,
        came: OnConnection,
        sealer: Sealer | None = None,
    ) -> None:
        self._loop, self._setup, self._overlay, self._port, self._came = loop, setup, overlay, port, came
        self._sealer = sealer
        self._aside: dict[Key, tuple[socket.socket, Timer]] = {}
        self._socket = _listen(addresses.text(setup.host_ip), wanted_port)
        self.host_port = int(self._socket.getsockname()[1])
        loop.reading(self._socket.fileno(), self._readable)

    def announced(self, key: Key, what: Announcement) -> None:
        """For the overlay's on_announced: somebody that waits may be known now."""
        held = self._aside.get(key)
        # What was reset is not what is announced: that one is about to come from the same port.
        if held is not None and not is_over(held[0]):
            del self._aside[key]
            held[1].cancel()
            self._loop.forget(held[0].fileno())
            self._overlay.used(key)
            self._welcome(held[0], what)

    def _readable(self) -> None:
        try:
            connection, (host, port) = self._socket.accept()
        except OSError:
            return
        connection.setblocking(False)
        if is_over(connection):
            connection.close()
            return
        key = (addresses.number(host), port, self._port)
        what = self._overlay.claim(*key)
        if what is not None:
            self._welcome(connection, what)
        elif len(self._aside) < _MAX_ASIDE:
            # One that was reset, whose client came again from the same port.
            self._refuse(key)
            self._aside[key] = (connection, self._loop.later(_PATIENCE_S, lambda: self._refuse(key)))
            self._overlay.whois(key[0], port, self.host_port)
        else:
            reset(connection)

    def _welcome(self, connection: socket.socket, what: Announcement) -> None:
        def sealed(plain: socket.socket | None, _code: int) -> None:
            if plain is not None and self._sealer is not None:
                self._sealer.opened(plain)
                self._came(plain, what)

        if (what.ip, what.port) != (self._setup.ip, self._port):
            reset(connection)
        elif self._sealer is None:
            self._came(connection, what)
        else:
            self._sealer.server(connection, sealed)

    def _refuse(self, key: Key) -> None:
        held = self._aside.pop(key, None)
        if held is not None:
            held[1].cancel()
            reset(held[0])


def _listen(host: str, wanted_port: int) -> socket.socket:
    """On the port of the last time where it is free: tables elsewhere still name it."""
    for port in dict.fromkeys((wanted_port, 0)):
        made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, port))
        except OSError:
            made.close()
            if port == 0:
                raise
            continue
        made.listen(_BACKLOG)
        return made
    raise AssertionError
