"""Can a compute node reach this host? A port that listens for the moment of the check and knows one word.

Open to the whole network for a second or two, so it answers nobody who does not know the one-time token, and tells
those who do nothing but a second one.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from slurmlet.base.host_addresses import dialled_addresses

_PEER_TIMEOUT_S = 2.0
_POLL_S = 0.2


@dataclass(frozen=True)
class Beacon:
    """What the probe has to know to call us."""

    addresses: tuple[str, ...]
    port: int
    token: str
    answer: str


@contextmanager
def beacon() -> Iterator[Beacon]:
    """Listen on a random port until the block is left."""
    with socket.create_server(("", 0)) as server:
        server.settimeout(_POLL_S)
        told = Beacon(
            tuple(dialled_addresses()), server.getsockname()[1], secrets.token_hex(16), secrets.token_hex(16)
        )
        stop = threading.Event()
        thread = threading.Thread(target=_serve, args=(server, told, stop), name="beacon", daemon=True)
        thread.start()
        try:
            yield told
        finally:
            stop.set()
            thread.join()


def _serve(server: socket.socket, told: Beacon, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            peer, _ = server.accept()
        except TimeoutError:
            continue
        with peer:
            peer.settimeout(_PEER_TIMEOUT_S)
            try:
                if hmac.compare_digest(_read(peer, len(told.token)), told.token.encode()):
                    peer.sendall(told.answer.encode())
            except OSError:
                # A scanner that connects and says nothing is no concern of ours.
                continue


def _read(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count and (more := peer.recv(count - len(data))):
        data += more
    return data
