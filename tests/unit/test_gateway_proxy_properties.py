"""What a client says to the proxy: any bytes end in a request that may be passed on, a refusal, or a wait for more."""

from __future__ import annotations

import ipaddress
import re
import struct

from hypothesis import example, given
from hypothesis import strategies as st

from slurmlet.gateway.destinations import Refusal
from slurmlet.gateway.proxy_requests import Reader, Request, Unusable
from tests.unit.strategies import cut, splits

HOSTS = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", fullmatch=True)
PORTS = st.integers(1, 65535)


def read(pieces: list[bytes]) -> tuple[Request | None, bytes]:
    """The request, and what followed it; what was sent before the request came is the reader's."""
    reader = Reader()
    for number, piece in enumerate(pieces):
        if (request := reader.feed(piece)) is not None:
            return request, b"".join(pieces[number + 1 :])
    return None, b""


def check(request: Request) -> None:
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,253}|[0-9A-Fa-f:.]{2,45}", request.host)
    assert 0 < request.port < 65536
    assert isinstance(request.refused(Refusal(403, "no")), bytes)
    if request.accepted == b"":
        # Plain HTTP: its server reads one line where the client wrote one.
        assert not re.search(rb"[\x00-\x1f\x7f]", request.first.partition(b"\r\n")[0])


def fed(said: bytes, at: list[float]) -> None:
    try:
        request, _ = read(cut(said, at))
    except Unusable:
        return
    if request is not None:
        check(request)


@given(st.binary(max_size=300), splits())
def test_any_bytes_end_in_a_request_a_refusal_or_a_wait(said: bytes, at: list[float]) -> None:
    fed(said, at)


@given(st.binary(max_size=40), st.binary(max_size=60), splits())
def test_any_socks_greeting_and_request(methods: bytes, request: bytes, at: list[float]) -> None:
    fed(b"\x05" + bytes((len(methods),)) + methods + request, at)
    fed(b"\x05\x01\x00\x05" + request, at)


@given(
    st.sampled_from(("CONNECT", "GET", "POST")),
    st.text(st.characters(max_codepoint=255, exclude_characters=" \r\n"), max_size=40),
    st.sampled_from(("", "http://", "http://[", "http://a:")),
    splits(),
)
@example("CONNECT", "host:²", "", [])
@example("CONNECT", "host:" + "9" * 5000, "", [])
@example("GET", "a\tb/path", "http://", [])
@example("GET", "a/b\x0bc", "http://", [])
def test_any_http_target(method: str, target: str, scheme: str, at: list[float]) -> None:
    fed(f"{method} {scheme}{target} HTTP/1.1\r\n\r\n".encode("latin-1"), at)


@given(HOSTS, PORTS, st.binary(max_size=50), splits())
def test_connect_says_where_to_and_loses_nothing(host: str, port: int, rest: bytes, at: list[float]) -> None:
    said = f"CONNECT {host}:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode() + rest
    request, later = read(cut(said, at))
    assert request is not None
    assert (request.host, request.port, request.first + later) == (host, port, rest)


@given(HOSTS | st.ip_addresses().map(str), PORTS, st.binary(max_size=50), splits())
def test_socks_says_where_to_and_loses_nothing(host: str, port: int, rest: bytes, at: list[float]) -> None:
    try:
        address = ipaddress.ip_address(host)
        spelled = bytes((1 if address.version == 4 else 4,)) + address.packed
    except ValueError:
        spelled = bytes((3, len(host))) + host.encode()
    said = b"\x05\x01\x00" + b"\x05\x01\x00" + spelled + struct.pack(">H", port) + rest
    request, later = read(cut(said, at))
    assert request is not None
    assert (request.port, request.first + later) == (port, rest)
    if spelled[0] == 3:
        assert request.host == host
    else:
        assert ipaddress.ip_address(request.host) == ipaddress.ip_address(host)


@given(
    HOSTS, st.none() | PORTS, st.from_regex(r"(/[a-z0-9%.]{0,8}){0,3}(\?[a-z=&]{0,8})?", fullmatch=True),
    st.lists(st.sampled_from(("Accept: */*", "Proxy-Connection: close", "Connection: keep-alive", "X-A: b")), max_size=4),
    st.binary(max_size=50), splits(),
)  # fmt: skip
def test_a_plain_request_goes_to_its_server_as_to_an_origin(
    host: str, port: int | None, path: str, headers: list[str], body: bytes, at: list[float]
) -> None:
    where = host if port is None else f"{host}:{port}"
    head = "\r\n".join([f"GET http://{where}{path} HTTP/1.1", *headers, "", ""])
    request, later = read(cut(head.encode() + body, at))
    assert request is not None
    assert (request.host, request.port) == (host, port or 80)
    lines, _, rest = request.first.partition(b"\r\n\r\n")
    assert rest + later == body
    first, *passed = lines.decode().split("\r\n")
    assert first == f"GET {path if path.startswith('/') else '/' + path} HTTP/1.1"
    assert passed.count("Connection: close") == 1
    assert not any(line.lower().startswith(("proxy-", "connection: keep")) for line in passed)
