"""Pods on their host's network: untouched, and with a way to pods and Services where they ask for the cluster's names."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator

import pytest

from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import eventually
from tests.e2e.network_pods import AGENT, Net, agent, host_agent, network_namespace, port, service
from tests.e2e.network_weighing import of_pod

pytestmark = pytest.mark.e2e

HOST, ELSEWHERE = "c3", "c1"
# Ports of the host itself: others try tests there too.
NUMBER = random.randrange(20000, 30000, 10)
OWN, PRIVATE, OTHERS, PLAIN = range(NUMBER, NUMBER + 4)
SIZE_BYTES = 4 << 20
NAMES = """
import json, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as connection:
    print(json.dumps([list(connection.getsockname())[:1], list(connection.getpeername())]))
"""


@pytest.fixture(scope="module")
def net(testbed: Testbed, cluster: str) -> Iterator[Net]:
    """`joined` asks for the cluster's names, `plain` does not; `away` and `near` are pods as others."""
    with network_namespace(testbed, cluster) as net:
        joining = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
        net.apply(
            agent("joined", f"tcp:{OWN}", host=HOST, **joining),
            agent("plain", f"tcp:{PLAIN}", host=HOST, hostNetwork=True),
            agent("away", "tcp:80", "tcp:81", host=ELSEWHERE, labels={"app": "away"}),
            agent("near", "tcp:80", host=HOST),
            service("web", {"app": "away"}, port(8000, 80)),
        )
        for name in ("joined", "plain", "away", "near"):
            net.ready(name)
            net.listening(name)
        yield net


@pytest.mark.parametrize("where", ["away", "near", "the Service", "the Service's name", "its full name"])
def test_it_reaches_pods_and_services(net: Net, where: str) -> None:
    host = {
        "the Service": net.cluster_ip("web"),
        "the Service's name": "web",
        "its full name": net.name_of("web"),
    }.get(where)
    at = (host, 8000) if host else (net.ip(where), 80)
    who, up, down = net.ask(
        "joined", ("who", *at, None), ("push", *at, SIZE_BYTES), ("pull", *at, SIZE_BYTES)
    )
    assert who["name"] == ("near" if where == "near" else "away")
    # As everywhere: a pod of the host's network is its host to others.
    assert who["peer"][0] == address_of(HOST) == net.ip("joined")
    assert (up, down) == (True, True)


def test_it_sees_its_hosts_address_and_whom_it_called(net: Net) -> None:
    said = json.loads(net.run("joined", "python3", "-c", NAMES, net.cluster_ip("web"), "8000").stdout)
    assert said == [[address_of(HOST)], [net.cluster_ip("web"), 8000]]
    assert net.ask_one("joined", "who", net.ip("away"), 82) == "ConnectionRefusedError"
    assert net.ask_one("joined", "who", net.cluster_ip("web"), 1) == "ConnectionRefusedError"


def test_the_rest_is_the_hosts_own(net: Net) -> None:
    """Its port is one of the host's, the host's loopback is its own, and other hosts are reached as from there."""
    for client in ("away", "near"):
        assert net.ask_one(client, "who", address_of(HOST), OWN)["name"] == HOST
    (said,) = net.ask_from_host(ELSEWHERE, ("who", address_of(HOST), OWN, None))
    assert said["sock"] == [address_of(HOST), OWN]
    local = ["python3", "-u", "-c", AGENT.replace("0.0.0.0", "127.0.0.1"), f"tcp:{PRIVATE}"]
    process = net.testbed.popen(local, host=HOST, stdin=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert net.ask_one("joined", "who", "127.0.0.1", PRIVATE)["peer"][0] == "127.0.0.1"
    finally:
        net.testbed.stop(process)
    with host_agent(net.testbed, ELSEWHERE, f"tcp:{OTHERS}") as address:
        who, up = net.ask("joined", ("who", address, OTHERS, None), ("push", address, OTHERS, SIZE_BYTES))
    assert (who["name"], who["peer"][0], up) == (ELSEWHERE, address_of(HOST), True)


def test_one_that_asks_for_nothing_is_left_alone(net: Net) -> None:
    filters = ["sed", "-n", "s/^Seccomp_filters:\\t//p", "/proc/self/status"]
    plain, joined = (int(net.run(name, *filters).stdout) for name in ("plain", "joined"))
    assert joined == plain + 1
    assert net.ask_one("plain", "who", "127.0.0.1", PLAIN)["name"] == HOST
    assert isinstance(net.ask_one("plain", "who", net.cluster_ip("web"), 8000, 2), str)


def test_policy_sees_its_host(net: Net) -> None:
    def hears() -> bool:
        return isinstance(net.ask_one("joined", "who", net.ip("away"), 80, 1.5), dict)

    def let_in(**peer: object) -> None:
        spec = {"podSelector": {"matchLabels": {"app": "away"}}, "ingress": [{"from": [peer]}]}
        metadata = {"name": "away"}
        net.apply(
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": metadata,
                "spec": spec,
            }
        )

    try:
        let_in(podSelector={})
        eventually(lambda: not hears(), 10)
        let_in(ipBlock={"cidr": f"{address_of(HOST)}/32"})
        eventually(hears, 10)
    finally:
        net("delete", "networkpolicy", "--all")


def test_connections_go_on_without_their_netd_and_new_ones_with_the_next(net: Net) -> None:
    netd = of_pod(net.testbed, HOST, net.pod("joined"))["netd"]
    holding = net.start("exec", "joined", "--", "python3", "-c", HOLD, net.cluster_ip("web"), "8000")
    try:
        assert holding.stdout is not None
        assert holding.stdout.readline() == b"held\n"
        net.testbed.run(["kill", "-9", str(netd.pid)], host=HOST, user="root")
        assert holding.wait(30) == 0
    finally:
        net.testbed.stop(holding)
    assert net.ask_one("joined", "who", "web", 8000)["name"] == "away"


# One connection over the end of a netd, and one after it, within two seconds.
HOLD = """
import socket, sys, time
to = (sys.argv[1], int(sys.argv[2]))
with socket.create_connection(to, 10) as connection:
    connection.sendall(b"echo\\n")
    print("held", flush=True)
    time.sleep(1)
    connection.sendall(b"still")
    assert connection.recv(100) == b"still"
    began_s = time.monotonic()
    with socket.create_connection(to, 10) as other:
        other.sendall(b"who\\n")
        assert b"away" in other.recv(1000)
    assert time.monotonic() - began_s < 2
"""
