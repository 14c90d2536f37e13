"""One host of a running Slurm allocation as a Kubernetes Node. Here allocatable is a limit: it is what Slurm granted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.model import gangs, partition_node
from slurmlet.model.partition_node import KIND_LABEL, PARTITION_LABEL, HubFacts, label_value
from slurmlet.model.slurm_values import Grant

KIND = "allocation"
JOB_LABEL = "slurmlet.io/job"
HOST_LABEL = "slurmlet.io/host"
# Many short pods are what such a node is for; the kubelet's 110 would stop them before the CPUs do.
_MOST_PODS = 500
_EPHEMERAL_STORAGE = "1Pi"
READY = (True, "AgentReady", "the agent of this Slurm allocation is connected")


@dataclass(frozen=True)
class AllocationFacts:
    """What its agent told in its hello, completed by what Slurm says of the job."""

    name: str
    host: str
    host_ip: str
    partition: str
    job_id: str
    cpus: int
    memory_mb: int
    gpus: int
    gres: tuple[tuple[str, int], ...] = ()


def facts(name: str, hello: Mapping[str, Any], grant: Grant | None) -> AllocationFacts:
    """Slurm's own record of the job comes first: the environment of its step does not hold a site's default for memory."""
    cpus = int(hello.get("cpus") or 1)
    memory_mb = int(hello.get("memory_mb") or 0)
    if grant is not None:
        cpus, memory_mb = grant.cpus or cpus, grant.memory_mb or memory_mb
    gres = grant.gres if grant is not None else ()
    gpus = sum(count for kind, count in gres if kind.partition(":")[0] == "gpu") or int(
        hello.get("gpus") or 0
    )
    return AllocationFacts(
        name=name,
        host=str(hello.get("host") or ""),
        host_ip=str(hello.get("host_ip") or ""),
        partition=str(hello.get("partition") or ""),
        job_id=str(hello.get("job_id") or ""),
        cpus=cpus,
        # A site that does not hold memory per job lets it have all of the host's.
        memory_mb=memory_mb or int(hello.get("host_memory_mb") or 0),
        gpus=gpus,
        gres=gres,
    )


def node_name(host: str) -> str:
    """A host's name in Slurm as a Node's name."""
    return re.sub(r"[^a-z0-9.-]+", "-", host.lower()).strip("-.")[:240] or "node"


def node_object(node: AllocationFacts) -> dict[str, Any]:
    gang = gangs.allocation_of(node.name)
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": node.name,
            "labels": {
                "kubernetes.io/hostname": label_value(node.name),
                "kubernetes.io/os": "linux",
                "kubernetes.io/arch": partition_node.architecture(),
                KIND_LABEL: KIND,
                PARTITION_LABEL: label_value(node.partition),
                JOB_LABEL: label_value(node.job_id),
                HOST_LABEL: label_value(node.host),
                "slurmlet.io/gpus": str(node.gpus),
                **({gangs.GANG: gang} if gang else {}),
            },
            "annotations": {"slurmlet.io/partition": node.partition},
        },
        "spec": {"taints": [gangs.taint(gang)]} if gang else {},
    }


def node_status(
    node: AllocationFacts,
    hub: HubFacts,
    state: tuple[bool, str, str],
    now: str,
    old: Mapping[str, Any],
    images: list[dict[str, Any]],
) -> dict[str, Any]:
    resources = {
        "cpu": str(node.cpus),
        "memory": f"{node.memory_mb}Mi",
        "pods": str(_MOST_PODS),
        "ephemeral-storage": _EPHEMERAL_STORAGE,
        **{name: str(count) for name, count in extended_resources(node).items()},
    }
    return {
        "capacity": resources,
        "allocatable": resources,
        "conditions": partition_node.conditions(state, now, old),
        # The hub is the kubelet of every node: the API server asks at its address.
        "addresses": [
            {"type": "InternalIP", "address": hub.address},
            {"type": "Hostname", "address": node.host},
        ],
        "features": {"supplementalGroupsPolicy": True},
        "daemonEndpoints": {"kubeletEndpoint": {"Port": hub.kubelet_port}},
        "images": images,
        "declaredFeatures": list(partition_node.FEATURES),
        "nodeInfo": partition_node.node_info(hub),
    }


def extended_resources(node: AllocationFacts) -> dict[str, int]:
    """As on partition nodes: GPUs by their usual names, all generic resources by Slurm's."""
    found = dict.fromkeys(("nvidia.com/gpu", "amd.com/gpu"), node.gpus) if node.gpus else {}
    for kind, count in node.gres:
        parts = [re.sub(r"[^A-Za-z0-9_-]+", "-", part) for part in kind.split(":")]
        for depth in range(1, len(parts) + 1):
            resource = f"slurmlet.io/gres-{'.'.join(parts[:depth])}"
            found[resource] = found.get(resource, 0) + count
    return found
