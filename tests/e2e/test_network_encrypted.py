"""A cluster that asked for encryption between hosts: all that works elsewhere, and nothing to read on the wire.

It has a control plane of its own beside the one that all tests share. That one is the control: there, all is seen.
"""

from __future__ import annotations

import json
import random
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import CLUSTER, IMAGE, eventually
from tests.e2e.network_pods import Net, agent, network_namespace, port, probe, service
from tests.e2e.network_weighing import of_pod
from tests.e2e.streaming import Forward

pytestmark = pytest.mark.e2e

SEALED = f"{CLUSTER}-sealed"
LARGE_BYTES = 24 << 20
DATAGRAM_BYTES = (1, 1200, 9000, 60_000)
NODE_PORT = random.randrange(30100, 32700)
PORTS = ("tcp:80", "tcp:8080", "udp:53", "udp:5353")
# Every word in turn through everything: TCP to pod and Service, UDP, DNS. Each is said often, so that no two packets
# share all of them.
SAY = """
import socket, sys
pod, service, tcp, udp, name = sys.argv[1:]
for host, port in ((pod, 8080), (service, 8000)):
    with socket.create_connection((host, port), 10) as connection:
        connection.sendall(b"echo\\n" + (tcp.encode() + b" ") * 50)
        connection.shutdown(socket.SHUT_WR)
        heard = b""
        while piece := connection.recv(65536):
            heard += piece
        assert heard.count(tcp.encode()) == 50, heard
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
    client.settimeout(1)
    client.connect((pod, 5353))
    for attempt in range(5):
        client.send(udp.encode())
        try:
            assert client.recv(1000) == udp.encode()
            break
        except TimeoutError:
            pass
try:
    socket.getaddrinfo(name, 80)
except socket.gaierror:
    pass
print("said")
"""
# Root on the host, at its cable: which of the words came by, until the input ends.
LISTEN = """
import select, socket, sys
words = [bytes.fromhex(word) for word in sys.argv[1:]]
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, 33, 64 << 20)  # SO_RCVBUFFORCE
print("listening", flush=True)
seen, count = set(), 0
while True:
    ready = select.select([wire, sys.stdin], [], [])[0]
    if wire in ready:
        packet, (interface, *_) = wire.recvfrom(65535)
        if interface != "lo":
            count += 1
            seen |= {word for word in words if word in packet}
    elif sys.stdin in ready:
        break
print(count, *(word.hex() for word in sorted(seen)))
"""
# The ports of the host on which this process listens. Only root can see them.
DOORS = """
import os, json, sys
lines = [line.split() for line in open("/proc/net/tcp").read().splitlines()[1:]]
listening = {words[9]: int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A"}
found = {listening.get(os.readlink(f"/proc/{sys.argv[1]}/fd/{fd}")[8:-1]) for fd in os.listdir(f"/proc/{sys.argv[1]}/fd")}
print(json.dumps(sorted(found - {None})))
"""
# In a cluster inside of a job: from a pod of one host to one of another, by address and by name.
ACROSS = """
grep encrypt "$(dirname "$KUBECONFIG")"/cluster.json
set -- $(kubectl get nodes -o name | cut -d/ -f2)
on() { printf '{"spec": {"terminationGracePeriodSeconds": 0, "nodeName": "%s"}}' "$1"; }
kubectl run a --image=IMAGE --overrides="$(on $1)" --command -- sh -c 'echo across >/tmp/index.html; httpd -f -h /tmp'
kubectl run b --image=IMAGE --overrides="$(on $2)" --command -- sleep 600
kubectl wait --for=condition=Ready pod/a pod/b --timeout=60s
kubectl expose pod a --port=8080 --target-port=80
for url in "http://$(kubectl get pod a -o jsonpath={.status.podIP})/" http://a.default.svc.cluster.local:8080/; do
    for attempt in 1 2 3 4 5; do kubectl exec b -- wget -qO- $url && break; sleep 1; done
done
"""
# Speaks TLS to each port without a certificate: what it was told after the handshake; "" for a hang-up.
KNOCK = """
import json, socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE

def knock(port):
    try:
        with socket.create_connection((sys.argv[1], int(port)), 5) as raw, context.wrap_socket(raw) as connection:
            connection.sendall(b"\\0\\0\\0\\4who\\n")
            return connection.recv(1000).decode()
    except TimeoutError:
        return "left waiting"
    except OSError:
        return ""

print(json.dumps([knock(port) for port in sys.argv[2:]]))
"""


@pytest.fixture(scope="module")
def sealed(testbed: Testbed) -> Iterator[str]:
    testbed.run(["slurmlet", "up", "-c", SEALED, "--encrypt"], timeout_s=180)
    yield SEALED
    testbed.run(["slurmlet", "down", "-c", SEALED, "--purge", "--yes"], timeout_s=180)


