"""kubectl with one or the other of its streaming protocols, and clients that talk to what it forwards."""

from __future__ import annotations

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import Kubectl, eventually

WEBSOCKET, SPDY = "websocket", "spdy"

# Runs beside kubectl. Each port given gets a connection of its own, and all talk at once: each sends its bytes while it
# reads, closes its half, reads to the end. Prints a JSON list: [bytes, sha256] sent and received, or the error's name.
# With "meet", each has exchanged a byte with its server before any goes on: busybox's nc lets only two wait for it.
TALKER = """
import hashlib, json, os, socket, sys, threading
size, how, ports = int(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3:]]
results = ["NotConnected"] * len(ports)

def connect(port):
    connection = socket.create_connection(("127.0.0.1", port), 30)
    connection.settimeout(60)
    if how == "meet":
        connection.sendall(b"!")
        assert connection.recv(1) == b"!"
    return connection

def talk(n, connection):
    data = os.urandom(size)
    def send():
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
    sender = threading.Thread(target=send)
    try:
        if how != "listen":
            sender.start()
        heard, digest = 0, hashlib.sha256()
        while piece := connection.recv(65536):
            heard += len(piece)
            digest.update(piece)
        results[n] = [len(data), hashlib.sha256(data).hexdigest(), heard, digest.hexdigest()]
    except OSError as error:
        results[n] = type(error).__name__

threads = [threading.Thread(target=talk, args=pair) for pair in enumerate([connect(port) for port in ports])]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(results))
"""


class Speaking(Kubectl):
    """kubectl that speaks one protocol: WebSockets as of itself, or SPDY as clients before them did."""

    def __init__(self, testbed: Testbed, namespace: str, protocol: str) -> None:
        super().__init__(testbed, namespace)
        self.protocol = protocol

    def argv(self, *arguments: str) -> list[str]:
        switch = "true" if self.protocol == WEBSOCKET else "false"
        names = ("KUBECTL_REMOTE_COMMAND_WEBSOCKETS", "KUBECTL_PORT_FORWARD_WEBSOCKETS")
        return ["env", *(f"{name}={switch}" for name in names), *super().argv(*arguments)]


@contextmanager
def fresh_namespace(testbed: Testbed) -> Iterator[str]:
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    try:
        yield here.namespace
    finally:
        here("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false", check=False)
        here("delete", "namespace", here.namespace, "--wait=false", check=False)


class Forward:
    """A running `kubectl port-forward`; `local` has the port here for each port there."""

    def __init__(self, kubectl: Kubectl, pod: str, *ports: int) -> None:
        self._testbed = kubectl.testbed
        self.process: subprocess.Popen[bytes] = kubectl.start(
            "port-forward", f"pod/{pod}", *(f":{port}" for port in ports), "--address=127.0.0.1"
        )
        self.local: dict[int, int] = {}
        assert self.process.stdout is not None
        while len(self.local) < len(set(ports)):
            line = self.process.stdout.readline().decode()
            found = re.match(r"Forwarding from 127.0.0.1:(\d+) -> (\d+)", line)
            assert found, f"kubectl said {line!r} {self.errors() if not line else ''}"
            self.local[int(found[2])] = int(found[1])

    def talk(self, size_bytes: int, *ports: int, how: str = "talk") -> list[Any]:
        """[sent bytes, their digest, received bytes, their digest] of one connection to each port, all at once."""
        argv = ["python3", "-c", TALKER, str(size_bytes), how, *(str(self.local[port]) for port in ports)]
        talked: list[Any] = json.loads(self._testbed.run(argv, timeout_s=90).stdout)
        return talked

    def errors(self) -> str:
        """All it said on stderr, once it has ended."""
        self.process.wait(20)
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def stop(self, grace_s: float = 2.0) -> None:
        self._testbed.stop(self.process, grace_s=grace_s)
