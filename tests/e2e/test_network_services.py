"""Services as upstream defines them, seen from pods and hosts: every type and policy, changes while connections are open."""

from __future__ import annotations

import collections
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import eventually
from tests.e2e.network_pods import Net, agent, network_namespace, port, probe, service

pytestmark = pytest.mark.e2e

REFUSED = "ConnectionRefusedError"
WEB = {"app": "web"}
# kube-proxy drops or rejects by kind of policy; either way nobody answers.
NOBODY_ANSWERS = (REFUSED, "TimeoutError", "OSError")
EXTERNAL_IP = f"203.0.113.{random.randrange(2, 250)}"
NAMED = [{"name": "www", "containerPort": 80}, {"name": "ask", "containerPort": 53, "protocol": "UDP"}]


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    """Three backends `web-0…2` on three hosts, the clients `client` (c1) and `other` (c2)."""
    with network_namespace(testbed, cluster) as net:
        for number in range(3):
            labels = {**WEB, "one": str(number)}
            ports = ("tcp:80", "tcp:81", "udp:53")
            net.apply(
                agent(
                    f"web-{number}", *ports, host=f"c{number + 1}", labels=labels, container={"ports": NAMED}
                )
            )
        net.apply(agent("client", "tcp:80", host="c1"), agent("other", "tcp:80", host="c2"))
        names = ["web-0", "web-1", "web-2", "client", "other"]
        net.ready(*names)
        for name in names:
            net.listening(name)
        yield net


def serve(net: Net, name: str, selector: dict[str, str] | None, *ports: dict[str, Any], **spec: Any) -> str:
    """The cluster IP of a new Service."""
    net.apply(service(name, selector, *ports, **spec))
    return net.cluster_ip(name)


def answers(net: Net, host: str, number: int, who: str = "client") -> None:
    """Wait until a Service answers: it was made a moment ago."""
    eventually(lambda: isinstance(net.ask_one(who, "who", host, number), dict), 10)


def test_port_and_target_differ_and_names_are_looked_up(net: Net) -> None:
    ports = (port(8000, 81, "a"), port(8001, "www", "b"), port(8002, "ask", "c", "UDP"))
    ip = serve(net, "several", WEB, *ports)
    answers(net, ip, 8000)
    first, second, third = net.ask(
        "client", ("who", ip, 8000, None), ("who", ip, 8001, None), ("udp_who", ip, 8002, None)
    )
    assert (first["sock"][1], second["sock"][1]) == (81, 80)
    assert third["name"].startswith("web-")
    assert third["answered_from"] == [ip, 8002]
    assert net.ask_one("client", "who", ip, 8009) == REFUSED


@pytest.mark.parametrize(("verb", "number"), [("many", 80), ("udp_many", 53)])
def test_the_spread_is_even(net: Net, verb: str, number: int) -> None:
    ip = serve(net, "spread", WEB, port(80, 80, "tcp"), port(53, 53, "udp", "UDP"))
    answers(net, ip, 80)
    count = 300
    seen = collections.Counter(net.ask_one("client", verb, ip, number, count))
    assert set(seen) == {"web-0", "web-1", "web-2"}
    # Five deviations of a fair choice from its mean; a fault in turn or in weights shows.
    assert all(abs(times - count / 3) < 42 for times in seen.values()), seen


def test_a_backend_reaches_itself_through_its_service(net: Net) -> None:
    ip = serve(net, "hairpin", {"one": "0"}, port(8080, 80))
    answers(net, ip, 8080, "web-0")
    assert net.ask_one("web-0", "who", ip, 8080)["name"] == "web-0"


def test_session_affinity_keeps_a_client_with_its_backend(net: Net) -> None:
    ip = serve(net, "sticky", WEB, port(80), sessionAffinity="ClientIP")
    answers(net, ip, 80)
    assert len(set(net.ask_one("client", "many", ip, 80, 20))) == 1
    assert len(set(net.ask_one("other", "many", ip, 80, 20))) == 1


