"""`kubectl port-forward` in both protocols: many connections, every byte, half-closed ones, ports that do not answer."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import eventually, pod
from tests.e2e.streaming import SPDY, WEBSOCKET, Forward, Speaking, fresh_namespace

pytestmark = pytest.mark.e2e

LARGE_BYTES = 10 << 20
# Pods share the network of their host, and others try tests on the same hosts.
PORT = random.randrange(20000, 30000, 10)
HTTP, ECHO, DIGEST, SOURCE, RUDE, CLOSED = range(PORT, PORT + 6)
SERVER = f"""
mkdir -p /www && echo hello from the pod >/www/index.html && printf '#!/bin/sh\\ncat /large\\n' >/source && chmod +x /source
head -c {LARGE_BYTES} /dev/urandom >/large && sha256sum /large >/www/large.sum
httpd -p {HTTP} -h /www
nc -ll -p {DIGEST} -e sha256sum &
nc -ll -p {SOURCE} -e /source &
nc -ll -p {RUDE} -e true &
exec nc -ll -p {ECHO} -e cat
"""

# A client library's way, without SPDY: a WebSocket for two ports, each with a channel for bytes and one for its error.
LIBRARY = """
import asyncio, hashlib, json, os, ssl, sys
import aiohttp
from pathlib import Path

async def main(root, path, size, protocol):
    cluster = json.loads(Path(root, "cluster.json").read_text())
    context = ssl.create_default_context(cafile=f"{root}/pki/ca.crt")
    context.load_cert_chain(f"{root}/pki/admin.crt", f"{root}/pki/admin.key")
    url = f"https://{cluster['api_address']}:{cluster['api_port']}{path}"
    heard, data = {}, os.urandom(size)
    async with aiohttp.ClientSession() as session:
        async with session.ws_connect(url, ssl=context, protocols=(protocol,)) as socket:
            async def send():
                for at in range(0, size, 100_000):
                    await socket.send_bytes(bytes((0,)) + data[at : at + 100_000])
            sending = asyncio.create_task(send())
            while len(heard.get(0, b"")) < size + 2 or b"refused" not in heard.get(3, b""):
                message = await socket.receive_bytes()
                heard[message[0]] = heard.get(message[0], b"") + message[1:]
            await sending
    print(json.dumps({channel: [text[:2].hex(), text[2:] == data, text[2:].decode(errors="replace")[:500]]
                      for channel, text in heard.items()}))

