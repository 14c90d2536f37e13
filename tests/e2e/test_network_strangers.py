"""Whom the network keeps out: another user of the host at a pod's ports, a pod at another user's loopback."""

from __future__ import annotations

import errno
import json
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.testbed_plan import address_of
from tests import i386
from tests.e2e.conftest import eventually
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import AGENT, Net, agent, network_namespace, placed

pytestmark = pytest.mark.e2e

HOST, OTHER_HOST = "c2", "c1"
# The host's ports behind the listeners of whatever has the word in its command line. Only root can see them.
BEHIND = """
import json, os, sys
lines = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}").read().splitlines()[1:]]
listening = {words[9]: int(words[1].split(":")[1], 16) for words in lines if words[3] == "0A"}
found = set()
for entry in filter(str.isdigit, os.listdir("/proc")):
    try:
        if sys.argv[1] in open(f"/proc/{entry}/cmdline").read() and int(entry) != os.getpid():
            for fd in os.listdir(f"/proc/{entry}/fd"):
                found.add(listening.get(os.readlink(f"/proc/{entry}/fd/{fd}")[8:-1]))
    except OSError:
        pass
print(json.dumps(sorted(found - {None})))
"""
# host port…: what each says to who asks; nothing, if it hangs up at once.
KNOCK = """
import concurrent.futures, json, socket, sys

def knock(port):
    try:
        with socket.create_connection((sys.argv[1], int(port)), 5) as connection:
            connection.sendall(b"who\\n")
            return connection.recv(1000).decode()
    except TimeoutError:
        return "left waiting"
    except OSError:
        return ""

said = list(concurrent.futures.ThreadPoolExecutor().map(knock, sys.argv[2:]))
print(json.dumps(said))
"""
# address, port: asks who is there, and hangs up so that nothing of the connection is left; the port it came from.
VISIT = """
import socket, struct, sys

with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as connection:
    connection.sendall(b"who\\n")
    assert connection.recv(1000)
    print(connection.getsockname()[1])
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
"""
# The same, from that port, as soon as the pod's netd has closed its own descriptor of the connection too.
KNOCK_FROM = """
import errno, json, socket, sys, time

def bind(connection):
    for attempt in range(200):
        try:
            return connection.bind(("", int(sys.argv[2])))
        except OSError as error:
            if error.errno != errno.EADDRINUSE or attempt == 199:
                raise
            time.sleep(0.1)

def knock(port):
    with socket.socket() as connection:
        connection.settimeout(5)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bind(connection)
        try:
            connection.connect((sys.argv[1], int(port)))
            connection.sendall(b"who\\n")
            return connection.recv(1000).decode()
        except TimeoutError:
            return "left waiting"
        except ConnectionResetError:
            return ""

print(json.dumps([knock(port) for port in sys.argv[3:]]))
"""
# port of the host's loopback: what 32-bit calls on a TCP socket say, and whether the socket then leads anywhere.
CONNECT_AS_I386 = (
    i386.SOURCE
    + """
import json, sys

def attempt(act):
    with socket.socket() as made:
        made.settimeout(2)
        code = act(made.fileno())
        try:
            made.sendall(b"who\\n")
            return [code, made.recv(1000).decode()]
        except OSError:
            return [code, ""]

there = address("127.0.0.1", int(sys.argv[1]))
print(json.dumps([
    attempt(lambda fd: call(CONNECT, fd, there, 16)),
    attempt(lambda fd: socketcall(3, fd, there, 16)),
    attempt(lambda fd: call(SENDTO, fd, put(b"who"), 3, FASTOPEN, there)),
    attempt(lambda fd: socketcall(11, fd, put(b"who"), 3, FASTOPEN, there, 16)),
]))
"""
)
# address, port: asks who is there over a socket of a 32-bit program's own.
ASK_AS_I386 = (
    i386.SOURCE
    + """
import sys

fd = call(SOCKET, socket.AF_INET, socket.SOCK_STREAM, 0)
assert call(CONNECT, fd, address(sys.argv[1], int(sys.argv[2])), 16) == 0
with socket.socket(fileno=fd) as made:
    made.sendall(b"who\\n")
    print(made.recv(1000).decode())
"""
)


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    with network_namespace(testbed, cluster) as net:
        net.apply(agent("pod", "tcp:80", "tcp:8080", "udp:53", "tcp:47", host=HOST))
        net.apply(placed("visitor", "sleep inf", host=OTHER_HOST))
        net.ready("pod", "visitor")
        net.listening("pod")
        yield net