@contextmanager
def two_pods(testbed: Testbed, cluster: str) -> Iterator[Net]:
    """`here` and `away` on two hosts, a Service and a node port for `away`."""
    with network_namespace(testbed, cluster) as net:
        selector = {"app": "away"}
        ports = (port(8000, 80, "tcp"), port(8053, 5353, "udp", "UDP"))
        net.apply(
            agent("here", *PORTS, host="c1"),
            agent(
                "away", *PORTS, host="c2", labels=selector,
                container={"readinessProbe": probe(tcpSocket={"port": 8080})},
            ),
            service("away", selector, *ports),
        )  # fmt: skip
        for name in ("here", "away"):
            net.ready(name)
            net.listening(name)
        eventually(lambda: net.ask_one("here", "who", net.cluster_ip("away"), 8000)["name"] == "away", 10)
        yield net


@pytest.fixture(scope="module")
def net(testbed: Testbed, sealed: str) -> Iterator[Net]:
    with two_pods(testbed, sealed) as net:
        yield net


# What was asked for.


def test_it_is_chosen_once_and_shown(testbed: Testbed, sealed: str) -> None:
    again = testbed.run(["slurmlet", "up", "-c", sealed], timeout_s=60)
    assert "already running" in again.stderr
    told = json.loads(testbed.run(["slurmlet", "status", "-c", sealed, "-o", "json"]).stdout)
    assert told["config"]["encrypt"] is True
    assert "encrypted between hosts" in testbed.run(["slurmlet", "status", "-c", sealed]).stdout
    refused = testbed.run(["slurmlet", "up", "-c", sealed, "--no-encrypt"], check=False)
    assert not refused.ok
    assert "set when a cluster is created" in refused.stderr


def test_a_plain_cluster_stays_plain(testbed: Testbed, cluster: str) -> None:
    refused = testbed.run(["slurmlet", "up", "-c", cluster, "--encrypt"], check=False)
    assert not refused.ok
    assert "made without encryption" in refused.stderr


def test_nobody_complains_of_the_slow_path_that_was_asked_for(net: Net) -> None:
    assert not [text for reason, text in net.events("here") if reason == "NetworkMode"]


# What works.


@pytest.mark.parametrize("where", ["here", "away", "the Service", "the Service's name"])
def test_a_pod_reaches(net: Net, where: str) -> None:
    host, tcp, udp = {
        "the Service": (net.cluster_ip("away"), 8000, 8053),
        "the Service's name": (net.name_of("away"), 8000, 8053),
    }.get(where) or (net.ip(where), 8080, 5353)
    who, up, down, by_udp, *whole = net.ask(
        "here",
        ("who", host, tcp, None),
        ("push", host, tcp, LARGE_BYTES),
        ("pull", host, tcp, LARGE_BYTES),
        ("udp_who", host, udp, None),
        *(("udp_echo", host, udp, size) for size in DATAGRAM_BYTES),
    )
    name = "here" if where == "here" else "away"
    assert (who["name"], by_udp["name"]) == (name, name)
    assert who["peer"][0] == by_udp["peer"][0] == net.ip("here")
    assert (up, down, whole) == (True, True, [True] * len(DATAGRAM_BYTES))


def test_nobody_listens_or_not_any_more(net: Net) -> None:
    once = "import socket; s = socket.create_server(('', 8181)); c, _ = s.accept(); c.recv(9); c.sendall(b'{}'); c.close()"
    process = net.start("exec", "away", "--", "python3", "-c", once)
    try:
        eventually(lambda: net.ask_one("here", "who", net.ip("away"), 8181) == {}, 20)
        process.wait(20)
    finally:
        net.testbed.stop(process)
    asked = net.ask("here", *(("who", net.ip("away"), number, None) for number in (8181, 81)))
    assert asked == ["ConnectionRefusedError"] * 2


@pytest.mark.parametrize("where", ["here", "away"])
def test_a_pod_is_answered_by_echo(net: Net, where: str) -> None:
    for size in ("56", "5000"):
        said = net.run("here", "ping", "-c", "3", "-i", "0.2", "-W", "2", "-s", size, net.ip(where))
        assert " 3 received" in said.stdout


def test_a_node_port_of_the_login_host_and_of_a_node(net: Net) -> None:
    ports = (port(8000, 80, "tcp", nodePort=NODE_PORT), port(8000, 5353, "udp", "UDP", nodePort=NODE_PORT))
    net.apply(service("ported", {"app": "away"}, *ports, type="NodePort"))
    for host in ("login", "c1"):
        address = address_of(host)
        eventually(
            lambda address=address: (  # type: ignore[misc]
                net.ask_from_host("c3", ("who", address, NODE_PORT, None))[0] != "ConnectionRefusedError"
            )
        )
        who, up, down, by_udp = net.ask_from_host(
            "c3",
            ("who", address, NODE_PORT, None),
            ("push", address, NODE_PORT, LARGE_BYTES),
            ("pull", address, NODE_PORT, LARGE_BYTES),
            ("udp_who", address, NODE_PORT, None),
        )
        assert (who["name"], up, down, by_udp["name"]) == ("away", True, True, "away")


