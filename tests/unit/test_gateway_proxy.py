"""The ways in for the API server and for people: CONNECT on a unix socket, and the proxy in front of it."""

from __future__ import annotations

import os
import socket
import stat
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.gateway import http_connect, proxy_server
from slurmlet.gateway.destinations import Destination, Reach, Refusal, candidates, literal
from slurmlet.gateway.http_connect import ConnectServer, parse
from slurmlet.gateway.proxy_requests import Reader, Unusable
from slurmlet.gateway.proxy_server import Options, ProxyServer
from slurmlet.linux.event_loop import Loop
from slurmlet.podnet import addresses
from tests.unit.overlaying import Place, making_loop, place, turn

NAMES = {"web.default.svc.cluster.local": ["10.96.0.5"], "out.example": ["127.0.0.3"]}


class Names:
    """In place of CoreDNS: a table."""

    def addresses(self, name: str, done: Callable[[list[int], bool], None]) -> None:
        done([addresses.number(ip) for ip in NAMES.get(name, [])], True)


@pytest.fixture
def loop() -> Iterator[Loop]:
    with making_loop() as made:
        yield made


@pytest.fixture
def pod(loop: Loop) -> Place:
    return place(loop, "10.244.0.7", "127.0.0.2")


@pytest.fixture
def socket_path(loop: Loop, pod: Place, tmp_path: Path) -> Path:
    """A gateway that knows one pod, which answers on port 80, and a Service of it."""
    gateway = place(loop, "10.244.0.1", "127.0.0.1")
    gateway.knows(pod)
    pod.knows(gateway)
    gateway.tables.apply({"services": {"10.96.0.5 tcp 8080": {"to": [["10.244.0.7", 80, "batch"]]}}})
    accepting, _ = pod.accept(80)

    def serve(connection: socket.socket, _who: Any) -> None:
        connection.setblocking(True)

        def work() -> None:
            with connection:
                asked = connection.recv(4096)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + asked)

        threading.Thread(target=work).start()

    accepting._came = serve
    reach = Reach(gateway.setup, gateway.tables, gateway.dialler, Names())  # type: ignore[arg-type]
    ConnectServer(loop, tmp_path / "gateway.sock", reach.reach)
    return tmp_path / "gateway.sock"


def talk(loop: Loop, made: socket.socket, *said: bytes) -> bytes:
    """Say one thing after the other, each once the last was answered; what came until the end."""
    came = bytearray()

    def work() -> None:
        made.settimeout(3)
        with made:
            try:
                for words in said:
                    made.sendall(words)
                    if words is not said[-1]:
                        came.extend(made.recv(4096))
                while data := made.recv(4096):
                    came.extend(data)
            except OSError as error:
                came.extend(type(error).__name__.encode())

    thread = threading.Thread(target=work)
    thread.start()
    turn(loop, lambda: not thread.is_alive(), 5)
    return bytes(came)


def connect(loop: Loop, path: Path, head: str, then: bytes = b"hello") -> bytes:
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(path))
    return talk(loop, made, f"CONNECT {head}\r\n\r\n".encode(), then)


