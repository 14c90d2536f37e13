"""Who reaches whom: pods of one host and of two, Services, node ports, hosts, the API server, DNS; TCP, UDP and echo."""

from __future__ import annotations

import ipaddress
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import eventually
from tests.e2e.inspecting import Cluster
from tests.e2e.network_pods import (
    TOOLS,
    Net,
    agent,
    host_agent,
    network_namespace,
    placed,
    port,
    service,
)

pytestmark = pytest.mark.e2e

LARGE_BYTES = 16 << 20
SMALL_BYTES = 1000
# A datagram of any size a kernel lets through: one in a packet, one in fragments, one near the limit.
DATAGRAM_BYTES = (1, 1200, 9000, 60_000)
HOST_PORT = random.randrange(20000, 30000)
NODE_PORT = random.randrange(30100, 32700)
PORTS = ("tcp:80", "tcp:8080", "udp:53", "udp:5353")
# One that is not root wherever that is possible: port 80 is anybody's in a pod.
NOBODY = {
    "securityContext": {
        "runAsUser": 1000,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
}


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    """`here` and `beside` on one host, `away` on another; a Service and a node port for `away`."""
    with network_namespace(testbed, cluster) as net:
        selector = {"app": "away"}
        twice = (port(8000, 80, "tcp"), port(8053, 5353, "udp", "UDP"))
        # One node port for two protocols: upstream's allocator wants one port of the Service for it too.
        numbered = (
            port(8000, 80, "tcp", nodePort=NODE_PORT),
            port(8000, 5353, "udp", "UDP", nodePort=NODE_PORT),
        )
        net.apply(
            agent("here", *PORTS, host="c1"),
            agent("beside", *PORTS, host="c1", container=NOBODY),
            agent("away", *PORTS, host="c2", labels=selector),
            service("away", selector, *twice),
            service("ported", selector, *numbered, type="NodePort"),
        )
        for name in ("here", "beside", "away"):
            net.ready(name)
            net.listening(name)
        eventually(lambda: net.ask_one("here", "who", net.cluster_ip("away"), 8000)["name"] == "away", 10)
        yield net


def target(net: Net, where: str) -> tuple[str, int, int]:
    """(address, TCP port, UDP port) of a destination in words."""
    if where in ("here", "beside", "away"):
        return net.ip(where), 8080, 5353
    if where == "the Service":
        return net.cluster_ip("away"), 8000, 8053
    if where == "the Service's name":
        return net.name_of("away"), 8000, 8053
    return address_of(where.removeprefix("node port of ")), NODE_PORT, NODE_PORT


DESTINATIONS = (
    "here",
    "beside",
    "away",
    "the Service",
    "the Service's name",
    "node port of c2",
    "node port of login",
)


@pytest.mark.parametrize("where", DESTINATIONS)
def test_a_pod_reaches_by_tcp(net: Net, where: str) -> None:
    host, tcp, _ = target(net, where)
    who, small, up, down = net.ask(
        "here",
        ("who", host, tcp, None),
        ("push", host, tcp, SMALL_BYTES),
        ("push", host, tcp, LARGE_BYTES),
        ("pull", host, tcp, LARGE_BYTES),
    )
    assert who["name"] == (where if where in ("here", "beside") else "away")
    assert (small, up, down) == (True, True, True)
    if where in ("here", "beside", "away"):
        assert (who["peer"][0], who["sock"]) == (net.ip("here"), [net.ip(where), 8080])


@pytest.mark.parametrize("where", DESTINATIONS)
def test_a_pod_reaches_by_udp(net: Net, where: str) -> None:
    host, _, udp = target(net, where)
    who, *whole = net.ask(
        "here", ("udp_who", host, udp, None), *(("udp_echo", host, udp, size) for size in DATAGRAM_BYTES)
    )
    assert who["name"] == (where if where in ("here", "beside") else "away")
    assert whole == [True] * len(DATAGRAM_BYTES)
    if where in ("here", "beside", "away"):
        assert who["peer"][0] == net.ip("here")


@pytest.mark.parametrize("where", ["here", "beside", "away"])
def test_a_pod_is_answered_by_echo(net: Net, where: str) -> None:
    for size in ("56", "5000"):
        said = net.run("here", "ping", "-c", "3", "-i", "0.2", "-W", "2", "-s", size, net.ip(where))
        assert " 3 received" in said.stdout


@pytest.mark.parametrize("host", ["c2", "c3", "login"])
def test_a_pod_reaches_a_host(net: Net, host: str) -> None:
    with host_agent(net.testbed, host, f"tcp:{HOST_PORT}", f"udp:{HOST_PORT}") as address:
        who, up, down, by_udp, large = net.ask(
            "here",
            ("who", address, HOST_PORT, None),
            ("push", address, HOST_PORT, LARGE_BYTES),
            ("pull", address, HOST_PORT, LARGE_BYTES),
            ("udp_who", address, HOST_PORT, None),
            ("udp_echo", address, HOST_PORT, 9000),
        )
    assert (who["name"], by_udp["name"]) == (host, host)
    assert (up, down, large) == (True, True, True)
    assert who["peer"][0] == address_of("c1")


def test_a_pod_is_answered_by_a_host(net: Net) -> None:
    assert (
        " 2 received" in net.run("here", "ping", "-c", "2", "-i", "0.2", "-W", "2", address_of("c2")).stdout
    )


@pytest.mark.parametrize("host", ["login", "c1", "c2"])
def test_a_host_reaches_a_pod_by_its_node_port(net: Net, host: str) -> None:
    answers = net.ask_from_host(
        host,
        ("who", address_of(host), NODE_PORT, None),
        ("push", address_of(host), NODE_PORT, LARGE_BYTES),
        ("udp_who", address_of(host), NODE_PORT, None),
    )
    assert answers[0]["name"] == answers[2]["name"] == "away"
    assert answers[1] is True


def test_a_person_reaches_names_of_the_cluster_by_the_proxy(net: Net) -> None:
    process = net.testbed.popen(["slurmlet", "proxy", "-c", net.cluster, "-n", net.namespace, "-o", "json"])
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(5)]
        shown = json.loads(b"".join(lines))
        net.apply(
            service("web", {"app": "web"}, port(80)),
            placed("web", "python3 -m http.server 80", labels={"app": "web"}),
        )
        net.ready("web")
        for proxy, host in (
            (shown["socks5"], net.name_of("web")),
            (shown["http"], "web"),
            (shown["http"], net.ip("web")),
        ):
            fetch = [
                "curl",
                "-sS",
                "--max-time",
                "5",
                "-x",
                proxy,
                "-o",
                "/dev/null",
                "-w",
                "%{http_code}",
                f"http://{host}/",
            ]
            eventually(lambda fetch=fetch: net.testbed.run(fetch, check=False).stdout == "200", 15)  # type: ignore[misc]
    finally:
        net.testbed.stop(process)


