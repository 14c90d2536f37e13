"""Host listeners of a pod in mode "packets": one for each of its ports that somebody asked for and something listens on.

A connection comes in only when its announcement says whose it is and policy admits that one, as docs/network.md has it; what
nobody vouches for is reset.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Callable, Dict, NamedTuple, Optional

from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import Setup
from slurmlet.podnet.overlay_socket import Announcement, Key, Overlay
from slurmlet.podnet.socket_relay import is_over, reset
from slurmlet.podnet.tables import TCP, Tables

if TYPE_CHECKING:
    from slurmlet.podnet.encryption.sealer import Sealer

# As in the fast path: an announcement travels beside the handshake; after that its host is asked.
_HOLD_S, _ASK_S = 0.005, 1.0
_BACKLOG = 1024
_AT_ONCE = 64
_MAX_LISTENERS = 256
_MAX_HELD = 1024

OnCame = Callable[[socket.socket, Announcement], None]


class _Held(NamedTuple):
    made: socket.socket
    port: int
    timer: Timer


class TcpListeners:
    def __init__(
        self,
        loop: Loop,
        setup: Setup,
        tables: Tables,
        overlay: Overlay,
        on_came: OnCame,
        on_listeners: Callable[[Dict[int, int]], None],
        counts: Dict[str, int],
        sealer: Optional[Sealer] = None,
    ) -> None:
        self._loop, self._setup, self._tables, self._overlay = loop, setup, tables, overlay
        self._on_came, self._on_listeners, self._counts = on_came, on_listeners, counts
        self._sealer = sealer
        self._listeners: Dict[int, socket.socket] = {}
        self._held: Dict[Key, _Held] = {}
        overlay.on_announced = self._announced

    def open(self, port: int) -> int:
        """The host port behind the pod's `port`."""
        listener = self._listeners.get(port)
        if listener is None:
            while len(self._listeners) >= _MAX_LISTENERS:
                self.close(next(iter(self._listeners)))
            listener = self._listeners[port] = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listener.setblocking(False)
            listener.bind((addresses.text(self._setup.host_ip), 0))
            listener.listen(_BACKLOG)
            opened = listener
            self._loop.reading(listener.fileno(), lambda: self._connections_came(opened, port))
            self._tell()
        return int(listener.getsockname()[1])

    def close(self, port: int) -> None:
        listener = self._listeners.pop(port, None)
        if listener is not None:
            self._loop.forget(listener.fileno())
            listener.close()
            self._tell()

    def _tell(self) -> None:
        self._on_listeners(
            {port: int(listener.getsockname()[1]) for port, listener in self._listeners.items()}
        )

    def _connections_came(self, listener: socket.socket, port: int) -> None:
        for _ in range(_AT_ONCE):
            try:
                made, (host, host_port) = listener.accept()
            except OSError:
                return
            if is_over(made):
                self._refuse(made)
                continue
            key = (addresses.number(host), host_port, port)
            what = self._overlay.claim(*key)
            if what is not None:
                self._let_in(made, port, what)
            elif len(self._held) >= _MAX_HELD:
                self._refuse(made)
            else:
                self._counts["announced late"] += 1
                if key in self._held:
                    # Reset by its client, who came again from the same port.
                    self._drop(key)
                timer = self._loop.later(_HOLD_S, lambda key=key: self._ask(key))  # type: ignore[misc]
                self._held[key] = _Held(made, port, timer)

    def _let_in(self, made: socket.socket, port: int, what: Announcement) -> None:
        right = (what.ip, what.port) == (self._setup.ip, port) and not addresses.is_loopback(what.source_ip)
        if right and self._tables.admits(TCP, what.source_ip, port):
            self._welcome(made, what)
        else:
            self._refuse(made)

    def _welcome(self, made: socket.socket, what: Announcement) -> None:
        def sealed(plain: Optional[socket.socket], _code: int) -> None:
            if plain is None:
                self._counts["unsealed"] += 1
            else:
                self._on_came(plain, what)

        if self._sealer is None:
            self._on_came(made, what)
        else:
            self._sealer.server(made, sealed)

    def _refuse(self, made: socket.socket) -> None:
        self._counts["refused in"] += 1
        reset(made)

    def _announced(self, key: Key, what: Announcement) -> None:
        held = self._held.get(key)
        # What was reset is not what is announced: that one is about to come from the same port.
        if held is not None and not is_over(held.made):
            del self._held[key]
            held.timer.cancel()
            self._overlay.used(key)
            self._let_in(held.made, held.port, what)

    def _ask(self, key: Key) -> None:
        held = self._held[key]
        self._overlay.whois(key[0], key[1], held.made.getsockname()[1])
        self._held[key] = held._replace(timer=self._loop.later(_ASK_S, lambda: self._unknown(key)))

    def _unknown(self, key: Key) -> None:
        self._counts["strangers"] += 1
        self._drop(key)

    def _drop(self, key: Key) -> None:
        held = self._held.pop(key)
        held.timer.cancel()
        self._refuse(held.made)
