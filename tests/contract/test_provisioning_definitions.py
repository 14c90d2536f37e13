"""The kinds of `slurmlet provision` at a real API server: it takes them, and refuses what they say is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.operators.provisioning.resource_definitions import custom_resource_definitions
from tests.contract.control_plane import ControlPlane
from tests.contract.provisioning_kinds import install

Obj = dict[str, Any]
OURS = "/apis/slurmlet.io/v1alpha1/namespaces/default"
BOOTSTRAP = "/apis/bootstrap.cluster.x-k8s.io/v1alpha1/namespaces/default"


def run(plane: ControlPlane, scenario: Callable[[ApiClient], Awaitable[None]]) -> None:
    async def go() -> None:
        async with asyncio.timeout(60), plane.client() as client:
            await install(client, custom_resource_definitions())
            await scenario(client)

    asyncio.run(go())


def slurm_cluster(name: str, spec: Obj) -> Obj:
    return {
        "apiVersion": "slurmlet.io/v1alpha1",
        "kind": "SlurmCluster",
        "metadata": {"name": name},
        "spec": spec,
    }


def worker_set(name: str, **changes: Any) -> Obj:
    spec = {
        "slurmCluster": "hpc",
        "scaleTargetRef": {
            "apiVersion": "cluster.x-k8s.io/v1beta2",
            "kind": "MachineDeployment",
            "name": "workers",
        },
        "partitions": ["batch"],
        "shape": {"cpus": 8, "memoryMB": 16000, "gres": {"gpu:a100": 4}},
        "max": 4,
        **changes,
    }
    return {
        "apiVersion": "slurmlet.io/v1alpha1",
        "kind": "WorkerSet",
        "metadata": {"name": name},
        "spec": spec,
    }


def test_each_contract_of_cluster_api_has_a_version_that_is_served() -> None:
    for definition in custom_resource_definitions():
        if definition["spec"]["group"] != "bootstrap.cluster.x-k8s.io":
            continue
        names, served = definition["spec"]["names"], [one["name"] for one in definition["spec"]["versions"]]
        assert definition["metadata"]["name"] == f"{names['kind'].lower()}s.bootstrap.cluster.x-k8s.io"
        for contract in ("v1beta1", "v1beta2"):
            assert definition["metadata"]["labels"][f"cluster.x-k8s.io/{contract}"] in served


@pytest.mark.parametrize("kind", ["SlurmWorkerConfig", "VirtualKubeletConfig"])
def test_a_template_takes_what_its_kind_takes(kind: str) -> None:
    found = {
        one["spec"]["names"]["kind"]: one["spec"]["versions"][0]["schema"]
        for one in custom_resource_definitions()
    }
    spec = found[kind]["openAPIV3Schema"]["properties"]["spec"]
    template = found[f"{kind}Template"]["openAPIV3Schema"]["properties"]["spec"]["properties"]["template"]
    assert template["properties"]["spec"]["properties"] == spec["properties"]


def test_defaults_are_filled_in(api_plane: ControlPlane) -> None:
    async def scenario(client: ApiClient) -> None:
        made = await client.create(f"{OURS}/workersets", worker_set("defaults"))
        assert made["spec"]["min"] == 0
        assert made["spec"]["scaleInAfterSeconds"] == 300
        assert made["spec"]["drain"] == {"deadlineSeconds": 3600, "policy": "Wait"}

    run(api_plane, scenario)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"min": 5}, "min must not be greater than max"),
        ({"max": -1}, "spec.max"),
        ({"partitions": []}, "spec.partitions"),
        ({"shape": {"cpus": 0, "memoryMB": 1}}, "spec.shape.cpus"),
        ({"drain": {"policy": "Kill"}}, "spec.drain.policy"),
        ({"scaleTargetRef": {"kind": "MachineDeployment", "name": "x"}}, "apiVersion"),
    ],
)
def test_a_bad_worker_set_is_refused_by_the_name_of_its_field(
    api_plane: ControlPlane, changes: Obj, named: str
) -> None:
    async def scenario(client: ApiClient) -> None:
        with pytest.raises(ApiError) as refused:
            await client.create(f"{OURS}/workersets", worker_set("bad", **changes))
        assert refused.value.status == 422
        assert named in refused.value.message

    run(api_plane, scenario)


def test_a_slurm_cluster_is_asked_in_exactly_one_way(api_plane: ControlPlane) -> None:
    rest = {"url": "https://slurm:6820", "tokenSecretRef": {"name": "token", "key": "jwt"}}

    async def scenario(client: ApiClient) -> None:
        for number, connection in enumerate(
            ({"commands": {}}, {"rest": rest}, {"socket": {"path": "/run/s"}})
        ):
            spec = {"connection": connection, "controller": {"address": {"nodePort": {}}}}
            await client.create(f"{OURS}/slurmclusters", slurm_cluster(f"good-{number}", spec))
        for connection in ({}, {"commands": {}, "rest": rest}):
            with pytest.raises(ApiError) as refused:
                await client.create(f"{OURS}/slurmclusters", slurm_cluster("bad", {"connection": connection}))
            assert "exactly one of commands, rest and socket" in refused.value.message
        two = {"connection": {"commands": {}}, "controller": {"address": {"hostIP": {}, "loadBalancer": {}}}}
        with pytest.raises(ApiError) as refused:
            await client.create(f"{OURS}/slurmclusters", slurm_cluster("bad", two))
        assert "at most one of hostIP" in refused.value.message

    run(api_plane, scenario)


def test_the_thesis_own_manifest_is_taken_and_a_file_without_content_is_not(api_plane: ControlPlane) -> None:
    spec: Obj = {
        "virtualKubelet": {"url": "http://172.22.0.1/virtual-kubelet", "args": ["--provider mock"]},
        "format": "cloud-config",
        "files": [{"content": "x", "path": "/etc/slurm/slurm.conf", "permissions": "0644"}],
        "users": [
            {"name": "hpcuser", "sudo": "ALL=(ALL) NOPASSWD:ALL", "sshAuthorizedKeys": ["ssh-ed25519 A"]}
        ],
        "commands": ["sudo mkdir -p /etc/munge/"],
    }

    def template(name: str, spec: Obj) -> Obj:
        return {
            "apiVersion": "bootstrap.cluster.x-k8s.io/v1alpha1",
            "kind": "VirtualKubeletConfigTemplate",
            "metadata": {"name": name},
            "spec": {"template": {"spec": spec}},
        }

    async def scenario(client: ApiClient) -> None:
        path = f"{BOOTSTRAP}/virtualkubeletconfigtemplates"
        made = await client.create(path, template("thesis", spec))
        assert made["spec"]["template"]["spec"] == spec
        with pytest.raises(ApiError) as refused:
            await client.create(path, template("bad", {"files": [{"path": "/x"}]}))
        assert "exactly one of content and contentFrom" in refused.value.message

    run(api_plane, scenario)
