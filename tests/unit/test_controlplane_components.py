from __future__ import annotations

from pathlib import Path

import pytest

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.components import Component, components

CONFIG = ClusterConfig(
    "exp", "0a1b2c3d", "2026-01-01T00:00:00Z", "v1.36.3", "login1", ("192.0.2.9",), "192.0.2.9", 40001, 40002,
    40003, "10.96.0.0/16", None,
)  # fmt: skip
ENVIRONMENT = {
    "HOME": "/home/user1", "PATH": "/usr/bin", "HTTPS_PROXY": "http://proxy:3128", "SECRET_TOKEN": "hunter2",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
}  # fmt: skip


@pytest.fixture
def plan() -> dict[str, Component]:
    made = components(
        ClusterFiles(Path("/home/user1/.slurmlet/exp")), CONFIG, Path("/opt/bin"), ENVIRONMENT, 64
    )
    return {component.name: component for component in made}


def test_order_is_data_first_hub_last(plan: dict[str, Component]) -> None:
    upstream = ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "coredns"]
    assert list(plan) == [*upstream, "gateway", "hub"]


def test_nothing_listens_without_asking_for_a_certificate(plan: dict[str, Component]) -> None:
    etcd, api = plan["etcd"].argv, plan["kube-apiserver"].argv
    assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(etcd)
    urls = [word for word in etcd if "url" in word or "initial-cluster" in word]
    assert len(urls) == 5
    assert all("https://127.0.0.1:" in word for word in urls)
    assert {"--anonymous-auth=false", "--authorization-mode=RBAC", "--profiling=false"} <= set(api)
    for name in ("kube-controller-manager", "kube-scheduler"):
        assert "--secure-port=0" in plan[name].argv


def test_api_server_checks_the_hub_and_shows_its_own_certificate(plan: dict[str, Component]) -> None:
    api = plan["kube-apiserver"].argv
    pki = "/home/user1/.slurmlet/exp/pki"
    assert f"--kubelet-certificate-authority={pki}/hub-ca.crt" in api
    assert f"--kubelet-client-certificate={pki}/kubelet-client.crt" in api
    assert "--kubelet-preferred-address-types=InternalIP" in api
    assert f"--client-ca-file={pki}/ca.crt" in api
    assert f"--etcd-cafile={pki}/etcd-ca.crt" in api


def test_upstream_gets_a_small_environment_and_the_hub_all_of_it(plan: dict[str, Component]) -> None:
    api = plan["kube-apiserver"].environment
    assert api == {"HOME": "/home/user1", "PATH": "/usr/bin", "GOMAXPROCS": "4"}
    assert plan["hub"].environment == {**ENVIRONMENT, "MALLOC_ARENA_MAX": "1"}


def test_only_clients_of_the_api_wait_for_it(plan: dict[str, Component]) -> None:
    assert [name for name, part in plan.items() if part.needs_api] == [
        "kube-controller-manager",
        "kube-scheduler",
        "coredns",
    ]


def test_coredns_waits_for_the_rights_that_the_hub_grants(plan: dict[str, Component]) -> None:
    assert [name for name, part in plan.items() if part.needs_hub] == ["coredns"]


def test_the_api_server_reaches_pods_by_the_gateway(plan: dict[str, Component]) -> None:
    egress = "--egress-selector-config-file=/home/user1/.slurmlet/exp/run/egress.json"
    assert egress in plan["kube-apiserver"].argv
