"""Names in pods: every kind of record, the search list, dnsPolicy and dnsConfig, glibc's and musl's resolvers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from slurmlet.testbed.testbed_plan import address_of
from tests.e2e.conftest import eventually
from tests.e2e.network_pods import (
    CLUSTER_DOMAIN,
    Net,
    agent,
    network_namespace,
    placed,
    port,
    service,
    workload,
)

pytestmark = pytest.mark.e2e

MEMBER = {"app": "member"}


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    """`client`; the Service `web` before `server`; the StatefulSet `db` of two under the headless Service `db`."""
    with network_namespace(testbed, cluster) as net:
        members = agent("x", "tcp:5432", labels=MEMBER)
        net.apply(
            agent("client", "tcp:80"),
            agent("server", "tcp:80", "udp:53", labels={"app": "web"}),
            placed("named", "sleep 3600", labels={"app": "named"}, hostname="first", subdomain="group"),
            service("web", {"app": "web"}, port(8080, 80, "www"), port(53, 53, "ask", "UDP")),
            service("db", MEMBER, port(5432, name="sql"), clusterIP="None"),
            service("group", {"app": "named"}, port(1), clusterIP="None"),
            workload("StatefulSet", "db", members, 2, serviceName="db", podManagementPolicy="Parallel"),
        )
        net.ready("client", "server", "named")
        eventually(lambda: net.get("statefulset", "db")["status"].get("readyReplicas") == 2, 60)
        eventually(lambda: len(dig(net, net.name_of("db"))) == 2, 15)
        yield net


def dig(net: Net, *arguments: str) -> list[str]:
    return str(net.run("client", "dig", "+short", "+time=3", *arguments).stdout).split("\n")[:-1]


def resolved(net: Net, name: str) -> Any:
    return net.ask_one("client", "resolve", name)


def test_a_service_has_an_address_by_all_its_names(net: Net) -> None:
    for name in (
        "web",
        f"web.{net.namespace}",
        f"web.{net.namespace}.svc",
        net.name_of("web"),
        net.name_of("web") + ".",
    ):
        assert resolved(net, name) == [net.cluster_ip("web")], name


def test_a_service_of_another_namespace_is_found(net: Net) -> None:
    assert resolved(net, "kubernetes.default") == resolved(net, f"kubernetes.default.svc.{CLUSTER_DOMAIN}")


def test_a_headless_service_is_all_its_pods(net: Net) -> None:
    assert resolved(net, "db") == sorted(net.ip(f"db-{number}") for number in range(2))


def test_members_of_a_stateful_set_have_names(net: Net) -> None:
    for number in range(2):
        assert resolved(net, f"db-{number}.db") == [net.ip(f"db-{number}")]
        full = net.run(f"db-{number}", "hostname", "-f").stdout.strip()
        assert full == f"db-{number}.{net.name_of('db')}"


def test_a_pod_with_a_hostname_and_a_subdomain_has_a_name(net: Net) -> None:
    assert resolved(net, f"first.{net.name_of('group')}") == [net.ip("named")]


def test_ports_have_srv_records(net: Net) -> None:
    (record,) = dig(net, "SRV", f"_www._tcp.{net.name_of('web')}")
    assert record.split()[2:] == ["8080", net.name_of("web") + "."]
    (record,) = dig(net, "SRV", f"_ask._udp.{net.name_of('web')}")
    assert record.split()[2] == "53"
    targets = {record.split()[3] for record in dig(net, "SRV", f"_sql._tcp.{net.name_of('db')}")}
    assert targets == {f"db-{number}.{net.name_of('db')}." for number in range(2)}


def test_a_pod_has_a_name_made_of_its_address(net: Net) -> None:
    dashed = net.ip("server").replace(".", "-")
    assert dig(net, f"{dashed}.{net.namespace}.pod.{CLUSTER_DOMAIN}") == [net.ip("server")]


def test_addresses_have_names(net: Net) -> None:
    assert dig(net, "-x", net.cluster_ip("web")) == [net.name_of("web") + "."]
    assert dig(net, "-x", net.ip("db-0")) == [f"db-0.{net.name_of('db')}."]
    assert net.ask_one("client", "reverse", net.ip("db-1")) == f"db-1.{net.name_of('db')}"


def test_a_name_that_is_not_there_is_not_found(net: Net) -> None:
    assert resolved(net, "nobody") == "gaierror"
    assert resolved(net, net.name_of("nobody")) == "gaierror"
    said = net.run("client", "dig", net.name_of("nobody")).stdout
    assert "status: NXDOMAIN" in said


def test_names_outside_the_cluster_are_those_of_the_host(net: Net) -> None:
    assert resolved(net, "c2") == [address_of("c2")]
    assert resolved(net, "login") == [address_of("login")]
    assert resolved(net, "no-such-host.example.org") == "gaierror"


def refused(net: Net, argv: list[str]) -> str:
    """What a resolver of packages said that found no such version."""
    done = net.run("client", *argv, stdin="tiny==2.0\n", check=False)
    return str(done.stderr) if done.code and "tiny==2.0" in done.stderr else ""


def test_musl_asks_as_well_as_glibc(net: Net) -> None:
    """uv is linked with musl, which takes the first answer of all servers and searches its own way."""
    page = '<a href="tiny-1.0-py3-none-any.whl">tiny-1.0-py3-none-any.whl</a>'
    make = f"mkdir -p /tmp/w/simple/tiny; echo '{page}' >/tmp/w/simple/tiny/index.html"
    program = f"{make}; exec python3 -m http.server -d /tmp/w 80"
    net.apply(
        placed("index", program, labels={"app": "index"}), service("index", {"app": "index"}, port(8080, 80))
    )
    net.ready("index")
    for host in ("index", net.name_of("index")):
        argv = [
            "uv",
            "pip",
            "compile",
            "--no-cache",
            "-q",
            "--index-url",
            f"http://{host}:8080/simple",
            "/dev/stdin",
        ]
        said = eventually(partial(refused, net, argv), 10)
        # The index was read: what it has is told, and what it lacks.
        assert "there is no version of tiny==2.0" in said


def test_curl_asks_by_its_own_resolver(net: Net) -> None:
    fetch = ("curl", "-sS", "--max-time", "5", "-o", "/dev/null", "-w", "%{remote_ip}", "telnet://web:8080")
    said = net.run("client", *fetch, stdin="who\n", check=False)
    assert said.stdout.endswith(net.cluster_ip("web")), said


def conf(net: Net, name: str) -> dict[str, list[str]]:
    """keyword → words, in order, of a pod's resolv.conf."""
    found: dict[str, list[str]] = {}
    for line in net.run(name, "cat", "/etc/resolv.conf").stdout.splitlines():
        keyword, *words = line.split()
        found.setdefault(keyword, []).extend(words)
    return found