def test_no_backend_is_a_refusal(net: Net) -> None:
    ip = serve(net, "nobody", {"app": "nobody"}, port(80))
    assert eventually(lambda: net.ask_one("client", "who", ip, 80) == REFUSED, 5)


def test_only_ready_backends_are_used_unless_it_says_otherwise(net: Net) -> None:
    check = probe(exec={"command": ["test", "-e", "/tmp/ready"]})
    net.apply(agent("slow", "tcp:80", labels={"app": "slow"}, container={"readinessProbe": check}))
    plain = serve(net, "slow", {"app": "slow"}, port(80))
    early = serve(net, "early", {"app": "slow"}, port(80), publishNotReadyAddresses=True)
    net.listening("slow")
    answers(net, early, 80)
    assert net.ask_one("client", "who", plain, 80) == REFUSED
    net.run("slow", "touch", "/tmp/ready")
    answers(net, plain, 80)
    net.run("slow", "rm", "/tmp/ready")
    eventually(lambda: net.ask_one("client", "who", plain, 80) == REFUSED, 10)


def test_a_headless_service_is_its_pods(net: Net) -> None:
    net.apply(service("headless", WEB, port(80), clusterIP="None"))
    wanted = sorted(net.ip(f"web-{number}") for number in range(3))
    eventually(lambda: net.ask_one("client", "resolve", net.name_of("headless")) == wanted, 10)
    assert net.ask_one("client", "who", net.name_of("headless"), 80)["name"].startswith("web-")


def test_an_external_name_is_another_name(net: Net) -> None:
    serve_name = net.name_of("several-target")
    net.apply(
        service("several-target", {"one": "1"}, port(80)),
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "alias"},
         "spec": {"type": "ExternalName", "externalName": serve_name}},
    )  # fmt: skip
    eventually(lambda: net.ask_one("client", "who", net.name_of("alias"), 80) not in NOBODY_ANSWERS, 10)
    assert net.ask_one("client", "who", "alias", 80)["name"] == "web-1"
    assert (
        net.run("client", "dig", "+short", "CNAME", net.name_of("alias")).stdout.strip() == f"{serve_name}."
    )


def test_external_addresses_lead_to_the_service(net: Net) -> None:
    serve(net, "outer", {"one": "2"}, port(8080, 80), externalIPs=[EXTERNAL_IP])
    answers(net, EXTERNAL_IP, 8080)
    assert net.ask_one("client", "who", EXTERNAL_IP, 8080)["name"] == "web-2"


def test_node_ports_answer_on_hosts_with_pods_and_on_the_login_host(net: Net) -> None:
    serve(net, "ported", WEB, port(80, 80, "tcp"), port(53, 53, "udp", "UDP"), type="NodePort")
    numbers = {one["name"]: one["nodePort"] for one in net.get("service", "ported")["spec"]["ports"]}
    for host in ("login", "c1", "c2", "c3"):
        address = address_of(host)
        answers(net, address, numbers["tcp"])
        assert net.ask_one("client", "udp_who", address, numbers["udp"])["name"].startswith("web-")
        who, by_udp = net.ask_from_host(
            "login", ("who", address, numbers["tcp"], None), ("udp_who", address, numbers["udp"], None)
        )
        assert who["name"].startswith("web-")
        assert by_udp["name"].startswith("web-")


def test_a_load_balancer_is_the_login_host(net: Net) -> None:
    number = random.randrange(20000, 30000)
    serve(net, "balanced", WEB, port(number, 80), type="LoadBalancer")

    def ingress() -> Any:
        return (net.get("service", "balanced")["status"].get("loadBalancer") or {}).get("ingress")

    (given,) = eventually(ingress, 15)
    assert given["ip"] == address_of("login")
    answers(net, given["ip"], number)
    (who,) = net.ask_from_host("c3", ("who", given["ip"], number, None))
    assert who["name"].startswith("web-")


