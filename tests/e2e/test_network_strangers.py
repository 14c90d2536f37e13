"""Whom the network keeps out: another user of the host at a pod's ports, a pod at another user's loopback."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import eventually
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import AGENT, Net, agent, network_namespace

pytestmark = pytest.mark.e2e

HOST = "c2"
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


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    with network_namespace(testbed, cluster) as net:
        net.apply(agent("pod", "tcp:80", "tcp:8080", "udp:53", "tcp:47", host=HOST))
        net.ready("pod")
        net.listening("pod")
        yield net


@pytest.mark.parametrize("user", ["user1", "user2"])
def test_the_host_port_behind_a_listener_is_nobodys(net: Net, user: str) -> None:
    """The kernel shakes hands there; the program must never hear of it, and go on."""
    ports = json.loads(net.testbed.run(["python3", "-c", BEHIND, "tcp:47"], host=HOST, user="root").stdout)
    assert len(ports) == 3, ports
    knock = ["python3", "-c", KNOCK, address_of(HOST), *map(str, ports)]
    for host in (HOST, "c3"):
        assert json.loads(net.testbed.run(knock, host=host, user=user).stdout) == [""] * 3
    assert net.ask_one("pod", "who", net.ip("pod"), 80)["name"] == "pod"


def test_a_pod_does_not_reach_the_hosts_loopback(net: Net) -> None:
    number = random.randrange(20000, 30000)
    process = net.testbed.popen(
        ["python3", "-u", "-c", AGENT.replace("0.0.0.0", "127.0.0.1"), f"tcp:{number}", f"udp:{number}"],
        host=HOST, user="user2", stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        for address in ("127.0.0.1", "localhost", net.ip("pod")):
            assert net.ask_one("pod", "who", address, number) == "ConnectionRefusedError"
        assert isinstance(net.ask_one("pod", "udp_who", "127.0.0.1", number), str)
    finally:
        net.testbed.stop(process)


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
