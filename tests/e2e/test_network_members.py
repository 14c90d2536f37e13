"""A StatefulSet whose members find each other by DNS: three of etcd, which lose one and get it back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import eventually
from tests.e2e.network_pods import SERVERS, Net, network_namespace, placed, port, probe, service, workload

pytestmark = pytest.mark.e2e

ETCD = """
me=http://$HOSTNAME.etcd
members=etcd-0=http://etcd-0.etcd:2380,etcd-1=http://etcd-1.etcd:2380,etcd-2=http://etcd-2.etcd:2380
exec etcd --name $HOSTNAME --data-dir /data/d --initial-cluster $members --initial-cluster-state new \
  --listen-peer-urls http://0.0.0.0:2380 --listen-client-urls http://0.0.0.0:2379 \
  --initial-advertise-peer-urls $me:2380 --advertise-client-urls $me:2379
"""


@pytest.fixture(scope="module")
def net(testbed: Any, cluster: str) -> Iterator[Net]:
    labels = {"app": "etcd"}
    check = probe(httpGet={"path": "/health?serializable=true", "port": 2379})
    mount = {"name": "data", "mountPath": "/data"}
    template = placed(
        "x", ETCD, image=SERVERS, labels=labels, container={"readinessProbe": check, "volumeMounts": [mount]}
    )
    claim = {
        "metadata": {"name": "data"},
        "spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "100Mi"}}},
    }
    with network_namespace(testbed, cluster, "servers") as net:
        net.apply(
            # Members must find each other before any of them is ready.
            service(
                "etcd",
                labels,
                port(2379, name="client"),
                port(2380, name="peer"),
                clusterIP="None",
                publishNotReadyAddresses=True,
            ),
            service("etcd-client", labels, port(2379)),
            placed("client", "sleep 3600"),
            workload(
                "StatefulSet",
                "etcd",
                template,
                3,
                serviceName="etcd",
                podManagementPolicy="Parallel",
                volumeClaimTemplates=[claim],
            ),
        )
        net.ready("client")
        eventually(lambda: net.get("statefulset", "etcd")["status"].get("readyReplicas") == 3, 120)
        yield net


def ask(net: Net, path: str, body: dict[str, Any], host: str = "etcd-client") -> Any:
    argv = ["curl", "-sS", "--max-time", "10", f"http://{host}:2379/v3/{path}", "-d", json.dumps(body)]
    return json.loads(net.run("client", *argv).stdout)


def test_members_found_each_other_and_agree(net: Net) -> None:
    assert {one["name"] for one in ask(net, "cluster/member/list", {})["members"]} == {
        "etcd-0",
        "etcd-1",
        "etcd-2",
    }
    leaders = {ask(net, "maintenance/status", {}, f"etcd-{number}.etcd")["leader"] for number in range(3)}
    assert len(leaders) == 1


def test_what_one_takes_the_others_have(net: Net) -> None:
    ask(net, "kv/put", {"key": "Zm9v", "value": "YmFy"}, "etcd-0.etcd")
    for number in range(3):
        (found,) = ask(net, "kv/range", {"key": "Zm9v"}, f"etcd-{number}.etcd")["kvs"]
        assert found["value"] == "YmFy"


def test_a_lost_member_comes_back_under_its_name(net: Net) -> None:
    gone = net.pod("etcd-1")["metadata"]["uid"]
    net("delete", "pod", "etcd-1", "--grace-period=0", "--force")

    def taken() -> bool:
        # If it was the leader, the others must choose another one first.
        return "header" in ask(net, "kv/put", {"key": "bGF0ZXI=", "value": "eWVz"}, "etcd-0.etcd")

    eventually(taken, 30)

    def back() -> bool:
        found = net("get", "pod", "etcd-1", "-o", "json", check=False)
        return found.ok and json.loads(found.stdout)["metadata"]["uid"] != gone

    eventually(back, 30)
    net.ready("etcd-1")

    def caught_up() -> bool:
        return bool(ask(net, "kv/range", {"key": "bGF0ZXI=", "serializable": True}, "etcd-1.etcd").get("kvs"))

    eventually(caught_up, 30)
