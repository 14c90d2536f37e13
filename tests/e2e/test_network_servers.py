"""Servers and clients nobody here wrote, unchanged, over the pod network; each as server and as client."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tests.e2e.conftest import config_map, eventually
from tests.e2e.network_pods import (
    JAVA,
    SERVERS,
    TOOLS,
    Net,
    network_namespace,
    placed,
    port,
    probe,
    service,
    workload,
)
from tests.e2e.network_programs import (
    ASYNCIO_CLIENT,
    ASYNCIO_SERVER,
    JAVA_CLIENT,
    LOAD,
    NGINX,
    NGINX_PROXY,
    NODE_CLIENT,
    NODE_SERVER,
    PAGE_BYTES,
    RUN_NGINX,
)

pytestmark = pytest.mark.e2e


def mounted(name: str) -> dict[str, Any]:
    return {"volumes": [{"name": "conf", "configMap": {"name": name}}]}


def server(
    name: str,
    command: str | list[str],
    number: int,
    image: str = SERVERS,
    more: Sequence[dict[str, Any]] = (),
    **changes: Any,
) -> tuple[dict[str, Any], ...]:
    """A pod that is ready once its port answers, and a Service of its name."""
    container = {"readinessProbe": probe(tcpSocket={"port": number}), **changes.pop("container", {})}
    labels = {"app": name}
    return (
        service(name, labels, port(number, name="main"), *more),
        placed(name, command, image=image, labels=labels, container=container, **changes),
    )


CONF = {"volumeMounts": [{"name": "conf", "mountPath": "/conf"}]}


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    """All servers at once: they start side by side."""
    postgres = (
        "initdb -D /tmp/d -A trust -U postgres >/dev/null && echo host all all all trust >>/tmp/d/pg_hba.conf"
        " && exec postgres -D /tmp/d -k /tmp -h '*'"
    )
    java = "mkdir -p /tmp/w; head -c 100000 /dev/zero >/tmp/w/page; exec java -m jdk.httpserver -b 0.0.0.0 -p 8000 -d /tmp/w"
    with network_namespace(testbed, cluster, "servers", "java") as net:
        net.apply(
            config_map("plain", **{"nginx.conf": NGINX}),
            config_map("front", **{"nginx.conf": NGINX_PROXY}),
            placed("client", "sleep 3600", "c1"),
            *server(
                "pages",
                RUN_NGINX,
                80,
                container={**CONF, "securityContext": {"runAsUser": 33}},
                **mounted("plain"),
            ),
            *server("redis", ["redis-server", "--protected-mode", "no", "--dir", "/tmp"], 6379),
            *server("postgres", postgres, 5432, container={"securityContext": {"runAsUser": 999}}),
            *server("node", ["node", "-e", NODE_SERVER], 80),
            *server("java", java, 8000, JAVA),
            *server("grpc", ["grpc-server"], 50051, image=TOOLS),
            *server(
                "iperf", ["iperf3", "-s"], 5201, image=TOOLS, more=[port(5201, name="udp", protocol="UDP")]
            ),
            *server("asyncio", ["python3", "-c", ASYNCIO_SERVER], 7000, image=TOOLS),
        )
        net.ready(
            "client", "pages", "redis", "postgres", "node", "java", "grpc", "iperf", "asyncio", timeout_s=120
        )
        net.apply(
            *server(
                "front",
                RUN_NGINX,
                80,
                container={**CONF, "securityContext": {"runAsUser": 33}},
                **mounted("front"),
            )
        )
        net.ready("front")
        yield net


def curl(net: Net, *arguments: str) -> str:
    return str(net.run("client", "curl", "-sS", "--fail", "--max-time", "20", *arguments).stdout)


def test_nginx_serves_whole_files(net: Net) -> None:
    wanted = curl(net, "http://pages/sum").split()[0]
    said = net.run("client", "sh", "-c", "curl -sS http://pages/page | sha256sum").stdout
    assert said.split()[0] == wanted


def test_nginx_sees_who_asks(net: Net) -> None:
    assert curl(net, "http://pages/who") == f"pages {net.ip('client')} {net.ip('pages')}"


def test_nginx_keeps_its_upstreams_alive(net: Net) -> None:
    wanted = curl(net, "http://pages/sum").split()[0]
    urls = ["http://front/through/sum"] * 100
    said = curl(net, "--parallel", "--parallel-max", "10", *urls)
    assert said.split().count(wanted) == 100
    size = net.run("client", "sh", "-c", "curl -sS http://front/through/page | wc -c").stdout
    assert int(size) == PAGE_BYTES


def test_redis_answers_many_clients(net: Net) -> None:
    said = net.run(
        "redis", "redis-benchmark", "-h", "redis", "-n", "4000", "-c", "50", "-q", "-t", "set,get", "--csv"
    ).stdout
    assert '"SET"' in said
    assert '"GET"' in said
    net.run("node", "redis-cli", "-h", "redis", "set", "greeting", "hello")
    assert net.run("pages", "redis-cli", "-h", net.ip("redis"), "get", "greeting").stdout == "hello\n"
    peers = net.run("redis", "redis-cli", "-h", "redis", "client", "list").stdout
    assert f"addr={net.ip('redis')}:" in peers


def test_redis_publishes_to_a_subscriber_elsewhere(net: Net) -> None:
    listening = net.start("exec", "node", "--", "redis-cli", "-h", "redis", "subscribe", "news")
    try:
        assert listening.stdout is not None
        assert listening.stdout.readline() == b"subscribe\n"
        eventually(
            lambda: net.run("pages", "redis-cli", "-h", "redis", "publish", "news", "now").stdout == "1\n", 5
        )
        assert [listening.stdout.readline() for _ in range(5)][-1] == b"now\n"
    finally:
        net.testbed.stop(listening)


def test_postgres_answers_its_clients(net: Net) -> None:
    ask = ("psql", "-h", "postgres", "-U", "postgres", "-Atc")
    assert net.run("node", *ask, "select inet_server_addr(), inet_client_addr()").stdout == (
        f"{net.ip('postgres')}|{net.ip('node')}\n"
    )
    assert net.run("node", *ask, "select sum(n) from generate_series(1, 100000) n").stdout == "5000050000\n"
    rows = net.run(
        "node",
        "sh",
        "-c",
        f"{' '.join(ask)} 'copy (select repeat(md5(n::text), 30) from generate_series(1, 20000) n) to stdout' | wc -c",
    )
    assert int(rows.stdout) == 20000 * (32 * 30 + 1)


def test_postgres_cancels_a_query_by_a_second_connection(net: Net) -> None:
    command = "psql -h postgres -U postgres -c 'select pg_sleep(30)' & sleep 1; kill -INT $!; wait $!"
    began_s = time.monotonic()
    said = net.run("node", "sh", "-c", command, check=False)
    assert "canceling statement due to user request" in said.stderr
    assert time.monotonic() - began_s < 20


def test_node_serves_and_asks(net: Net) -> None:
    said = json.loads(curl(net, "http://node/x?y=1"))
    assert said == {
        "peer": f"::ffff:{net.ip('client')}",
        "local": f"::ffff:{net.ip('node')}",
        "url": "/x?y=1",
    }
    sizes = json.loads(
        net.run("node", "node", "-e", NODE_CLIENT, "http://pages/page", "http://java:8000/page").stdout
    )
    assert sorted(sizes) == [100_000, PAGE_BYTES]


def test_java_serves_and_asks(net: Net) -> None:
    assert len(curl(net, "http://java:8000/page")) == 100_000
    program = net.run(
        "java", "sh", "-c", "cat >/tmp/Get.java; java /tmp/Get.java http://pages/page", stdin=JAVA_CLIENT
    )
    size, client, peer = program.stdout.split()
    assert (int(size), client, peer) == (20 * PAGE_BYTES, net.ip("java"), net.ip("java"))


def test_a_grpc_pair_speaks_in_all_four_ways(net: Net) -> None:
    addresses = ("grpc:50051", f"dns:///{net.name_of('grpc')}:50051", f"{net.ip('grpc')}:50051")
    # Side by side: each takes its seconds, by its own pauses.
    command = 'for address; do grpc-client -addr "$address" & pids="$pids $!"; done; for pid in $pids; do wait $pid; done'
    said = net.run("client", "sh", "-ec", command, "x", *addresses).stdout
    # One answer of the unary call, ten of the server's stream, one of the client's, ten of the one both ways.
    assert said.count("this is examples/metadata") == 22 * len(addresses), said


def test_asyncio_serves_and_asks(net: Net) -> None:
    assert net.run("client", "python3", "-c", ASYNCIO_CLIENT, "asyncio").stdout == "all answered\n"


@pytest.mark.parametrize(
    "how",
    [(), ("-R",), ("-P", "4"), ("-u", "-b", "20M", "-l", "1200")],
    ids=["up", "down", "parallel", "udp"],
)
def test_iperf3_measures(net: Net, how: tuple[str, ...]) -> None:
    said = json.loads(net.run("client", "iperf3", "-c", "iperf", "-t", "1", "-J", *how, check=False).stdout)
    assert "error" not in said, said["error"]
    assert said["end"]["streams"]
    end = said["end"].get("sum_received") or said["end"]["sum"]
    assert end["bytes"] > 1_000_000


def test_socat_and_netcat_meet(net: Net) -> None:
    net.apply(placed("inetd", ["socat", "TCP-LISTEN:2000,fork,reuseaddr", "EXEC:sha256sum"]))
    net.ready("inetd")
    command = "head -c 3000000 /dev/zero >/tmp/z; sha256sum </tmp/z; nc -N -w 10 $0 2000 </tmp/z"
    said = eventually(
        lambda: (d := net.run("client", "sh", "-c", command, net.ip("inetd"), check=False)).ok and d.stdout,
        10,
    )
    first, second = said.split("\n")[:2]
    assert first == second


def test_a_rolling_restart_under_load_fails_no_request(net: Net) -> None:
    labels = {"app": "rolling"}
    container = {
        **CONF,
        "readinessProbe": probe(httpGet={"path": "/health", "port": 80}),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", "3"]}}},
        # nginx lets requests end at QUIT; the image's signal is what a chart would set.
        "securityContext": {"runAsUser": 33},
    }
    template = placed(
        "x",
        RUN_NGINX,
        image=SERVERS,
        labels=labels,
        container=container,
        terminationGracePeriodSeconds=20,
        **mounted("plain"),
    )
    strategy = {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}}
    net.apply(
        workload("Deployment", "rolling", template, 2, strategy=strategy),
        service("rolling", labels, port(80)),
    )
    net("rollout", "status", "deployment/rolling", "--timeout=60s")
    eventually(lambda: net.run("client", "curl", "-sS", "http://rolling/health", check=False).ok, 10)
    before = {one["metadata"]["uid"] for one in net.get("pods", None, "-l", "app=rolling")["items"]}
    load = net.start("exec", "client", "--", "python3", "-c", LOAD)
    try:
        time.sleep(1)
        net("rollout", "restart", "deployment/rolling")
        net("rollout", "status", "deployment/rolling", "--timeout=90s", timeout_s=100)
        eventually(
            lambda: (
                not before
                & {one["metadata"]["uid"] for one in net.get("pods", None, "-l", "app=rolling")["items"]}
            ),
            40,
        )
        net.run("client", "touch", "/tmp/stop")
        out, _ = load.communicate(timeout=20)
    finally:
        net.testbed.stop(load)
    seen = json.loads(out)
    assert seen["failed"] == []
    assert min(seen["counts"].values()) > 50, seen["counts"]