asyncio.run(asyncio.wait_for(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]), 30))
"""


@pytest.fixture(scope="module")
def served(testbed: Any, cluster: str) -> Iterator[str]:
    """A namespace with the pod `server`."""
    with fresh_namespace(testbed) as namespace:
        kubectl = Speaking(testbed, namespace, WEBSOCKET)
        kubectl.apply(pod("server", SERVER))
        kubectl("wait", "--for=condition=Ready", "pod/server", "--timeout=60s")
        sockets = ("exec", "server", "--", "cat", "/proc/net/tcp", "/proc/net/tcp6")
        eventually(lambda: f":{ECHO:04X} " in kubectl(*sockets).stdout)
        yield namespace


@pytest.fixture(scope="module", params=[WEBSOCKET, SPDY])
def speaker(request: pytest.FixtureRequest, testbed: Any, served: str) -> Speaking:
    return Speaking(testbed, served, request.param)


@pytest.fixture
def forward(speaker: Speaking) -> Iterator[Forward]:
    running = Forward(speaker, "server", HTTP, ECHO, DIGEST, SOURCE, RUDE, CLOSED)
    yield running
    running.stop()


def test_requests_to_several_ports_of_one_forward(speaker: Speaking, forward: Forward) -> None:
    for _ in range(3):
        asked = ["curl", "-sS", "-m", "10", f"http://127.0.0.1:{forward.local[HTTP]}/index.html"]
        assert speaker.testbed.run(asked).stdout == "hello from the pod\n"
    [[sent, digest, heard, echoed]] = forward.talk(1000, ECHO)
    assert (sent, digest) == (heard, echoed)


def test_large_transfers_byte_for_byte(speaker: Speaking, forward: Forward) -> None:
    [[_, digest, heard, echoed]] = forward.talk(LARGE_BYTES, ECHO)
    assert (heard, echoed) == (LARGE_BYTES, digest)
    [[_, _, heard, got]] = forward.talk(0, SOURCE)
    expected = speaker("exec", "server", "--", "cat", "/www/large.sum").stdout.split()[0]
    assert (heard, got) == (LARGE_BYTES, expected)


def test_a_half_closed_connection_still_gets_its_answer(forward: Forward) -> None:
    """sha256sum speaks only after the end of its input."""
    [[_, digest, heard, answer]] = forward.talk(300_000, DIGEST)
    line = f"{digest}  -\n".encode()
    assert (heard, answer) == (len(line), hashlib.sha256(line).hexdigest())


def test_twenty_connections_at_once(forward: Forward) -> None:
    talked = forward.talk(400_000, *[ECHO] * 20, how="meet")
    assert [(sent, digest) == (heard, echoed) for sent, digest, heard, echoed in talked] == [True] * 20
    assert len({digest for _, digest, _, _ in talked}) == 20


def test_a_server_that_cuts_connections_off_ends_only_those(forward: Forward) -> None:
    for _ in range(3):
        forward.talk(200_000, RUDE)
    [[sent, digest, heard, echoed]] = forward.talk(1000, ECHO)
    assert (sent, digest) == (heard, echoed)
    assert forward.process.poll() is None


def test_a_port_where_nobody_listens(forward: Forward) -> None:
    [talked] = forward.talk(0, CLOSED, how="listen")
    assert talked == "ConnectionResetError" or talked[2] == 0
    said = forward.errors()
    assert f"error forwarding port {CLOSED} to pod server" in said, said
    assert f"127.0.0.1:{CLOSED}: connect: connection refused" in said, said


@pytest.mark.parametrize("grace_s", [2, 0], ids=["interrupted", "killed"])
def test_a_client_that_leaves_takes_its_connections_along(speaker: Speaking, grace_s: float) -> None:
    def in_the_pod() -> int:
        return speaker("exec", "server", "--", "ps", "-o", "args").stdout.splitlines().count("cat")

    eventually(lambda: in_the_pod() == 0)
    running = Forward(speaker, "server", ECHO)
    holder = (
        "import socket, time; held = [socket.create_connection(('127.0.0.1', int(__import__('sys').argv[1]))) "
        "for _ in range(3)]; time.sleep(60)"
    )
    client = speaker.testbed.popen(["python3", "-c", holder, str(running.local[ECHO])])
    try:
        eventually(lambda: in_the_pod() == 3, 15)
        running.stop(grace_s)
        eventually(lambda: in_the_pod() == 0, 15)
    finally:
        speaker.testbed.stop(client, grace_s=0)
        running.stop(0)


def test_client_libraries_that_use_channels(testbed: Any, served: str, cluster: str) -> None:
    path = f"/api/v1/namespaces/{served}/pods/server/portforward?ports={ECHO}&ports={CLOSED}"
    argv = ["/opt/slurmlet/venv/bin/python", "-c", LIBRARY, f"/home/user1/.slurmlet/{cluster}", path]
    heard = json.loads(testbed.run([*argv, str(3 << 20), "v4.channel.k8s.io"], timeout_s=40).stdout)
    echo, closed = (port.to_bytes(2, "little").hex() for port in (ECHO, CLOSED))
    assert [heard[channel][0] for channel in ("0", "1", "2", "3")] == [echo, echo, closed, closed]
    assert heard["0"][1]
    assert f"error forwarding port {CLOSED} to pod server" in heard["3"][2]