def test_the_api_server_reaches_a_pod(net: Net) -> None:
    """`kubectl proxy` and everything aggregated goes this way."""
    net.apply(
        placed(
            "page", "mkdir /tmp/w; echo hello >/tmp/w/index.html; exec python3 -m http.server -d /tmp/w 80"
        )
    )
    net.ready("page")
    path = f"/api/v1/namespaces/{net.namespace}/pods/page:80/proxy/"
    eventually(lambda: net("get", "--raw", path, check=False).stdout == "hello\n", 15)


# --- the API server and DNS from inside ----------------------------------------------------------------------------

REVIEWER = """
import json, os, ssl, urllib.request
folder = "/var/run/secrets/kubernetes.io/serviceaccount"
context = ssl.create_default_context(cafile=f"{folder}/ca.crt")
for host in ("kubernetes.default", "kubernetes.default.svc.cluster.local", os.environ["KUBERNETES_SERVICE_HOST"]):
    request = urllib.request.Request(f"https://{host}:{os.environ['KUBERNETES_SERVICE_PORT']}/apis/authentication.k8s.io/v1/selfsubjectreviews",
        json.dumps({"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + open(f"{folder}/token").read()})
    with urllib.request.urlopen(request, context=context, timeout=10) as answer:
        print(json.load(answer)["status"]["userInfo"]["username"])
"""


@pytest.mark.parametrize("pod", ["here", "away"])
def test_a_pod_is_itself_to_the_api_server(net: Net, pod: str) -> None:
    said = net.run(pod, "python3", "-c", REVIEWER).stdout.split()
    assert said == [f"system:serviceaccount:{net.namespace}:default"] * 3