def test_kubectl_forwards_a_port(net: Net) -> None:
    forward = Forward(net, "away", 8080)
    try:
        argv = ["python3", "-c", "import socket, sys; c = socket.create_connection(('127.0.0.1', int(sys.argv[1])));"
                "c.sendall(b'who\\n'); print(c.recv(1000).decode())", str(forward.local[8080])]  # fmt: skip
        assert json.loads(net.testbed.run(argv).stdout)["name"] == "away"
    finally:
        forward.stop()


def test_a_network_that_was_killed_comes_back(net: Net) -> None:
    netd = of_pod(net.testbed, "c2", net.pod("away"))["netd"]
    net.testbed.run(["kill", "-KILL", str(netd.pid)], host="c2", user="root")
    whole = eventually(
        lambda: (
            net.ask(
                "here",
                ("push", net.ip("away"), 8080, LARGE_BYTES),
                ("udp_echo", net.ip("away"), 5353, 9000),
            )
            == [True, True]
        ),
        20,
    )
    assert whole


def test_a_cluster_inside_of_a_job(testbed: Testbed) -> None:
    argv = ["slurmlet", "run", "-N2", "--encrypt", "--", "sh", "-c", ACROSS.replace("IMAGE", IMAGE)]
    said = testbed.run(argv, timeout_s=180).stdout
    assert '"encrypt": true' in said
    assert said.splitlines().count("across") == 2


# What does not.


@contextmanager
def listening(testbed: Testbed, host: str, *words: str) -> Iterator[list[str]]:
    """What root saw of these words at the host's cable, once the context is left: first how many packets."""
    argv = ["python3", "-c", LISTEN, *(word.encode().hex() for word in words)]
    process = testbed.popen(argv, host=host, user="root", stdin=subprocess.PIPE)
    heard: list[str] = []
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        yield heard
        out, _ = process.communicate(b"\n", timeout=30)
        count, *seen = out.decode().split()
        heard += [count, *(bytes.fromhex(word).decode() for word in seen)]
    finally:
        testbed.stop(process)


def overheard(net: Net) -> tuple[int, set[str]]:
    """Packets that came by, and which words: "tcp", "udp", "dns", "echo"."""
    words = {kind: secrets.token_hex(12) for kind in ("tcp", "udp", "dns")}
    # ping's payload is a pattern of 16 bytes.
    words["echo"] = secrets.token_hex(8)
    with ExitStack() as stack:
        ears = [
            stack.enter_context(listening(net.testbed, host, *words.values()))
            for host in ("c1", "c2", "login")
        ]
        said = net.run(
            "here", "python3", "-c", SAY, net.ip("away"), net.cluster_ip("away"),
            words["tcp"], words["udp"], f"{words['dns']}.{net.namespace}.svc.cluster.local.",
        )  # fmt: skip
        assert said.stdout.strip() == "said"
        pattern = words["echo"].encode().hex()
        net.run("here", "ping", "-c", "2", "-i", "0.2", "-p", pattern, "-s", "200", net.ip("away"))
    seen = {word for heard in ears for word in heard[1:]}
    return min(int(heard[0]) for heard in ears), {kind for kind, word in words.items() if word in seen}


def test_nothing_that_pods_say_is_on_the_wire(net: Net) -> None:
    count, seen = overheard(net)
    assert count > 10
    assert seen == set()


def test_in_a_plain_cluster_all_of_it_is(testbed: Testbed, cluster: str) -> None:
    """Else the test before this one shows nothing."""
    with two_pods(testbed, cluster) as plain:
        count, seen = overheard(plain)
    assert count > 10
    assert seen == {"tcp", "udp", "dns", "echo"}


def test_who_has_no_certificate_does_not_get_in(net: Net) -> None:
    netd = of_pod(net.testbed, "c2", net.pod("away"))["netd"]
    found = net.testbed.run(["python3", "-c", DOORS, str(netd.pid)], host="c2", user="root").stdout
    ports = json.loads(found)
    # A listener of the pod's, and where links are made.
    assert len(ports) >= 2
    knock = ["python3", "-c", KNOCK, address_of("c2"), *map(str, ports)]
    for host, user in (("c2", "user2"), ("c3", "user1")):
        assert json.loads(net.testbed.run(knock, host=host, user=user).stdout) == [""] * len(ports)
    assert net.ask_one("here", "who", net.ip("away"), 8080)["name"] == "away"