def behind_the_pod(net: Net) -> list[str]:
    found = net.testbed.run(["python3", "-c", BEHIND, "tcp:47"], host=HOST, user="root").stdout
    return [str(number) for number in json.loads(found)]


@pytest.mark.parametrize("user", ["user1", "user2"])
def test_the_host_port_behind_a_listener_is_nobodys(net: Net, user: str) -> None:
    """The kernel shakes hands there; the program must never hear of it, and go on."""
    ports = behind_the_pod(net)
    assert len(ports) == 3, ports
    knock = ["python3", "-c", KNOCK, address_of(HOST), *ports]
    for host in (HOST, "c3"):
        assert json.loads(net.testbed.run(knock, host=host, user=user).stdout) == [""] * 3
    assert net.ask_one("pod", "who", net.ip("pod"), 80)["name"] == "pod"


@pytest.mark.parametrize("user", ["user1", "user2"])
def test_the_port_that_a_pods_connection_had_opens_nothing(net: Net, user: str) -> None:
    """Its netd is asked whose the connection from that port is: nobody's of the cluster any more."""
    port = net.run("visitor", "python3", "-c", VISIT, net.ip("pod"), "80").stdout.strip()
    knock = ["python3", "-c", KNOCK_FROM, address_of(HOST), port, *behind_the_pod(net)]
    assert json.loads(net.testbed.run(knock, host=OTHER_HOST, user=user).stdout) == [""] * 3
    assert net.ask_one("visitor", "who", net.ip("pod"), 80)["name"] == "pod"


@pytest.fixture
def private_port(net: Net) -> Iterator[int]:
    """Of a server of another user, on the loopback of the pod's host."""
    number = random.randrange(20000, 30000)
    process = net.testbed.popen(
        ["python3", "-u", "-c", AGENT.replace("0.0.0.0", "127.0.0.1"), f"tcp:{number}", f"udp:{number}"],
        host=HOST, user="user2", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield number
    finally:
        net.testbed.stop(process)


def test_a_pod_does_not_reach_the_hosts_loopback(net: Net, private_port: int) -> None:
    for address in ("127.0.0.1", "localhost", net.ip("pod")):
        assert net.ask_one("pod", "who", address, private_port) == "ConnectionRefusedError"
    assert isinstance(net.ask_one("pod", "udp_who", "127.0.0.1", private_port), str)


@pytest.mark.parametrize("profile", ["RuntimeDefault", "Unconfined"])
def test_nor_by_system_calls_of_another_architecture(net: Net, private_port: int, profile: str) -> None:
    name = f"held-{profile.lower()}"
    held = {"securityContext": {"seccompProfile": {"type": profile}}}
    net.apply(
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": {"name": "held"},
            "spec": {"podSelector": {"matchLabels": {"app": "held"}}, "policyTypes": ["Ingress", "Egress"]},
        },
        placed(name, "sleep inf", host=HOST, labels={"app": "held"}, container=held),
    )
    net.ready(name)
    said = net.run(name, "python3", "-c", CONNECT_AS_I386, str(private_port)).stdout
    assert json.loads(said) == [[-errno.EOPNOTSUPP, ""]] * 4


def test_a_32_bit_programs_own_sockets_reach_pods(net: Net) -> None:
    said = json.loads(net.run("visitor", "python3", "-c", ASK_AS_I386, net.ip("pod"), "80").stdout)
    assert (said["name"], said["peer"][0]) == ("pod", net.ip("visitor"))


def test_a_pod_does_not_reach_private_ports_by_being_the_user(net: Net) -> None:
    """etcd listens on the login host's loopback; the hub's ports ask for a certificate."""
    here = Cluster(net.testbed, net.cluster)
    etcd = here.read("cluster.json")["etcd_port"]
    assert net.ask_one("pod", "who", address_of("login"), etcd) == "ConnectionRefusedError"
    hub = here.read("hub.json")
    for port in (hub["runner_port"], hub["kubelet_port"]):
        command = ["curl", "-sk", "--max-time", "5", f"https://{address_of('login')}:{port}/pods"]
        said = eventually(lambda command=command: net.run("pod", *command, check=False), 10)  # type: ignore[misc]
        assert "{" not in said.stdout
