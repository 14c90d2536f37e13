"""What the hub does for the pod network: addresses, ranges, load balancers, the Service of the DNS, and its own restarts."""

from __future__ import annotations

import ipaddress
from functools import partial
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import CLUSTER, Kubectl, eventually, pod
from tests.e2e.inspecting import Cluster

pytestmark = pytest.mark.e2e

SERVE = "mkdir /www; hostname > /www/index.html; exec httpd -f -p 80 -h /www"
# Asks without end and writes down how often it went well, and every failure.
ASK = """
ok=0
while [ ! -e /tmp/end ]; do
  if wget -qO- -T 3 http://$0/ >/dev/null 2>/tmp/error; then ok=$((ok+1)); else cat /tmp/error; fi
done
echo asked $ok
"""


def web(name: str) -> dict[str, Any]:
    # Nobody is sent there before it listens.
    ready = {"readinessProbe": {"httpGet": {"port": 80, "path": "/"}, "periodSeconds": 1}}
    return pod(name, SERVE, metadata={"labels": {"app": "web"}}, container=ready)


def service(name: str, *ports: dict[str, Any], **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"selector": {"app": "web"}, "ports": list(ports), **spec},
    }


def test_every_pod_has_an_address_of_its_own_and_keeps_it(kubectl: Kubectl, testbed: Testbed) -> None:
    here = Cluster(testbed, CLUSTER)
    env = {"env": [{"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}
    names = ["a", "b", "c"]
    kubectl.apply(*(pod(name, "echo $IP; sleep 3600", container=env) for name in names))
    found = {name: kubectl.wait_phase(name, "Running")["status"] for name in names}
    ips = {name: status["podIP"] for name, status in found.items()}
    range_ = ipaddress.ip_network(here.read("cluster.json")["pod_range"])
    assert len(set(ips.values())) == len(names)
    for name in names:
        assert ipaddress.ip_address(ips[name]) in range_
        assert found[name]["hostIP"] != ips[name]
        assert kubectl("logs", name).stdout.strip() == ips[name]
        assert f"inet {ips[name]}/" in kubectl("exec", name, "--", "ip", "addr").stdout
    here.signal(here.pid("hub"), "KILL")
    kubectl.apply(pod("later"))
    later = kubectl.wait_phase("later", "Running")["status"]["podIP"]
    assert later not in ips.values()
    assert {name: kubectl.pod(name)["status"]["podIP"] for name in names} == ips


def test_a_hub_that_is_killed_costs_no_connection(kubectl: Kubectl, testbed: Testbed) -> None:
    here = Cluster(testbed, CLUSTER)
    kubectl.apply(web("one"), web("two"), service("web", {"port": 8080, "targetPort": 80}), pod("client"))
    for name in ("one", "two", "client"):
        kubectl.wait_phase(name, "Running")
    kubectl("exec", "client", "--", "sh", "-c", "until wget -qO- -T 1 http://web:8080/; do sleep 0.2; done")
    kubectl("exec", "client", "--", "sh", "-c", f"sh -c '{ASK}' web:8080 >/tmp/said 2>&1 </dev/null &")
    before = here.pid("hub")
    here.signal(before, "KILL")
    eventually(lambda: here.pid("hub") != before and here.read("hub.json")["pid"] == int(here.pid("hub")))
    # Another backend, told by the new hub: what it says is whole again.
    kubectl.apply(web("three"))
    kubectl.wait_phase("three", "Running")
    ask = [
        "exec",
        "client",
        "--",
        "sh",
        "-c",
        "for i in 1 2 3 4 5 6; do wget -qO- -T 3 http://web:8080/; done",
    ]
    eventually(lambda: set(kubectl(*ask, check=False).stdout.split()) == {"one", "two", "three"}, 30)
    kubectl("exec", "client", "--", "touch", "/tmp/end")
    said = eventually(
        lambda: "asked" in (text := kubectl("exec", "client", "--", "cat", "/tmp/said").stdout) and text
    )
    assert said.split()[0] == "asked", said
    assert int(said.split()[1]) > 20


def fetched(testbed: Testbed, argv: list[str]) -> bool:
    return testbed.run(argv, host="c2", check=False).stdout.strip() == "one"


def test_load_balancers_are_served_by_the_login_host(kubectl: Kubectl, testbed: Testbed) -> None:
    address = Cluster(testbed, CLUSTER).read("cluster.json")["api_address"]
    high = {"name": "high", "port": 18080, "targetPort": 80}
    low = {"name": "low", "port": 80, "targetPort": 80}
    kubectl.apply(web("one"), service("web", high, low, type="LoadBalancer"))
    kubectl.wait_phase("one", "Running")
    told = eventually(lambda: kubectl.get("service", "web")["status"]["loadBalancer"].get("ingress"))
    errors = {one["port"]: one.get("error") for one in told[0]["ports"]}
    assert (told[0]["ip"], errors) == (address, {18080: None, 80: "PortNeedsRoot"})
    eventually(lambda: kubectl.told("web", "LoadBalancer", f"served at {address}:18080"))
    node_port = next(
        p["nodePort"] for p in kubectl.get("service", "web")["spec"]["ports"] if p["name"] == "low"
    )
    eventually(lambda: kubectl.told("web", "LoadBalancer", f"served at its nodePort, {address}:{node_port}"))
    for port in (18080, node_port):
        fetch = ["curl", "-s", "-m", "3", f"http://{address}:{port}/"]
        eventually(partial(fetched, testbed, fetch), 15)
    kubectl.apply(service("taken", {"port": 18080, "targetPort": 80}, type="LoadBalancer"))
    eventually(lambda: kubectl.told("taken", "LoadBalancer", "another Service uses it"))
    kubectl("delete", "service", "web", "taken")
    refused = ["curl", "-s", "-m", "3", f"http://{address}:18080/"]
    eventually(lambda: testbed.run(refused, host="c2", check=False).code == 7, 15)


def test_the_service_of_the_dns_comes_back(kubectl: Kubectl) -> None:
    system = Kubectl(kubectl.testbed, "kube-system")
    before = system.get("service", "kube-dns")
    system("delete", "service", "kube-dns")

    def again() -> Any:
        listed = system.get("services", None, "--field-selector", "metadata.name=kube-dns")["items"]
        return listed and listed[0]

    made = eventually(again, 10)
    assert made["metadata"]["uid"] != before["metadata"]["uid"]
    assert made["spec"]["clusterIP"] == before["spec"]["clusterIP"]
    kubectl.apply(pod("asks", "nslookup kubernetes.default.svc.cluster.local"))
    kubectl.wait_phase("asks", "Succeeded")


def test_ranges_that_cannot_be_are_refused_by_their_option(testbed: Testbed, cluster: str) -> None:
    up = ["slurmlet", "up", "-c"]
    address = Cluster(testbed, cluster).read("cluster.json")["api_address"]
    used = str(ipaddress.ip_network(f"{address}/24", strict=False))
    for option in ("--pod-range", "--service-range"):
        refused = testbed.run([*up, "ranged", option, used], check=False)
        assert (refused.code, f"{option} {used} overlaps" in refused.stderr) == (1, True), refused.stderr
        other = testbed.run([*up, cluster, option, "10.11.0.0/16"], check=False)
        assert (other.code, "the range of this cluster is" in other.stderr) == (1, True), other.stderr
