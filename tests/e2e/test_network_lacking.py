"""Pods of a host that gives users no TUN device: mode "no-netns", where TCP, Services and DNS still are as everywhere.

The host lacks it only while pods start there: a pod's network is made once. Others may try tests on the same host.
"""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import eventually
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import Net, agent, network_namespace, placed, port, probe, service
from tests.e2e.network_weighing import of_pod
from tests.e2e.streaming import Forward

pytestmark = pytest.mark.e2e

HOST, ELSEWHERE = "c3", "c1"
SIZE_BYTES = 4 << 20
LACKING = ("lone", "twin", "web")
# Who I am by all the ways a program can ask: the name of the host, both ends of a connection.
NAMES = """
import json, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 10) as connection:
    found = [connection.getsockname()[0], list(connection.getpeername())]
print(json.dumps([socket.gethostbyname(socket.gethostname()), *found]))
"""
# In the pod itself: another family's loopback, a port nobody has, a port that is asked for.
INSIDE = """
import json, socket
listening = socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True)
number = listening.getsockname()[1]
found = []
for address in ("127.0.0.1", "::1"):
    with socket.create_connection((address, number), 5) as client:
        accepted, peer = listening.accept()
        found.append([client.getpeername()[0], peer[0], peer[1] == client.getsockname()[1]])
listening.close()
try:
    socket.create_connection(("127.0.0.1", number), 5)
except ConnectionRefusedError:
    found.append("refused")
print(json.dumps(found))
"""