def test_traffic_may_stay_on_its_node(net: Net) -> None:
    """A node is a partition: the client of `batch` must not get the backend of `short`."""
    for name, partition in (("near", "batch"), ("far", "short")):
        where = {"slurmlet.io/partition": partition}
        net.apply(agent(name, "tcp:80", labels={"app": "local", "at": partition}, nodeSelector=where))
    net.ready("near", "far")
    net.listening("near")
    net.listening("far")
    ip = serve(net, "local", {"app": "local"}, port(80), internalTrafficPolicy="Local")
    only_far = serve(net, "local-far", {"at": "short"}, port(80), internalTrafficPolicy="Local")
    answers(net, ip, 80)
    assert set(net.ask_one("client", "many", ip, 80, 20)) == {"near"}
    assert set(net.ask_one("far", "many", ip, 80, 5)) == {"far"}
    assert net.ask_one("client", "who", only_far, 80) in NOBODY_ANSWERS
    # A wish, not a rule: who has nobody near goes to whoever there is.
    for wish in ("PreferSameNode", "PreferClose"):
        name = f"wish-{wish.lower()}"
        ip = serve(net, name, {"app": "local"}, port(80), trafficDistribution=wish)
        near = {"near"} if wish == "PreferSameNode" else {"near", "far"}
        eventually(lambda ip=ip, near=near: set(net.ask_one("client", "many", ip, 80, 20)) == near, 10)  # type: ignore[misc]
    ip = serve(net, "wish-far", {"at": "short"}, port(80), trafficDistribution="PreferSameNode")
    answers(net, ip, 80)
    assert set(net.ask_one("client", "many", ip, 80, 5)) == {"far"}


def slice_of(name: str, address: str) -> dict[str, Any]:
    """An EndpointSlice by hand, for a Service without a selector: the moment of a change is the test's own."""
    return {
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": {"name": f"{name}-1", "labels": {"kubernetes.io/service-name": name}},
        "ports": [{"name": "", "port": 80, "protocol": "TCP"}],
        "endpoints": [{"addresses": [address], "conditions": {"ready": True}}],
    }  # fmt: skip


def test_a_change_is_seen_within_half_a_second_and_connections_stay(net: Net) -> None:
    net.apply(service("moving", None, port(80)), slice_of("moving", net.ip("web-0")))
    ip = net.cluster_ip("moving")
    answers(net, ip, 80)
    seen: list[Any] = []
    watching = threading.Thread(target=lambda: seen.extend(net.ask_one("client", "watch", ip, 80, 6)))
    held = net.start("exec", "-i", "client", "--", "python3", "-u", "-c", HOLD, ip)
    try:
        assert held.stdin is not None
        assert held.stdout is not None
        assert held.stdout.readline() == b"open\n"
        watching.start()
        time.sleep(2)
        net.apply(slice_of("moving", net.ip("web-1")))
        changed_s = time.time()
        watching.join(30)
        held.stdin.write(b"still\n")
        held.stdin.flush()
        assert held.stdout.readline() == b"still\n"
    finally:
        net.testbed.stop(held)
    names = [name for _, name in seen]
    assert set(names) == {"web-0", "web-1"}, collections.Counter(names)
    assert max(at for at, name in seen if name == "web-0") < changed_s + 0.5
    assert len(seen) > 50


HOLD = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 80), 10)
connection.sendall(b"echo\\n")
print("open")
for line in sys.stdin:
    connection.sendall(line.encode())
    print(connection.recv(1000).decode(), end="")
"""


def test_a_deleted_service_is_gone(net: Net) -> None:
    ip = serve(net, "brief", WEB, port(80))
    answers(net, ip, 80)
    net("delete", "service", "brief")
    eventually(lambda: net.ask_one("client", "who", ip, 80, 2) in NOBODY_ANSWERS, 5)


def test_environment_names_services_that_were_there(net: Net) -> None:
    ip = serve(net, "earlier", WEB, port(8000, 80))
    net.apply(agent("later", "tcp:80"))
    net.ready("later")
    env = dict(line.split("=", 1) for line in net.run("later", "env").stdout.splitlines() if "=" in line)
    assert (env["EARLIER_SERVICE_HOST"], env["EARLIER_SERVICE_PORT"]) == (ip, "8000")
