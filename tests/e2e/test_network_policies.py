"""NetworkPolicy between real pods: same host and another, TCP, UDP and ping, in and out."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import eventually, pod
from tests.e2e.network_pods import Net, agent, network_namespace, port, service

pytestmark = pytest.mark.e2e

Obj = dict[str, Any]
DENIED = "TimeoutError"
FRIEND = {"podSelector": {"matchLabels": {"app": "friend"}}}
SERVER = {"matchLabels": {"app": "server"}}
DNS = {
    "to": [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        }
    ],
    "ports": [{"protocol": "UDP", "port": 53}, {"protocol": "TCP", "port": 53}],
}


def policy(name: str, **spec: Any) -> Obj:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": name},
        "spec": spec,
    }


class Town(Net):
    """server (c1) with ports web (80), 81 and UDP 53; friend and other (c2); near (c1)."""

    def hears(self, who: str, at: int = 80, target: str = "server") -> bool:
        """Whether a TCP connection of that pod to the server comes about."""
        return self._said(self.ask_one(who, "who", self.ip(target), at, 1.5), target)

    def hears_udp(self, who: str, at: int = 53, target: str = "server") -> bool:
        return self._said(self.ask_one(who, "udp_who", self.ip(target), at), target)

    @staticmethod
    def _said(answer: Any, target: str) -> bool:
        if isinstance(answer, dict):
            assert answer["name"] == target
            return True
        # Not refused: what is denied looks as if nobody were there.
        assert answer == DENIED, answer
        return False

    def pings(self, who: str, target: str = "server") -> bool:
        return bool(self.run(who, "ping", "-c", "1", "-W", "2", self.ip(target), check=False).ok)

    def set(self, *policies: Obj) -> None:
        """Only these hold, and every netd has heard of it."""
        self("delete", "networkpolicy", "--all")
        if policies:
            self.apply(*policies)
        time.sleep(0.7)


@pytest.fixture(scope="module")
def town(testbed: Testbed, cluster: str) -> Iterator[Town]:
    with network_namespace(testbed, cluster) as net:
        here = Town(testbed, net.namespace, cluster=cluster)
        probe = {"tcpSocket": {"port": 80}, "periodSeconds": 1, "failureThreshold": 1}
        named = {"ports": [{"name": "web", "containerPort": 80}], "readinessProbe": probe}
        ports = ("tcp:80", "tcp:81", "udp:53")
        here.apply(
            agent("server", *ports, host="c1", labels={"app": "server"}, container=named),
            agent("near", *ports, host="c1", labels={"app": "near"}),
            agent("friend", *ports, host="c2", labels={"app": "friend"}),
            agent("other", *ports, host="c2", labels={"app": "other"}),
            service("server", {"app": "server"}, port(8080, 80, "web"), port(53, 53, "dns", "UDP")),
        )
        here.ready("server", "near", "friend", "other")
        for name in ("server", "near", "friend", "other"):
            here.listening(name)
        yield here


@pytest.fixture
def clean(town: Town) -> Iterator[Town]:
    yield town
    town.set()


def test_nobody_is_isolated_until_a_policy_says_so(clean: Town) -> None:
    for who in ("near", "friend"):
        assert clean.hears(who)
        assert clean.hears_udp(who)
        assert clean.pings(who)


def test_deny_all_holds_on_every_path_and_probes_go_on(clean: Town) -> None:
    clean.set(policy("deny", podSelector=SERVER))
    for who in ("near", "friend"):
        assert not clean.hears(who)
        assert not clean.hears_udp(who)
        assert not clean.pings(who)
    # Outward it is free, and answers come back.
    assert clean.hears("server", target="friend")
    assert clean.hears_udp("server", target="friend")
    time.sleep(2)
    assert clean.pod("server")["status"]["conditions"]
    clean.ready("server", timeout_s=5)
    clean.set()
    assert clean.hears("friend")
    assert clean.hears_udp("friend")


def test_pods_are_let_in_by_label_and_port(clean: Town) -> None:
    rule = {"from": [FRIEND], "ports": [{"port": "web"}, {"protocol": "UDP", "port": 53}]}
    clean.set(policy("friends", podSelector=SERVER, ingress=[rule]))
    assert clean.hears("friend", 80)
    assert clean.hears_udp("friend")
    assert not clean.hears("friend", 81)
    assert not clean.pings("friend")
    assert not clean.hears("near", 80)
    assert not clean.hears_udp("other")
    # Through the Service it is the same: the backend is asked.
    assert isinstance(clean.ask_one("friend", "who", clean.cluster_ip("server"), 8080, 1.5), dict)
    assert clean.ask_one("other", "who", clean.cluster_ip("server"), 8080, 1.5) == DENIED
    clean("label", "pod", "near", "app=friend", "--overwrite")
    eventually(lambda: clean.hears("near", 80), 5)
    clean("label", "pod", "near", "app=near", "--overwrite")
    eventually(lambda: not clean.hears("near", 80), 5)


def test_a_pod_that_comes_later_is_let_in_at_once(clean: Town) -> None:
    clean.set(policy("friends", podSelector=SERVER, ingress=[{"from": [FRIEND]}]))
    ask = "import socket,os;s=socket.create_connection((os.environ['TO'],80),5);s.sendall(b'who\\n');print(s.recv(999))"
    env = [{"name": "TO", "value": clean.ip("server")}]
    container = {"image": "localhost:5000/tools:1", "env": env}
    late = pod("late", ["python3", "-c", ask], metadata={"labels": {"app": "friend"}}, container=container)
    clean.apply(late)
    assert clean.wait_phase("late", "Succeeded", "Failed")["status"]["phase"] == "Succeeded"


def test_another_namespace_by_its_labels(clean: Town, testbed: Testbed, cluster: str) -> None:
    with network_namespace(testbed, cluster) as net:
        net.apply(agent("far", "tcp:80", host="c2", labels={"app": "friend"}))
        net.ready("far")
        far = Town(testbed, net.namespace, cluster=cluster)
        target = clean.ip("server")

        def reaches() -> bool:
            return isinstance(far.ask_one("far", "who", target, 80, 1.5), dict)

        assert reaches()
        # The same label in another namespace is another pod.
        clean.set(policy("p", podSelector=SERVER, ingress=[{"from": [FRIEND]}]))
        assert not reaches()
        both = {"namespaceSelector": {"matchLabels": {"team": net.namespace}}, **FRIEND}
        clean.set(policy("p", podSelector=SERVER, ingress=[{"from": [both]}]))
        assert not reaches()
        net("label", "namespace", net.namespace, f"team={net.namespace}")
        eventually(reaches, 5)
        assert not clean.hears("friend")


def test_egress_is_held_and_dns_may_be_let_out(clean: Town) -> None:
    only = policy("out", podSelector={"matchLabels": {"app": "friend"}}, policyTypes=["Egress"])
    clean.set(only)
    assert not clean.hears("friend")
    assert not clean.hears_udp("friend")
    assert not clean.pings("friend")
    assert clean.hears("near", target="friend")
    rule = {"to": [{"podSelector": SERVER}], "ports": [{"port": "web"}]}
    only["spec"]["egress"] = [DNS, rule]
    clean.set(only)
    assert clean.hears("friend", 80)
    assert not clean.hears("friend", 81)
    assert not clean.hears_udp("friend")
    name = clean.name_of("server")
    assert isinstance(clean.ask_one("friend", "who", name, 8080, 1.5), dict)


def test_ranges_and_what_is_cut_out_of_them(clean: Town) -> None:
    server, near = clean.ip("server"), clean.ip("near")
    block = {"cidr": "0.0.0.0/0", "except": [f"{near}/32"]}
    clean.set(policy("out", podSelector={"matchLabels": {"app": "friend"}}, policyTypes=["Egress"],
                     egress=[{"to": [{"ipBlock": block}]}]))  # fmt: skip
    assert clean.hears("friend")
    assert not clean.hears("friend", target="near")
    friend = {"ipBlock": {"cidr": f"{clean.ip('friend')}/32"}}
    ranged = {"from": [friend], "ports": [{"port": 79, "endPort": 80}]}
    clean.set(policy("in", podSelector=SERVER, ingress=[ranged]))
    assert clean.hears("friend", 80)
    assert not clean.hears("friend", 81)
    assert not clean.hears("other", 80)
    assert server != near


# address port scope: whether it connects. The scope is the host's number of the link: the socket is the host's.
CONNECT_SIX = """
import socket, sys
with socket.socket(socket.AF_INET6) as made:
    made.settimeout(1.5)
    try:
        made.connect((sys.argv[1], int(sys.argv[2]), 0, int(sys.argv[3])))
        print(made.recv(10).decode())
    except OSError as error:
        print(type(error).__name__)
