"""The server of `slurmlet proxy`: programs of one user on this host come in by SOCKS5 or HTTP, and leave by the gateway.

Loopback is everybody's on a shared host, so each connection is asked whose it is before a byte of it is read.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slurmlet.gateway.destinations import Refusal, literal
from slurmlet.gateway.dns_client import CLUSTER_DOMAIN
from slurmlet.gateway.http_connect import ONLY, SEARCH
from slurmlet.gateway.proxy_requests import Reader, Request, Unusable
from slurmlet.linux.event_loop import Loop, Timer
from slurmlet.podnet.ports.socket_owners import client_uid
from slurmlet.podnet.socket_relay import Relay, is_over, reset

LOOPBACK = "127.0.0.1"
_BACKLOG = 256
_PATIENCE_S = 30.0
_HEAD_BYTES = 16 << 10
# (namespace, name) → address of a pod, or "".
FindPod = Callable[[str, str], str]


@dataclass(frozen=True)
class Options:
    gateway_socket: Path
    namespace: str
    # Pods and Services only, or whatever this host reaches.
    only_cluster: bool
    find_pod: FindPod


class ProxyServer:
    def __init__(self, loop: Loop, listener: socket.socket, options: Options) -> None:
        self._loop, self._listener, self._options = loop, listener, options
        self.port = int(listener.getsockname()[1])
        loop.reading(listener.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            client, (host, port) = self._listener.accept()
        except OSError:
            return
        client.setblocking(False)
        owner = client_uid(host, port, self.port)
        # What a stranger sent and reset may still be read, and the port be ours by now.
        if owner != os.getuid() or is_over(client):
            print(f"refused a connection of uid {owner}", file=sys.stderr, flush=True)
            reset(client)
            return
        _Session(self._loop, client, self._options)


def listen(port: int) -> socket.socket:
    """Raises OSError."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((LOOPBACK, port))
        made.listen(_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


class _Session:
    """From the first byte to the relay."""

    def __init__(self, loop: Loop, client: socket.socket, options: Options) -> None:
        self._loop, self._client, self._options = loop, client, options
        self._reader = Reader()
        self._gateway: socket.socket | None = None
        self._timer: Timer = loop.later(_PATIENCE_S, self._close)
        loop.reading(client.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            received = self._client.recv(_HEAD_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close()
            return
        try:
            request = self._reader.feed(received)
        except Unusable as unusable:
            self._end_with(self._take_replies() + unusable.reply)
            return
        self._reply(self._take_replies())
        if request is not None:
            self._loop.reading(self._client.fileno(), None)
            self._connect(request, request.host, self._pod_names(request.host))

    def _take_replies(self) -> bytes:
        replies, self._reader.replies = self._reader.replies, b""
        return replies

    def _pod_names(self, host: str) -> tuple[str, str] | None:
        """(namespace, name) that `host` would be as a pod's name."""
        labels = host.removesuffix(f".{CLUSTER_DOMAIN}").split(".")
        if literal(host) is not None or (len(labels) == 3 and labels[2] != "pod") or len(labels) > 3:
            return None
        return (labels[1] if len(labels) > 1 else self._options.namespace), labels[0]

    # The gateway.

    def _connect(self, request: Request, host: str, pod: tuple[str, str] | None) -> None:
        self._gateway = gateway = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        gateway.setblocking(False)
        try:
            gateway.connect(str(self._options.gateway_socket))
            gateway.send(self._head(host, request.port))
        except OSError as error:
            self._refuse(request, Refusal(503, f"the cluster's gateway does not answer: {error.strerror}"))
            return
        said = bytearray()
        self._loop.reading(gateway.fileno(), lambda: self._answered(request, gateway, said, pod))

    def _head(self, host: str, port: int) -> bytes:
        namespace = self._options.namespace
        search = f"{namespace}.svc.{CLUSTER_DOMAIN} svc.{CLUSTER_DOMAIN} {CLUSTER_DOMAIN}"
        lines = [f"CONNECT {host}:{port} HTTP/1.1", f"{SEARCH}: {search}"]
        lines += [f"{ONLY}: cluster"] if self._options.only_cluster else []
        return "\r\n".join([*lines, "", ""]).encode("ascii")

    def _answered(
        self, request: Request, gateway: socket.socket, said: bytearray, pod: tuple[str, str] | None
    ) -> None:
        try:
            # Byte for byte would be slow, more than the head would be the server's: look first.
            seen = gateway.recv(_HEAD_BYTES, socket.MSG_PEEK)
            end = seen.find(b"\r\n\r\n")
            said += gateway.recv(end + 4 if end >= 0 else len(seen)) if seen else b""
        except BlockingIOError:
            return
        except OSError:
            seen, end = b"", -1
        if seen and end < 0:
            return
        self._loop.forget(gateway.fileno())
        status = said.split(b" ", 2)[1:2]
        if status == [b"200"]:
            self._begin(request, gateway)
            return
        gateway.close()
        self._not_reached(request, _refusal(bytes(said)), pod)

    def _not_reached(self, request: Request, refusal: Refusal, pod: tuple[str, str] | None) -> None:
        address = self._options.find_pod(*pod) if pod is not None and refusal.status == 404 else ""
        if address:
            self._connect(request, address, None)
        else:
            self._refuse(request, refusal)

    def _begin(self, request: Request, gateway: socket.socket) -> None:
        self._timer.cancel()
        self._reply(request.accepted)
        try:
            if request.first:
                gateway.send(request.first)
        except OSError:
            self._close()
            return
        self._gateway = None
        Relay(self._loop, self._client, gateway)

    # The end.

    def _refuse(self, request: Request, refusal: Refusal) -> None:
        print(f"{request.host}:{request.port}: {refusal.why}", file=sys.stderr, flush=True)
        self._end_with(request.refused(refusal))

    def _reply(self, reply: bytes) -> None:
        try:
            if reply:
                self._client.send(reply)
        except OSError:
            # The next read says so too.
            pass

    def _end_with(self, reply: bytes) -> None:
        self._reply(reply)
        self._close()

    def _close(self) -> None:
        self._timer.cancel()
        for held in (self._client, self._gateway):
            if held is not None and held.fileno() >= 0:
                self._loop.forget(held.fileno())
                held.close()


def _refusal(head: bytes) -> Refusal:
    """What the gateway's status line says."""
    words = head.partition(b"\r\n")[0].decode("latin-1").split(" ", 2)
    if len(words) < 3 or not words[1].isdigit():
        return Refusal(503, "the cluster's gateway closed the connection")
    return Refusal(int(words[1]), words[2].partition(": ")[2] or words[2])
