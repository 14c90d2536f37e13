"""The runner's connection to the hub: whom it believes, what it does about a hub that cannot be believed."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from slurmlet.linux.event_loop import Loop
from slurmlet.protocol import wire
from slurmlet.runner.link.hub_link import Link
from tests.unit.overlaying import making_loop, turn


@dataclass
class Access:
    """As a pod's directory tells it."""

    files: Path
    address: tuple[str, int]
    authority: str = "ca.pem"
    credential: str = "client.pem"
    name: str = "hub.slurmlet"

    @property
    def hub_ca(self) -> str:
        return str(self.files / self.authority)

    @property
    def chain(self) -> tuple[str, str | None]:
        return str(self.files / self.credential), None

    def hub(self) -> dict[str, Any]:
        return {"addresses": [self.address[0]], "runner_port": self.address[1], "server_name": self.name}


@dataclass
class Dialled:
    """A link, and what it told of itself."""

    link: Link = field(init=False)
    addresses: list[str] = field(default_factory=list)
    frames: list[wire.Frame] = field(default_factory=list)
    losses: int = 0

    def lost(self) -> None:
        self.losses += 1


def dial(loop: Loop, access: Access) -> Dialled:
    made = Dialled()
    made.link = Link(loop, access, made.addresses.append, made.frames.append, made.lost)
    made.link.start()
    return made


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Access]:
    """A TLS server that asks for certificates, sends everything back, and closes after a "close"."""
    leaves = [
        Leaf("server", "hub-ca", "hub", server=True, dns=("hub.slurmlet",)),
        Leaf("client", "hub-ca", "pod", client=True),
    ]
    for directory, prefix in ((tmp_path / "keys", ""), (tmp_path / "others", "other-")):
        pki.ensure(directory, leaves)
        for name in ("server", "client"):
            both = (directory / f"{name}.crt").read_bytes() + (directory / f"{name}.key").read_bytes()
            (tmp_path / f"{prefix}{name}.pem").write_bytes(both)
        (tmp_path / f"{prefix}ca.pem").write_bytes((directory / "hub-ca.crt").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def echo(plain: socket.socket) -> None:
            with context.wrap_socket(plain, server_side=True) as secured:
                while piece := secured.recv(1 << 16):
                    secured.sendall(piece)
                    if b'"close"' in piece:
                        return

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                with plain:
                    try:
                        echo(plain)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield Access(tmp_path, listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def test_what_is_sent_arrives_whole(hub: Access) -> None:
    with making_loop() as loop:
        dialled = dial(loop, hub)
        turn(loop, lambda: dialled.link.up)
        assert dialled.addresses == ["127.0.0.1"]
        # More than a record of TLS, a buffer of the kernel's or a piece of ours.
        large = wire.data(7, wire.STDOUT, bytes(range(256)) * 3000)
        dialled.link.send(large)
        turn(loop, lambda: dialled.frames, 5)
        assert [wire.pack(*frame) for frame in dialled.frames] == [large]
        assert dialled.link.flushed()
        dialled.link.close()


def test_a_hub_that_closes_is_dialled_again(hub: Access) -> None:
    with making_loop() as loop:
        dialled = dial(loop, hub)
        turn(loop, lambda: dialled.link.up)
        dialled.link.send(wire.control("close"))
        turn(loop, lambda: dialled.losses == 1 and not dialled.link.up)
        assert [frame.kind for frame in dialled.frames] == [wire.CONTROL]
        turn(loop, lambda: dialled.link.up, 5)
        assert len(dialled.addresses) == 2
        dialled.link.close()


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"name": "another.slurmlet"}, "mismatch"),
        ({"authority": "other-ca.pem"}, "certificate verify failed"),
        ({"credential": "missing.pem"}, "No such file"),
    ],
)
def test_a_hub_that_cannot_prove_itself_is_not_spoken_to(
    hub: Access, wrong: dict[str, str], problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    access = Access(hub.files, hub.address, **wrong)
    said = ""
    with making_loop() as loop:
        dialled = dial(loop, access)

        def told() -> bool:
            nonlocal said
            said += capfd.readouterr().err
            return "trying again" in said

        turn(loop, told)
        assert problem in said
        assert not dialled.link.up
        assert (dialled.addresses, dialled.losses) == ([], 0)
        dialled.link.close()


def test_a_credential_of_another_authority_brings_no_answer(hub: Access) -> None:
    """With TLS 1.3 the client believes itself connected before the hub refuses it."""
    with making_loop() as loop:
        dialled = dial(loop, Access(hub.files, hub.address, credential="other-client.pem"))
        turn(loop, lambda: dialled.losses > 0)
        assert dialled.frames == []
        dialled.link.close()