def test_a_go_client_watches_from_inside(net: Net) -> None:
    """kubectl as it is, with the account of the pod: HTTP/2 over the Service."""
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    rbac = "rbac.authorization.k8s.io"
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": net.namespace}
    net.apply(
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": "look"}, "rules": [rule]},
        {"apiVersion": f"{rbac}/v1", "kind": "RoleBinding", "metadata": {"name": "look"}, "subjects": [subject],
         "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "look"}},
    )  # fmt: skip
    said = net.run("here", "kubectl", "get", "pods", "-o", "name").stdout
    assert "pod/away" in said
    assert net.run("here", "kubectl", "wait", "--for=condition=Ready", "pod/away", "--timeout=10s").stdout


def test_a_pod_asks_dns_by_udp_and_tcp(net: Net) -> None:
    (server,) = [
        line.split()[1]
        for line in net.run("here", "cat", "/etc/resolv.conf").stdout.splitlines()
        if line.startswith("nameserver")
    ]
    for how in ("+notcp", "+tcp"):
        said = net.run("here", "dig", how, "+short", f"@{server}", net.name_of("away")).stdout
        assert said.split() == [net.cluster_ip("away")]


# --- addresses -----------------------------------------------------------------------------------------------------


def test_every_pod_has_an_address_of_its_own(net: Net) -> None:
    names = ("here", "beside", "away")
    addresses = [net.ip(name) for name in names]
    assert len(set(addresses)) == 3
    pods = ipaddress.ip_network(str(Cluster(net.testbed, net.cluster).read("cluster.json")["pod_range"]))
    assert all(ipaddress.ip_address(address) in pods for address in addresses)
    assert net.pod("here")["status"]["hostIP"] == address_of("c1")
    assert net.pod("here")["status"]["podIPs"] == [{"ip": net.ip("here")}]


@pytest.mark.parametrize("name", ["here", "beside", "away"])
def test_a_pod_sees_its_address(net: Net, name: str) -> None:
    address = net.ip(name)
    shown = net.run(name, "ip", "-4", "-o", "addr", "show", "dev", "eth0").stdout
    assert f" {address}/" in shown
    assert net.run(name, "hostname", "-i").stdout.split() == [address]
    assert (
        net.run(name, "ip", "route", "get", net.ip("away" if name == "here" else "here"))
        .stdout.split()
        .count(address)
        == 1
    )
    local = "import socket; s = socket.create_connection(('{}', 8080)); print(s.getsockname()[0])"
    assert net.run(name, "python3", "-c", local.format(net.ip("beside"))).stdout.strip() == address


def test_two_pods_of_one_host_both_have_port_80(net: Net) -> None:
    for name in ("here", "beside"):
        assert net.ask_one("away", "who", net.ip(name), 80)["name"] == name
        assert net.ask_one("away", "udp_who", net.ip(name), 53)["name"] == name
    assert net.run("beside", "id", "-u").stdout == "1000\n"


def test_containers_of_a_pod_share_localhost(net: Net) -> None:
    other = agent("x", "tcp:81", "udp:81")["spec"]["containers"][0]
    net.apply(agent("both", "tcp:80", more_containers=[{**other, "name": "other"}]))
    net.ready("both")
    net.listening("both")
    net.listening("both", "other")
    answers = net.ask(
        "both",
        ("who", "127.0.0.1", 81, None),
        ("who", "localhost", 80, None),
        ("udp_who", "127.0.0.1", 81, None),
    )
    assert [answer["name"] for answer in answers] == ["both"] * 3
    taken = net.run(
        "both", "python3", "-c", "import socket; socket.socket().bind(('0.0.0.0', 81))", check=False
    )
    assert "Address already in use" in taken.stderr
    assert net.ask_one("here", "who", "127.0.0.1", 81) == "ConnectionRefusedError"


def test_a_pod_with_the_hosts_network_is_the_host(net: Net) -> None:
    number = random.randrange(20000, 30000)
    net.apply(agent("bare", f"tcp:{number}", host="c3", hostNetwork=True))
    net.ready("bare")
    net.listening("bare")
    assert net.ip("bare") == address_of("c3")
    assert net.ask_one("here", "who", address_of("c3"), number)["sock"] == [address_of("c3"), number]
    # Untouched means that it has a host's ways only: pods answer it at their node ports.
    assert net.ask_one("bare", "who", address_of("c2"), NODE_PORT)["name"] == "away"


def test_an_ended_pods_address_does_not_answer(net: Net) -> None:
    net.apply(agent("brief", "tcp:80"))
    net.ready("brief")
    net.listening("brief")
    address = net.ip("brief")
    assert net.ask_one("here", "who", address, 80)["name"] == "brief"
    net("delete", "pod", "brief", "--wait=true")
    assert eventually(lambda: isinstance(net.ask_one("here", "who", address, 80), str), 10)


def test_an_address_without_a_pod_does_not_hang_for_ever(net: Net) -> None:
    unused = str(ipaddress.ip_address(net.ip("here")) + 5000)
    assert net.ask_one("here", "who", unused, 80, 3) in ("TimeoutError", "OSError", "ConnectionRefusedError")


def test_the_agent_image_needs_no_registry(net: Net) -> None:
    assert net.pod("here")["status"]["containerStatuses"][0]["image"] == TOOLS