def test_dns_policies_and_config(net: Net) -> None:
    config = {
        "nameservers": ["192.0.2.53"],
        "searches": ["example.org"],
        "options": [{"name": "ndots", "value": "2"}, {"name": "edns0"}],
    }
    net.apply(
        placed("first", "sleep 3600"),
        placed("host", "sleep 3600", dnsPolicy="Default"),
        placed("own", "sleep 3600", dnsPolicy="None", dnsConfig=config),
        placed("both", "sleep 3600", dnsConfig=config),
        placed("bare", "sleep 3600", hostNetwork=True),
        placed("bare-first", "sleep 3600", hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"),
    )
    net.ready("first", "host", "own", "both", "bare", "bare-first")
    searches = [f"{net.namespace}.svc.{CLUSTER_DOMAIN}", f"svc.{CLUSTER_DOMAIN}", CLUSTER_DOMAIN]
    (server,) = conf(net, "first")["nameserver"]
    assert conf(net, "first")["search"][:3] == searches
    assert conf(net, "first")["options"] == ["ndots:5"]
    assert server not in conf(net, "host").get("nameserver", [])
    assert conf(net, "own") == {
        "nameserver": ["192.0.2.53"],
        "search": ["example.org"],
        "options": ["ndots:2", "edns0"],
    }
    both = conf(net, "both")
    assert both["nameserver"] == [server, "192.0.2.53"]
    assert [*both["search"][:3], both["search"][-1]] == [*searches, "example.org"]
    assert sorted(both["options"]) == ["edns0", "ndots:2"]
    assert server not in conf(net, "bare").get("nameserver", [])
    assert conf(net, "bare-first")["search"][:3] == searches
    assert conf(net, "bare-first")["nameserver"] == [server]
    address, who = net.ask("bare-first", ("resolve", "web", 0, None), ("who", "web", 8080, None))
    assert (address, who["name"]) == ([net.cluster_ip("web")], "server")


def test_a_name_follows_its_pod(net: Net) -> None:
    before = net.ip("db-0")
    net("delete", "pod", "db-0", "--wait=true")
    eventually(lambda: net("get", "pod", "db-0", check=False).ok, 20)
    net.ready("db-0")
    after = net.ip("db-0")
    eventually(lambda: resolved(net, "db-0.db") == [after], 10)
    assert after != before or net.ask_one("client", "who", "db-0.db", 5432)["name"] == "db-0"


def test_many_questions_at_once_are_all_answered(net: Net) -> None:
    program = (
        "import socket, concurrent.futures as f; p = f.ThreadPoolExecutor(32);"
        "print(len(set(p.map(lambda n: socket.gethostbyname('web'), range(500)))))"
    )
    assert net.run("client", "python3", "-c", program).stdout == "1\n"
