"""A hub's port with nobody behind it: a test takes the calls of a real process one by one and says what is said."""

from __future__ import annotations

import json
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from slurmlet.protocol import wire

# Nobody waits that long for anything: it only keeps a test that has failed from hanging.
_WAIT_S = 60.0
_LEAVES = [
    Leaf("server", "hub-ca", "hub", server=True, dns=("hub.slurmlet",)),
    Leaf("client", "hub-ca", "slurmlet:pod:x", client=True),
]


class Call:
    """One connection, from the hub's side."""

    def __init__(self, secured: ssl.SSLSocket) -> None:
        self._secured = secured
        self._decoder = wire.Decoder()
        self._waiting: list[Any] = []

    def hear(self, type_: str) -> Any:
        """The next message of a type; what comes before it is passed over."""
        while True:
            while self._waiting:
                message = self._waiting.pop(0)
                if message["type"] == type_:
                    return message
            received = self._secured.recv(1 << 16)
            assert received, f"the connection ended before a {type_}"
            frames = self._decoder.feed(received)
            self._waiting += [wire.parse(frame.payload) for frame in frames if frame.kind == wire.CONTROL]

    def say(self, **message: Any) -> None:
        self._secured.sendall(wire.control(message))

    def close(self) -> None:
        self._secured.close()


class HubPort:
    def __init__(self, cluster: Path) -> None:
        self._keys = cluster / "pki"
        pki.ensure(self._keys, _LEAVES)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self._keys / "server.crt", self._keys / "server.key")
        self._context.load_verify_locations(self._keys / "hub-ca.crt")
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_WAIT_S)
        self._calls: list[Call] = []
        hub = {
            "addresses": ["127.0.0.1"], "runner_port": self._listener.getsockname()[1], "server_name": "hub.slurmlet",
        }  # fmt: skip
        (cluster / "hub.json").write_text(json.dumps(hub))

    def credential(self, directory: Path) -> None:
        """As the hub lays it into the directory of a pod or a node."""
        both = [(self._keys / f"client{end}").read_bytes() for end in (".crt", ".key")]
        (directory / "runner.pem").write_bytes(b"".join(both))
        (directory / "hub-ca.pem").write_bytes((self._keys / "hub-ca.crt").read_bytes())

    def take(self) -> Call:
        plain, _ = self._listener.accept()
        plain.settimeout(_WAIT_S)
        call = Call(self._context.wrap_socket(plain, server_side=True))
        self._calls.append(call)
        return call

    def close(self) -> None:
        for call in self._calls:
            call.close()
        self._listener.close()


@contextmanager
def hub_port(cluster: Path) -> Iterator[HubPort]:
    made = HubPort(cluster)
    try:
        yield made
    finally:
        made.close()
