"""Looks at real servers on loopback: what a probe calls healthy."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from slurmlet.runner.containers import probe_checks
from slurmlet.runner.network.network_view import HostNetwork

HOST = "127.0.0.1"


def check(action: dict[str, object], timeout_s: float = 2) -> tuple[bool, str]:
    return probe_checks.check(action, HOST, timeout_s, HostNetwork({}, HOST).connect)


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A TCP server that hands each connection to `answer`."""
    listener = socket.create_server((HOST, 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(2)


def http(port: int, path: str = "/healthz", headers: list[list[str]] | None = None) -> dict[str, object]:
    return {
        "kind": "http",
        "scheme": "http",
        "host": "",
        "port": port,
        "path": path,
        "headers": headers or [],
    }


def responding(text: str, seen: list[str] | None = None) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        request = connection.recv(65536).decode()
        if seen is not None:
            seen.append(request)
        connection.sendall(text.encode())

    return answer


@pytest.mark.parametrize(
    ("status", "healthy"), [(200, True), (204, True), (399, True), (404, False), (500, False)]
)
def test_http_codes_from_200_to_399_are_healthy(status: int, healthy: bool) -> None:
    with server(responding(f"HTTP/1.1 {status} X\r\nContent-Length: 0\r\n\r\n")) as port:
        succeeded, told = check(http(port))
    assert succeeded is healthy
    assert healthy or told == f"HTTP probe failed with statuscode: {status}"


def test_http_sends_what_a_kubelet_sends() -> None:
    seen: list[str] = []
    with server(responding("HTTP/1.1 200 OK\r\n\r\n", seen)) as port:
        check(http(port, "/a?b=c", [["X-Mine", "yes"], ["Host", "example.org"]]))
    lines = seen[0].split("\r\n")
    assert lines[0] == "GET /a?b=c HTTP/1.1"
    assert {"Host: example.org", "X-Mine: yes", "User-Agent: kube-probe/1.36", "Accept: */*"} <= set(lines)


def test_http_follows_a_redirect_on_the_same_server_and_counts_one_elsewhere_as_healthy() -> None:
    def answer(connection: socket.socket) -> None:
        path = connection.recv(65536).decode().split()[1]
        target = {"/local": "/bad", "/far": "http://192.0.2.1/"}.get(path)
        head = f"HTTP/1.1 302 X\r\nLocation: {target}\r\n\r\n" if target else "HTTP/1.1 503 X\r\n\r\n"
        connection.sendall(head.encode())

    with server(answer) as port:
        assert check(http(port, "/local")) == (False, "HTTP probe failed with statuscode: 503")
        assert check(http(port, "/far")) == (True, "")


def test_tcp_needs_only_a_listener() -> None:
    with server(lambda connection: None) as port:
        assert check({"kind": "tcp", "host": "", "port": port}) == (True, "")
    succeeded, told = check({"kind": "tcp", "host": "", "port": port})
    assert not succeeded
    assert f"dial tcp {HOST}:{port}" in told


def test_a_silent_server_is_unhealthy_after_the_timeout() -> None:
    release = threading.Event()
    with server(lambda connection: release.wait(3) and None) as port:
        succeeded, told = check(http(port), 0.2)
        release.set()
    assert not succeeded
    assert "timed out" in told


def grpc_answering(message: bytes | None) -> Callable[[socket.socket], None]:
    """Speaks enough HTTP/2: settings, then headers, and data or only trailers."""

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload

    def answer(connection: socket.socket) -> None:
        received = b""
        while b"/grpc.health.v1.Health/Check" not in received:
            received += connection.recv(65536)
        head = frame(4, 0, 0, b"")
        if message is None:
            connection.sendall(head + frame(1, 0x5, 1, b"\x88"))
        else:
            body = struct.pack("!BI", 0, len(message)) + message
            connection.sendall(
                head + frame(1, 0x4, 1, b"\x88") + frame(0, 0, 1, body) + frame(1, 0x5, 1, b"")
            )
        connection.settimeout(1)
        try:
            connection.recv(65536)
        except OSError:
            pass

    return answer


@pytest.mark.parametrize(
    ("message", "healthy", "told"),
    [
        (b"\x08\x01", True, ""),
        (b"\x08\x02", False, "NOT_SERVING"),
        (b"", False, "UNKNOWN"),
        (None, False, "does not implement"),
    ],
)
def test_grpc_health_is_what_the_message_says(message: bytes | None, healthy: bool, told: str) -> None:
    with server(grpc_answering(message)) as port:
        succeeded, text = check({"kind": "grpc", "port": port, "service": "s"})
    assert succeeded is healthy
    assert told in text