"""
SERVE_SIX = """
import socket, sys
index = socket.if_nametoindex("eth0")
words = [line.split() for line in open("/proc/net/if_inet6")]
(raw,) = [each[0] for each in words if each[5] == "eth0" and each[0].startswith("fe80")]
address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(raw))
made = socket.socket(socket.AF_INET6)
made.bind((address, 0, 0, index))
made.listen()
print(address, made.getsockname()[1], flush=True)
while True:
    made.accept()[0].sendall(b"six")
"""


def test_egress_to_ipv6_is_held_too(clean: Town) -> None:
    """Ranges of a policy are IPv4 here: IPv6 is only let out where a rule names nobody in particular."""
    index = clean.testbed.run(["cat", "/sys/class/net/eth0/ifindex"], host="c2").stdout.strip()
    serving = clean.testbed.popen(["python3", "-c", SERVE_SIX], host="c3", stdin=subprocess.DEVNULL)
    try:
        assert serving.stdout is not None
        address, number = serving.stdout.readline().decode().split()

        def reaches(*egress: Obj) -> str:
            friend = {"matchLabels": {"app": "friend"}}
            clean.set(policy("out", podSelector=friend, policyTypes=["Egress"], egress=list(egress)))
            said = clean.run("friend", "python3", "-c", CONNECT_SIX, address, number, index).stdout
            return str(said).strip()

        clean.set()
        assert clean.run("friend", "python3", "-c", CONNECT_SIX, address, number, index).stdout == "six\n"
        assert reaches() == DENIED
        assert reaches({"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}) == DENIED
        assert reaches({"ports": [{"port": 1}]}) == DENIED
        assert reaches({"ports": [{"port": int(number)}]}) == "six"
    finally:
        clean.testbed.stop(serving)


def test_a_change_reaches_pods_within_half_a_second(clean: Town) -> None:
    seen: list[Any] = []
    watching = threading.Thread(
        target=lambda: seen.extend(clean.ask_one("friend", "watch", clean.ip("server"), 80, 6))
    )
    watching.start()
    time.sleep(2.5)
    clean.apply(policy("deny", podSelector=SERVER))
    applied_s = time.time()
    watching.join()
    assert seen[0][1] == "server"
    first_denied_s = next(at for at, name in seen if name == DENIED)
    assert first_denied_s - applied_s < 0.5
    assert [name for at, name in seen if at > applied_s + 0.5] == [DENIED] * len(
        [at for at, _ in seen if at > applied_s + 0.5]
    )


def test_what_cannot_be_held_is_told(clean: Town) -> None:
    clean.apply(pod("hostly", "sleep 600", metadata={"labels": {"app": "hostly"}}, hostNetwork=True))
    rule = {"from": [{"ipBlock": {"cidr": "2001:db8::/64"}}]}
    clean.set(policy("six", podSelector={"matchLabels": {"app": "hostly"}}, ingress=[rule]))
    eventually(lambda: clean.told("six", "NetworkPolicyNotEnforced", "2001:db8::/64"), 10)
    eventually(lambda: clean.told("hostly", "NetworkPolicyNotEnforced", "host's network"), 10)
    listed = json.loads(
        clean("get", "events", "--field-selector", "involvedObject.name=six", "-o", "json").stdout
    )
    assert listed["items"][0]["involvedObject"]["kind"] == "NetworkPolicy"
