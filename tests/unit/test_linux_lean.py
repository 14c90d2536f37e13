"""The runner's own cuts of the standard library mean the same as the originals, and do not load them."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import typing
from pathlib import Path

import pytest

from slurmlet.controlplane import pki
from slurmlet.controlplane.pki import Leaf
from slurmlet.linux.lean import json as lean_json
from slurmlet.linux.lean import socket as lean_socket
from slurmlet.linux.lean import tls
from slurmlet.linux.lean import typing as lean_typing

# What a runner loads until its first container runs, and what made that slow.
ON_THE_WAY = """
import sys
sys.path.insert(0, sys.argv[1])
import slurmlet.entrypoint.job_step, slurmlet.entrypoint.main, slurmlet.runner.pod.claim, slurmlet.runner.pod.sandbox
import slurmlet.runner.pod.pod_runner, slurmlet.runner.pod.network_attachment
for name in slurmlet.runner.pod.pod_runner._AHEAD:
    __import__("slurmlet.runner." + name)
print(*sorted(sys.modules))
"""
SLOW = {
    "typing",
    "enum",
    "re",
    "json",
    "socket",
    "ssl",
    "signal",
    "collections",
    "functools",
    "selectors",
    "subprocess",
}


def test_a_runner_loads_none_of_the_slow_ones_before_a_container_runs() -> None:
    source = Path(lean_json.__file__).parents[3]
    argv = [sys.executable, "-IS", "-c", ON_THE_WAY, str(source)]
    loaded = set(subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split())
    assert "slurmlet.runner.containers.container" in loaded
    assert loaded & SLOW == set()


class TestJson:
    @pytest.mark.parametrize(
        "value",
        [
            {},
            [],
            "",
            None,
            True,
            0,
            -1.5e300,
            {"a": [1, {"b": None}], 'ü\n"\\': "\u2028😀"},
            [["x"] * 100] * 100,
        ],
    )
    def test_the_same_comes_back(self, value: object) -> None:
        assert lean_json.loads(lean_json.dumps(value)) == value
        assert lean_json.dumps(value) == json.dumps(value, separators=(",", ":"))
        assert lean_json.loads(json.dumps(value, indent=2).encode() + b"\n") == value

    @pytest.mark.parametrize(
        "text", ["", " ", "{", "[1,]", "{} {}", '"', "nul", "'a'", "NaN", "[Infinity]", b"\xff"]
    )
    def test_what_is_no_json_is_a_value_error(self, text: str | bytes) -> None:
        with pytest.raises(ValueError, match=r".+"):
            lean_json.loads(text)

    def test_what_json_cannot_tell_is_refused(self) -> None:
        for value in (b"bytes", {1, 2}, {"a": object()}):
            with pytest.raises(TypeError):
                lean_json.dumps(value)

    def test_what_holds_itself_is_refused_and_forgotten(self) -> None:
        ring: list[object] = []
        ring.append(ring)
        with pytest.raises((RecursionError, ValueError)):
            lean_json.dumps(ring)
        ring[:] = [1]
        assert lean_json.dumps(ring) == "[1]"


class Lean(lean_typing.NamedTuple):
    one: int
    two: str = "2"
    three: tuple[int, ...] = ()

    @property
    def both(self) -> str:
        return f"{self.one}{self.two}"


class Leaner(Lean):
    """Of another kind, with the same places."""


class Original(typing.NamedTuple):
    one: int
    two: str = "2"
    three: tuple[int, ...] = ()


class TestNamedTuples:
    @pytest.mark.parametrize("kind", [Lean, Leaner])
    def test_they_are_what_python_makes(self, kind: type[Lean]) -> None:
        for arguments, named in [
            ((1,), {}),
            ((1, "a", (3,)), {}),
            ((), {"two": "b", "one": 5}),
            ((7,), {"three": (1,)}),
        ]:
            made, original = kind(*arguments, **named), Original(*arguments, **named)  # type: ignore[arg-type]
            assert tuple(made) == tuple(original)
            assert hash(made) == hash(original)
            assert (made.one, made.two, made.three) == (original.one, original.two, original.three)
            assert made._replace(two="z")._asdict() == original._replace(two="z")._asdict()
            assert repr(made) == repr(original).replace("Original", kind.__name__)
            assert kind._make(made) == made
            assert isinstance(made._replace(one=2), kind)
        assert kind._fields == Original._fields
        assert kind(1).both == "12"

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [((), {}), ((1, "2", (), 4), {}), ((1,), {"one": 1}), ((1,), {"four": 4}), ((), {"two": ""})],
    )
    def test_a_wrong_call_is_a_type_error(
        self, arguments: tuple[typing.Any, ...], named: dict[str, typing.Any]
    ) -> None:
        for kind in (Original, Lean):
            with pytest.raises(TypeError):
                kind(*arguments, **named)

    def test_a_field_that_is_not_there_cannot_be_replaced(self) -> None:
        with pytest.raises(ValueError, match="four"):
            Lean(1)._replace(two="", four=4)  # type: ignore[call-arg]

    def test_nobody_writes_into_them(self) -> None:
        made = Lean(1)
        for name in ("one", "four"):
            with pytest.raises(AttributeError):
                setattr(made, name, 2)


class TestSockets:
    def test_descriptors_travel(self, tmp_path: Path) -> None:
        one, other = lean_socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with one, other, (tmp_path / "file").open("w") as file:
            lean_socket.send_fds(one, [b"a", b"b"], [file.fileno(), one.fileno()])
            said, fds, _, _ = lean_socket.recv_fds(other, 16, 2)
            assert (said, len(fds)) == (b"ab", 2)
            os.write(fds[0], b"by another name")
            for fd in fds:
                os.close(fd)
        assert (tmp_path / "file").read_text() == "by another name"
        assert one.fileno() == other.fileno() == -1

    def test_who_comes_is_one_of_ours(self) -> None:
        with lean_socket.socket() as door:
            door.bind(("127.0.0.1", 0))
            door.listen()
            with socket.create_connection(door.getsockname()) as client:
                came, name = door.accept()
                with came:
                    assert isinstance(came, lean_socket.socket)
                    assert name == client.getsockname()
                    client.send(b"hello")
                    assert came.recv(9) == b"hello"


@pytest.fixture
def hub(tmp_path: Path) -> typing.Iterator[tuple[Path, tuple[str, int]]]:
    """A TLS server for "hub.slurmlet" that asks for certificates and sends everything back; its files, its address."""
    keys = tmp_path / "keys"
    leaves = [
        Leaf("server", "hub-ca", "hub", server=True, dns=("hub.slurmlet",)),
        Leaf("client", "hub-ca", "pod", client=True),
    ]
    pki.ensure(keys, leaves)
    pki.ensure(tmp_path / "others", leaves)
    for name in ("server", "client"):
        (tmp_path / f"{name}.pem").write_bytes(
            (keys / f"{name}.crt").read_bytes() + (keys / f"{name}.key").read_bytes()
        )
    (tmp_path / "ca.pem").write_bytes((keys / "hub-ca.crt").read_bytes())
    (tmp_path / "other-ca.pem").write_bytes((tmp_path / "others" / "hub-ca.crt").read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem")
    context.load_verify_locations(tmp_path / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    with socket.create_server(("127.0.0.1", 0)) as door:

        def serve() -> None:
            while True:
                try:
                    plain, _ = door.accept()
                except OSError:
                    return
                with plain:
                    try:
                        with context.wrap_socket(plain, server_side=True) as secured:
                            while piece := secured.recv(1 << 16):
                                secured.sendall(piece)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        yield tmp_path, door.getsockname()
        door.shutdown(socket.SHUT_RDWR)
        thread.join()


def dial(address: tuple[str, int]) -> lean_socket.socket:
    plain = lean_socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    plain.connect(address)
    return plain


class TestTls:
    def test_what_is_written_comes_back_and_an_end_is_told(self, hub: tuple[Path, tuple[str, int]]) -> None:
        files, address = hub
        client = tls.Client(
            dial(address), "hub.slurmlet", str(files / "ca.pem"), str(files / "client.pem"), None
        )
        client.shake_hands()
        assert client.own_address() == "127.0.0.1"
        assert client.write(b"x" * 1000) == 1000
        assert client.read(600) == b"x" * 600
        assert client.pending() == 400
        assert client.read(600) == b"x" * 400
        client.close()
        assert client.fileno() == -1

    @pytest.mark.parametrize(
        ("name", "authority"), [("another.slurmlet", "ca.pem"), ("hub.slurmlet", "other-ca.pem")]
    )
    def test_a_server_that_cannot_prove_itself_is_not_spoken_to(
        self, hub: tuple[Path, tuple[str, int]], name: str, authority: str
    ) -> None:
        files, address = hub
        client = tls.Client(dial(address), name, str(files / authority), str(files / "client.pem"), None)
        with pytest.raises(ssl.SSLCertVerificationError):
            client.shake_hands()
        client.close()

    def test_one_that_does_not_block_says_what_it_waits_for(self, hub: tuple[Path, tuple[str, int]]) -> None:
        files, address = hub
        plain = dial(address)
        plain.setblocking(False)
        client = tls.Client(plain, "hub.slurmlet", str(files / "ca.pem"), str(files / "client.pem"), None)
        with pytest.raises(tls.WantRead):
            client.shake_hands()
        client.close()

    def test_files_that_are_not_there_are_os_errors(self, tmp_path: Path) -> None:
        one, other = lean_socket.socketpair()
        with one, other, pytest.raises(OSError, match="No such file"):
            tls.Client(one, "hub.slurmlet", str(tmp_path / "ca.pem"), str(tmp_path / "client.pem"), None)