@contextmanager
def without_tun(testbed: Testbed, host: str) -> Iterator[None]:
    """/dev/net is empty there. Undone by whoever covers it as soon as its input ends: also when this test is killed."""
    cover = "mount -t tmpfs lacking /dev/net && echo covered && cat; umount /dev/net"
    process = testbed.popen(["sh", "-c", cover], host=host, user="root", stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"covered\n"
        yield
    finally:
        process.communicate(timeout=20)
        assert process.returncode == 0


@pytest.fixture(scope="module")
def net(testbed: Testbed, cluster: str) -> Iterator[Net]:
    """`lone`, `twin` and `web` on the host that lacks TUN, all with port 80; `away` on one that has it."""
    with network_namespace(testbed, cluster) as net:
        serve = "echo hello >/tmp/index.html; exec python3 -m http.server -d /tmp 80"
        alive = probe(httpGet={"port": 80, "path": "/index.html"})
        asked = {"readinessProbe": alive, "livenessProbe": {**alive, "failureThreshold": 3}}
        net.apply(
            agent("away", "tcp:80", "tcp:8080", host=ELSEWHERE, labels={"app": "away"}),
            service("to-away", {"app": "away"}, port(8000, 80)),
            service("to-lone", {"app": "lone"}, port(8000, 80)),
            service("to-web", {"app": "web"}, port(8000, 80)),
        )
        with without_tun(testbed, HOST):
            net.apply(
                agent("lone", "tcp:80", "tcp:8080", host=HOST, labels={"app": "lone"}),
                agent("twin", "tcp:80", host=HOST, labels={"app": "twin"}),
                placed("web", serve, HOST, labels={"app": "web"}, container=asked, restartPolicy="Always"),
            )
            net.ready(*LACKING)
        net.ready("away")
        for name in ("lone", "twin", "away"):
            net.listening(name)
        eventually(lambda: isinstance(net.ask_one("away", "who", net.cluster_ip("to-lone"), 8000), dict), 10)
        yield net


def test_pods_say_which_network_they_have_and_why(net: Net) -> None:
    for name in LACKING:
        eventually(lambda name=name: net.told(name, "NetworkMode", "'no-netns'"), 10)  # type: ignore[misc]
        assert net.told(
            name, "NetworkMode", "users of this node cannot open /dev/net/tun (No such file or directory)"
        )
    assert "NetworkMode" not in [reason for reason, _ in net.events("away")]


def test_doctor_says_so(testbed: Testbed) -> None:
    with without_tun(testbed, HOST):
        done = testbed.run(["slurmlet", "doctor", "--node", "-o", "json"], host=HOST)
    lines = {line["what"]: line for line in json.loads(done.stdout)["lines"]}
    assert (lines["pod network"]["found"], lines["pod network"]["status"]) == ("no-netns", "degraded")
    assert lines["TUN"]["status"] == "degraded"
    assert lines["network namespaces"]["status"] == "ok"
    assert "/dev/net/tun" in done.stderr


def test_addresses_are_pods_own(net: Net) -> None:
    found = {net.ip(name) for name in (*LACKING, "away")}
    pod_range = ipaddress.ip_network(Cluster(net.testbed, net.cluster).read("cluster.json")["pod_range"])
    assert len(found) == 4
    assert all(ipaddress.ip_address(ip) in pod_range for ip in found)
    assert {net.pod(name)["status"]["hostIP"] for name in LACKING} == {address_of(HOST)}


@pytest.mark.parametrize(
    ("client", "server"),
    [("lone", "away"), ("away", "lone"), ("lone", "twin"), ("twin", "lone"), ("lone", "lone")],
)
def test_tcp_goes_both_ways(net: Net, client: str, server: str) -> None:
    who, up, down, closed = net.ask(
        client,
        ("who", net.ip(server), 80, None),
        ("push", net.ip(server), 80, SIZE_BYTES),
        ("pull", net.ip(server), 80, SIZE_BYTES),
        ("who", net.ip(server), 81, None),
    )
    assert (who["name"], who["peer"][0], who["sock"]) == (server, net.ip(client), [net.ip(server), 80])
    assert (up, down, closed) == (True, True, "ConnectionRefusedError")


def test_programs_see_the_pods_addresses(net: Net) -> None:
    for host, number in ((net.ip("away"), 80), (net.cluster_ip("to-away"), 8000)):
        said = json.loads(net.run("lone", "python3", "-c", NAMES, host, str(number)).stdout)
        assert said == [net.ip("lone"), net.ip("lone"), [host, number]]


def test_loopback_is_the_pods_own(net: Net) -> None:
    """`lone` and `twin` both listen on 80; what one opens on loopback, the other does not reach."""
    for name in ("lone", "twin"):
        assert net.ask_one(name, "who", "127.0.0.1", 80)["name"] == name
    assert net.ask_one("twin", "who", "127.0.0.1", 8080) == "ConnectionRefusedError"
    said = json.loads(net.run("lone", "python3", "-c", INSIDE).stdout)
    assert said == [["127.0.0.1", "::ffff:127.0.0.1", True], ["::1", "::1", True], "refused"]


@pytest.mark.parametrize("client", ["lone", "away"])
def test_services_by_address_and_name(net: Net, client: str) -> None:
    for server in ("away", "lone"):
        name = f"to-{server}"
        hosts = (net.cluster_ip(name), name, f"{name}.{net.namespace}", net.name_of(name))
        answers = net.ask(client, *(("who", host, 8000, None) for host in hosts))
        assert [each["name"] for each in answers] == [server] * len(hosts)
    assert net.ask_one(client, "who", net.cluster_ip("to-away"), 8001) == "ConnectionRefusedError"
    assert net.ask_one(client, "resolve", "to-away") == [net.cluster_ip("to-away")]
    assert net.ask_one(client, "resolve", "no-such-service") == "gaierror"


def test_curl_by_name(net: Net) -> None:
    said = net.run("lone", "curl", "-sS", "--max-time", "10", "http://to-web:8000/index.html")
    assert said.stdout == "hello\n"


def test_the_api_server_is_reached_by_its_service(net: Net) -> None:
    url = "https://kubernetes.default.svc/version"
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    ask = f'exec curl -sS --max-time 10 --cacert {token}/ca.crt -H "Authorization: Bearer $(cat {token}/token)" {url}'
    assert json.loads(net.run("lone", "sh", "-c", ask).stdout)["major"] == "1"


def test_port_forward(net: Net) -> None:
    forward = Forward(net, "web", 80)
    try:
        url = f"http://127.0.0.1:{forward.local[80]}/index.html"
        assert net.testbed.run(["curl", "-sS", "--max-time", "10", url]).stdout == "hello\n"
    finally:
        forward.stop()


def test_an_http_probe_notices(net: Net) -> None:
    """It made `web` ready; once what it asks for is gone, the container is started again, and has it."""
    net.run("web", "rm", "/tmp/index.html")

    def restarted() -> bool:
        (status,) = net.pod("web")["status"]["containerStatuses"]
        return bool(status["restartCount"] == 1 and status["ready"])

    eventually(restarted, 30)
    net.tells("web", "Unhealthy", words="404")
    assert (
        net.run("lone", "curl", "-sS", "--max-time", "10", "http://to-web:8000/index.html").stdout
        == "hello\n"
    )


def test_a_netd_that_is_killed_has_a_successor(net: Net) -> None:
    """Who listens goes on listening, and its names are the pod's own still."""
    netd = of_pod(net.testbed, HOST, net.pod("lone"))["netd"]
    net.testbed.run(["kill", "-KILL", str(netd.pid)], host=HOST, user="root")
    for client, server in (("away", "lone"), ("lone", "away"), ("lone", "lone")):
        who = net.ask_one(client, "who", net.ip(server), 80, 5)
        assert (who["name"], who["peer"][0], who["sock"]) == (server, net.ip(client), [net.ip(server), 80])
    assert of_pod(net.testbed, HOST, net.pod("lone"))["netd"].pid != netd.pid


def test_policy_holds_for_tcp_and_says_that_it_holds_for_no_more(net: Net) -> None:
    def hears(client: str, server: str, number: int = 80) -> bool:
        said = net.ask_one(client, "who", net.ip(server), number, 1.5)
        assert isinstance(said, dict) or said == "TimeoutError", said
        return isinstance(said, dict)

    def hold(**spec: Any) -> None:
        net.apply(
            {
                "apiVersion": "networking.k8s.io/v1",
                "kind": "NetworkPolicy",
                "metadata": {"name": "lone"},
                "spec": {"podSelector": {"matchLabels": {"app": "lone"}}, **spec},
            }
        )

    friends = [{"from": [{"podSelector": {"matchLabels": {"app": "away"}}}], "ports": [{"port": 80}]}]
    try:
        hold(ingress=[])
        eventually(lambda: not hears("away", "lone"), 10)
        assert not hears("twin", "lone")
        assert hears("lone", "away")
        eventually(lambda: net.told("lone", "NetworkPolicyNotEnforced", "beyond TCP"), 10)
        hold(ingress=friends)
        eventually(lambda: hears("away", "lone"), 10)
        assert not hears("away", "lone", 8080)
        assert not hears("twin", "lone")
        hold(policyTypes=["Egress"], egress=[{"to": [{"podSelector": {"matchLabels": {"app": "twin"}}}]}])
        eventually(lambda: not hears("lone", "away"), 10)
        assert hears("lone", "twin")
        assert hears("away", "lone")
    finally:
        net("delete", "networkpolicy", "--all")
    eventually(lambda: hears("lone", "away"), 10)