class TestConnect:
    def test_the_socket_is_private(self, socket_path: Path) -> None:
        mode = socket_path.stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600

    def test_pods_services_and_names_are_reached(self, loop: Loop, socket_path: Path) -> None:
        for where in ("10.244.0.7:80", "10.96.0.5:8080", "web.default.svc.cluster.local:8080"):
            said = connect(loop, socket_path, f"{where} HTTP/1.1\r\nHost: 127.0.0.1")
            assert said.startswith(b"HTTP/1.1 200 ")
            assert said.endswith(b"\r\n\r\nhello")

    def test_short_names_need_a_search_list(self, loop: Loop, socket_path: Path) -> None:
        search = "slurmlet-search: default.svc.cluster.local svc.cluster.local"
        assert b"hello" in connect(loop, socket_path, f"web:8080 HTTP/1.1\r\n{search}")
        assert connect(loop, socket_path, "web:8080 HTTP/1.1").startswith(b"HTTP/1.1 404 ")

    def test_what_is_outside_is_for_the_api_server_only(self, loop: Loop, socket_path: Path) -> None:
        with socket.create_server(("127.0.0.3", 0)):
            asked = "192.0.2.1:80 HTTP/1.1\r\nslurmlet-only: cluster"
            assert connect(loop, socket_path, asked).startswith(b"HTTP/1.1 403 ")

    def test_never_to_the_hosts_own_loopback(self, loop: Loop, socket_path: Path) -> None:
        with socket.create_server(("127.0.0.3", 0)) as own:
            for host in ("127.0.0.3", "out.example"):
                said = connect(loop, socket_path, f"{host}:{own.getsockname()[1]} HTTP/1.1")
                assert said.startswith(b"HTTP/1.1 403 ")

    def test_nobody_there_is_a_bad_gateway_and_says_why(self, loop: Loop, socket_path: Path) -> None:
        assert b"Connection refused" in connect(loop, socket_path, "10.244.0.7:81 HTTP/1.1")
        assert b"no pod has this address" in connect(loop, socket_path, "10.244.0.99:80 HTTP/1.1")
        assert b"no ready endpoint" in connect(loop, socket_path, "10.96.0.5:1 HTTP/1.1")

    def test_another_user_is_turned_away(
        self, loop: Loop, socket_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(http_connect, "peer_uid", lambda _client: os.getuid() + 1)
        assert connect(loop, socket_path, "10.244.0.7:80 HTTP/1.1") in (
            b"",
            b"ConnectionResetError",
            b"BrokenPipeError",
        )

    @pytest.mark.parametrize(
        ("head", "status"),
        [
            (b"GET / HTTP/1.1", 405),
            (b"CONNECT nowhere HTTP/1.1", 400),
            (b"CONNECT a:70000 HTTP/1.1", 400),
            (b"\x05\x01\x00", 400),
        ],
    )
    def test_what_is_no_connect_is_refused(self, head: bytes, status: int) -> None:
        destination = parse(head)
        assert isinstance(destination, Refusal)
        assert destination.status == status

    def test_names_are_tried_as_a_pod_would(self) -> None:
        search = ("ns.svc.cluster.local", "svc.cluster.local")
        assert candidates(Destination("web", 1, search)) == [
            "web.ns.svc.cluster.local",
            "web.svc.cluster.local",
            "web",
        ]
        assert candidates(Destination("a.b.svc.cluster.local", 1, search)) == ["a.b.svc.cluster.local"]
        assert candidates(Destination("example.com.", 1, search)) == ["example.com"]
        assert literal("10.1") is None
        assert literal("10.0.0.1") == 0x0A000001


@pytest.fixture
def proxy(loop: Loop, socket_path: Path) -> ProxyServer:
    def find_pod(namespace: str, name: str) -> str:
        return "10.244.0.7" if (namespace, name) == ("default", "web-0") else ""

    return ProxyServer(loop, proxy_server.listen(0), Options(socket_path, "default", True, find_pod))


def through(loop: Loop, proxy: ProxyServer, *said: bytes) -> bytes:
    return talk(loop, socket.create_connection(("127.0.0.1", proxy.port)), *said)


def socks(host: str, port: int) -> bytes:
    return b"\x05\x01\x00\x03" + bytes([len(host)]) + host.encode() + port.to_bytes(2, "big")


class TestProxy:
    def test_socks_by_name_and_by_address(self, loop: Loop, proxy: ProxyServer) -> None:
        address = b"\x05\x01\x00\x01" + bytes([10, 244, 0, 7]) + (80).to_bytes(2, "big")
        for request in (socks("web", 8080), socks("web-0.default.pod", 80), socks("web-0", 80), address):
            said = through(loop, proxy, b"\x05\x02\x00\x02", request, b"hello")
            assert said.startswith(b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6))
            assert said.endswith(b"hello")

    def test_socks_without_waiting_for_answers(self, loop: Loop, proxy: ProxyServer) -> None:
        assert through(loop, proxy, b"\x05\x01\x00" + socks("web", 8080) + b"hello").endswith(b"hello")

    def test_http_connect(self, loop: Loop, proxy: ProxyServer) -> None:
        said = through(loop, proxy, b"CONNECT web.default:8080 HTTP/1.1\r\nHost: x\r\n\r\n", b"hello")
        assert said.startswith(b"HTTP/1.1 200 ")
        assert said.endswith(b"hello")

    def test_plain_http_reaches_the_server_as_it_expects_it(self, loop: Loop, proxy: ProxyServer) -> None:
        asked = (
            b"GET http://web:8080/a?b=c HTTP/1.1\r\nHost: web:8080\r\nProxy-Connection: keep-alive\r\n"
            b"Connection: keep-alive\r\n\r\n"
        )
        assert through(loop, proxy, asked).endswith(
            b"\r\n\r\nGET /a?b=c HTTP/1.1\r\nHost: web:8080\r\nConnection: close\r\n\r\n"
        )

    def test_what_is_outside_is_refused(self, loop: Loop, proxy: ProxyServer) -> None:
        assert through(loop, proxy, b"CONNECT 192.0.2.7:80 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 403 ")
        assert through(loop, proxy, b"\x05\x01\x00", socks("192.0.2.7", 80))[2:4] == b"\x05\x02"

    def test_a_stranger_on_this_host_is_reset(
        self, loop: Loop, proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(proxy_server, "client_uid", lambda *_where: os.getuid() + 1)
        assert through(loop, proxy, b"\x05\x01\x00", socks("web", 8080)) in (
            b"ConnectionResetError",
            b"BrokenPipeError",
        )

    def test_what_a_stranger_left_behind_is_not_asked_for(
        self, loop: Loop, proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Sent and reset, and the owner's next connection has the same port: /proc/net knows only that one."""
        begun: list[socket.socket] = []
        monkeypatch.setattr(proxy_server, "_Session", lambda _loop, client, _options: begun.append(client))
        port = 0
        for last in (False, True):
            made = socket.socket()
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind((proxy_server.LOOPBACK, port))
            made.connect((proxy_server.LOOPBACK, proxy.port))
            port = made.getsockname()[1]
            if not last:
                made.sendall(b"CONNECT web:8080 HTTP/1.1\r\n\r\n")
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                made.close()
        turn(loop, lambda: begun)
        loop.run_until(lambda: False, 0.05)
        (client,) = begun
        with pytest.raises(BlockingIOError):
            client.recv(1)
        made.close()

    def test_without_a_gateway_it_says_so(self, loop: Loop, proxy: ProxyServer, socket_path: Path) -> None:
        socket_path.unlink()
        assert through(loop, proxy, b"CONNECT web:8080 HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 503 ")

    @pytest.mark.parametrize(
        "said",
        [
            b"\x05\x01\x02",
            b"\x05\x01\x00" + b"\x05\x02\x00\x01" + bytes(6),
            b"\x05\x01\x00" + socks("a\r\nslurmlet-only: no", 80),
            b"GET / HTTP/1.1\r\n\r\n",
            b"CONNECT a\tb:80 HTTP/1.1\r\n\r\n",
            b"GET http://[::1 HTTP/1.1\r\n\r\n",
            b"nonsense\r\n\r\n",
        ],
    )
    def test_what_cannot_be_served_is_answered_and_ended(self, said: bytes) -> None:
        with pytest.raises(Unusable):
            Reader().feed(said)

    def test_a_request_in_pieces(self) -> None:
        reader = Reader()
        for byte in b"\x05\x01\x00" + socks("web", 8080)[:-1]:
            assert reader.feed(bytes([byte])) is None
        request = reader.feed(socks("web", 8080)[-1:])
        assert request is not None
        assert (request.host, request.port) == ("web", 8080)
