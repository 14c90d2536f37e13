"""What tests of the pod network share: places on one overlay, each with a loopback address for a host, in one loop."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from slurmlet.gateway.tcp_accept import Accepting
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses, overlay_datagrams
from slurmlet.podnet.netd_setup import HostPort, Setup
from slurmlet.podnet.overlay_socket import Announcement, Overlay
from slurmlet.podnet.pod_dial import Dialler
from slurmlet.podnet.tables import Tables

KEY = bytes(range(32))
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def making_loop() -> Iterator[Loop]:
    """A loop for one test. What netds and gateways hold lives as long as their process, so sockets are closed here."""
    made: list[socket.socket] = []
    real = socket.socket

    class Tracked(real):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **more: Any) -> None:
            super().__init__(*arguments, **more)
            made.append(self)

    handlers = [signal.getsignal(number) for number in _SIGNALS]
    socket.socket = Tracked  # type: ignore[misc]
    loop = Loop()
    try:
        yield loop
    finally:
        socket.socket = real  # type: ignore[misc]
        signal.set_wakeup_fd(-1)
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        for held in made:
            held.close()


def setup(ip: str, host_ip: str, host_ports: list[HostPort] | None = None) -> Setup:
    return Setup(
        addresses.number(ip),
        addresses.network("10.244.0.0/16"),
        addresses.network("10.96.0.0/16"),
        KEY,
        "batch",
        addresses.number(host_ip),
        host_ports or [],
    )


@dataclass
class Place:
    """A netd or gateway without programs."""

    loop: Loop
    setup: Setup
    tables: Tables = field(init=False)
    overlay: Overlay = field(init=False)
    dialler: Dialler = field(init=False)

    def __post_init__(self) -> None:
        self.tables = Tables(self.setup)
        self.overlay = Overlay(
            self.loop, self.setup, self.tables, overlay_datagrams.open_socket(self.setup.host_ip)
        )
        self.dialler = Dialler(self.loop, self.setup, self.tables, self.overlay)
        self.overlay.on_whois = self.dialler.recall

    @property
    def ip(self) -> str:
        return addresses.text(self.setup.ip)

    def knows(self, other: Place, listeners: dict[str, int] | None = None) -> None:
        where = [addresses.text(other.setup.host_ip), other.overlay.port, listeners or {}]
        self.tables.apply({"pods": {other.ip: where}})

    def accept(self, port: int) -> tuple[Accepting, list[tuple[socket.socket, Announcement]]]:
        came: list[tuple[socket.socket, Announcement]] = []
        made = Accepting(
            self.loop,
            self.setup,
            self.overlay,
            port,
            0,
            lambda connection, who: came.append((connection, who)),
        )
        self.overlay.on_ask = lambda _ip, asked: made.host_port if asked == port else None
        self.overlay.on_announced = made.announced
        return made, came


def place(loop: Loop, ip: str, host_ip: str, **more: Any) -> Place:
    return Place(loop, setup(ip, host_ip, **more))


def turn(loop: Loop, done: Callable[[], Any], timeout_s: float = 2.0) -> None:
    """Turn the loop until done(); other threads may bring it about, so it is asked often."""
    deadline_s = time.monotonic() + timeout_s
    while not loop.run_until(lambda: bool(done()), 0.01):
        assert time.monotonic() < deadline_s, "not in time"
