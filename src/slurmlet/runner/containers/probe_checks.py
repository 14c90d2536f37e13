"""One look at a server: HTTP, TCP or gRPC health. Blocking: runs in a fork (`actions.py`), so it may take its time.

Raw sockets on purpose: http.client and friends would cost 20 ms of imports in every fork.
"""

from __future__ import annotations

import socket
import ssl
import struct
from typing import TYPE_CHECKING, Any, Callable, List, Tuple

if TYPE_CHECKING:
    from slurmlet.protocol.pod_plan import HttpAction, NetworkAction

_MAX_REDIRECTS = 10
USER_AGENT = "kube-probe/1.36"

# (succeeded, what to tell)
Outcome = Tuple[bool, str]
# (host, port, timeout_s): `Network.connect`
Connect = Callable[[str, int, float], socket.socket]


def check(action: NetworkAction, address: str, timeout_s: float, connect: Connect) -> Outcome:
    host = address if action["kind"] == "grpc" else action["host"] or address
    try:
        if action["kind"] == "http":
            return _http(action, host, timeout_s, connect)
        if action["kind"] == "tcp":
            with connect(host, action["port"], timeout_s):
                return True, ""
        return _grpc(host, action["port"], action["service"], timeout_s, connect)
    except OSError as error:
        return False, f"dial tcp {host}:{action['port']}: {error}"


def _http(action: HttpAction, host: str, timeout_s: float, connect: Connect) -> Outcome:
    path, port, scheme = str(action["path"]), int(action["port"]), str(action["scheme"])
    for _ in range(_MAX_REDIRECTS):
        with connect(host, port, timeout_s) as plain:
            status, location = _get(plain, scheme, f"{host}:{port}", path, action["headers"])
        if not (300 <= status < 400 and location):
            break
        target = _local_path(location, host, port)
        if target is None:
            # As the kubelet: a redirect elsewhere is not followed, and counts as success.
            return True, ""
        path = target
    if 200 <= status < 400:
        return True, ""
    return False, f"HTTP probe failed with statuscode: {status}"


def _get(
    plain: socket.socket, scheme: str, server: str, path: str, headers: List[List[str]]
) -> Tuple[int, str]:
    given = {name.lower(): value for name, value in headers}
    lines = [f"GET {path if path.startswith('/') else '/' + path} HTTP/1.1"]
    lines.append(f"Host: {given.pop('host', server)}")
    for name, value in (("User-Agent", USER_AGENT), ("Accept", "*/*")):
        if given.get(name.lower()) is None:
            lines.append(f"{name}: {value}")
    lines += [f"{name}: {value}" for name, value in headers if name.lower() != "host"]
    lines += ["Connection: close", "", ""]
    host = server.rpartition(":")[0]
    connection: Any = _unverified().wrap_socket(plain, server_hostname=host) if scheme == "https" else plain
    connection.sendall("\r\n".join(lines).encode("utf-8", "surrogateescape"))
    return _read_answer(connection)


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # A probe asks whether somebody answers, not who: the kubelet does not verify either.
    context.verify_mode = ssl.CERT_NONE
    return context


def _read_answer(connection: Any) -> Tuple[int, str]:
    received = b""
    while b"\r\n\r\n" not in received and len(received) < 64 << 10:
        piece = connection.recv(8192)
        if not piece:
            break
        received += piece
    head, _, _ = received.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    words = lines[0].split()
    if len(words) < 2 or not words[0].startswith("HTTP/") or not words[1].isdigit():
        raise OSError("malformed HTTP response")
    location = next(
        (line.partition(":")[2].strip() for line in lines if line.lower().startswith("location:")), ""
    )
    return int(words[1]), location


def _local_path(location: str, host: str, port: int) -> Any:
    """The path of a redirect to the same server; None for another one."""
    if location.startswith("/"):
        return location
    for prefix in (f"http://{host}:{port}", f"https://{host}:{port}", f"http://{host}", f"https://{host}"):
        rest = location[len(prefix) :]
        if location.startswith(prefix) and (not rest or rest[0] in "/?"):
            return rest or "/"
    return None


# gRPC health checking: one HTTP/2 request, written by hand. Headers are sent as plain literals and answers' headers are
# not decoded: the health status is in the message, and a server without the service sends none.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY = 0, 1, 3, 4, 6, 7
_SERVING = 1


def _grpc(host: str, port: int, service: str, timeout_s: float, connect: Connect) -> Outcome:
    with connect(host, port, timeout_s) as connection:
        connection.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, b"") + _request(f"{host}:{port}", service))
        message = _grpc_message(connection)
    if message is None:
        return False, "error: this server does not implement the grpc health protocol (grpc.health.v1.Health)"
    status = _health_status(message)
    if status == _SERVING:
        return True, ""
    return False, f'service unhealthy (responded with "{_health_name(status)}")'


def _request(authority: str, service: str) -> bytes:
    headers = [
        (":method", "POST"), (":scheme", "http"), (":path", "/grpc.health.v1.Health/Check"), (":authority", authority),
        ("content-type", "application/grpc"), ("te", "trailers"), ("user-agent", USER_AGENT),
    ]  # fmt: skip
    block = b"".join(b"\x00" + _literal(name) + _literal(value) for name, value in headers)
    name = service.encode()
    body = b"\x0a" + bytes([len(name)]) + name if name else b""
    message = struct.pack("!BI", 0, len(body)) + body
    return _frame(_HEADERS, 0x4, 1, block) + _frame(_DATA, 0x1, 1, message)


def _literal(text: str) -> bytes:
    raw = text.encode()
    return (bytes([len(raw)]) if len(raw) < 127 else bytes([127, len(raw) - 127])) + raw


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack("!I", len(payload))[1:] + struct.pack("!BBI", kind, flags, stream) + payload


def _grpc_message(connection: socket.socket) -> Any:
    """The body of the answer, None when there is none."""
    body = b""
    while True:
        head = _exactly(connection, 9)
        length, kind, flags, stream = (
            int.from_bytes(head[:3], "big"),
            head[3],
            head[4],
            int.from_bytes(head[5:9], "big"),
        )
        payload = _exactly(connection, length)
        if kind == _SETTINGS and not flags & 1:
            connection.sendall(_frame(_SETTINGS, 1, 0, b""))
        elif kind == _PING and not flags & 1:
            connection.sendall(_frame(_PING, 1, 0, payload))
        elif kind == _DATA and stream == 1:
            body += payload
            if len(body) >= 5 and len(body) >= 5 + int.from_bytes(body[1:5], "big"):
                return body[5:]
        if kind in (_RST, _GOAWAY) or (kind in (_DATA, _HEADERS) and stream == 1 and flags & 1):
            return None


def _exactly(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise OSError("connection closed")
        received += piece
    return received


def _health_status(message: bytes) -> int:
    # HealthCheckResponse has one field: 1, a varint.
    return message[1] if len(message) >= 2 and message[0] == 0x08 else 0


def _health_name(status: int) -> str:
    return {0: "UNKNOWN", 2: "NOT_SERVING", 3: "SERVICE_UNKNOWN"}.get(status, str(status))
