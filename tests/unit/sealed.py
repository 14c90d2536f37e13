"""What tests of encryption between hosts share: certificates as `up` makes them, and sealed connections over loopback."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from slurmlet.controlplane import pki
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet.encryption import tls_contexts
from slurmlet.podnet.encryption.sealer import Sealer
from slurmlet.podnet.encryption.tls_connection import Sealed
from slurmlet.podnet.encryption.tls_contexts import Contexts
from slurmlet.podnet.netd_setup import Tls
from tests.unit.overlaying import turn

Ended = list[tuple[socket.socket | None, int]]


def make_tls(root: Path) -> Tls:
    """Of a cluster of its own."""
    pki.ensure(root, pki.leaves("login1", ["192.0.2.1"], "10.96.0.0/16", encrypt=True))
    return Tls(*((root / name).read_text() for name in ("overlay-ca.crt", "netd.crt", "netd.key")))


def make_contexts(tls: Tls) -> Contexts:
    with tempfile.TemporaryDirectory() as directory:
        made = tls_contexts.make(tls, directory)
        assert not list(Path(directory).iterdir()), "the key stayed behind"
    return made


class TrackedSealer(Sealer):
    """Closes in the end what a test has left open."""

    def __init__(self, loop: Loop, tls: Tls) -> None:
        super().__init__(loop, make_contexts(tls))
        self.made: list[Sealed] = []

    def bare(self, raw: socket.socket, server: bool, done: Callable[[bool], None]) -> Sealed:
        self.made.append(super().bare(raw, server, done))
        return self.made[-1]

    def close(self) -> None:
        for each in self.made:
            each.close()


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
    for end in (client, server):
        end.setblocking(False)
    return client, server


def accepted(server: Sealer, told: Ended, plain: socket.socket | None, code: int) -> None:
    told.append((plain, code))
    if plain is not None:
        server.opened(plain)


def seal(loop: Loop, client: Sealer, server: Sealer) -> tuple[Ended, Ended]:
    """What both sides were told when the handshake was over."""
    told: tuple[Ended, Ended] = ([], [])
    raw = tcp_pair()
    client.client(raw[0], lambda *what: told[0].append(what))
    server.server(raw[1], lambda *what: accepted(server, told[1], *what))
    turn(loop, lambda: all(told))
    return told


def sealed_pair(loop: Loop, sealer: Sealer) -> tuple[socket.socket, socket.socket]:
    (left, _), (right, _) = (told[0] for told in seal(loop, sealer, sealer))
    assert left is not None
    assert right is not None
    return left, right
