"""A Slurm partition as a Kubernetes Node object."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.model.ids import NodeName
from slurmlet.model.slurm_values import Partition

KIND_LABEL = "slurmlet.io/kind"
PARTITION_LABEL = "slurmlet.io/partition"
# "true" on the Node of Slurm's default partition, "false" on the others. The scheduler ranks Nodes by it.
DEFAULT_LABEL = "slurmlet.io/default-partition"
# Not a limit: pods beyond what is free now queue in Slurm, which is the one to decide. Slurm refuses what never fits.
_PLENTY = {"cpu": "1000000", "memory": "1Pi", "pods": "100000", "ephemeral-storage": "1Pi"}
# The kubelet's nodeStatusMaxImages and MaxNamesPerImageInNodeStatus.
_MOST_IMAGES = 50
_NAMES_PER_IMAGE = 5
# Reasons of a Ready condition that is False because Slurm takes no jobs there.
PARTITION_DOWN, NO_USABLE_NODES = "PartitionDown", "NoUsableNodes"
# Of an allocation node whose agent is not heard of: it dials in again, or its job is over and the Node goes.
AGENT_LOST = "AgentLost"
HELD_BY_SLURM = (PARTITION_DOWN, NO_USABLE_NODES, AGENT_LOST)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}


@dataclass(frozen=True)
class HubFacts:
    """What every node shares, since the hub is the kubelet of all."""

    address: str
    host: str
    kubelet_port: int
    slurm_version: str
    kubernetes_version: str
    version: str
    machine_id: str


def architecture() -> str:
    return _ARCHITECTURES.get(platform.machine(), platform.machine())


def node_names(partitions: Iterable[str]) -> dict[str, NodeName]:
    """partition → node name: a DNS name, unique, stable whatever the order."""
    names: dict[str, NodeName] = {}
    taken: set[str] = set()
    # A partition whose own name will do keeps it, whichever others come to look like it.
    for partition in sorted(partitions, key=lambda name: (_dns_name(name) != name, name)):
        base = _dns_name(partition)
        name, number = base, 1
        while name in taken:
            number += 1
            name = f"{base}-{number}"
        taken.add(name)
        names[partition] = NodeName(name)
    return names


def _dns_name(text: str) -> str:
    plain = re.sub(r"[^a-z0-9.-]+", "-", text.lower())
    # Each part between dots begins and ends with a letter or digit.
    return re.sub(r"[-.]*\.[-.]*", ".", plain)[:240].strip("-.") or "partition"


def labels(partition: Partition, name: str) -> dict[str, str]:
    found = {
        "kubernetes.io/hostname": label_value(name),
        "kubernetes.io/os": "linux",
        "kubernetes.io/arch": architecture(),
        KIND_LABEL: "partition",
        PARTITION_LABEL: label_value(partition.name),
        DEFAULT_LABEL: "true" if partition.default else "false",
        "slurmlet.io/nodes": str(partition.nodes),
        "slurmlet.io/cpus-per-node": str(partition.cpus_per_node),
        "slurmlet.io/memory-mb-per-node": str(partition.memory_mb_per_node),
        "slurmlet.io/time-limit": label_value(partition.time_limit),
        "slurmlet.io/gpus": str(partition.gpus),
    }
    found.update(
        {f"feature.slurmlet.io/{label_value(feature)}": "true" for feature in sorted(partition.features)}
    )
    return found


def label_value(text: str) -> str:
    """Text as a legal label value."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)[:63].strip("-_.") or "none"


def is_obsolete_taint(taint: Mapping[str, Any]) -> bool:
    """Whether an earlier version of slurmlet set it to rank Nodes; the scheduler's configuration does that now."""
    return taint.get("effect") == "PreferNoSchedule" and (
        taint["key"] == PARTITION_LABEL or taint["key"].startswith("slurmlet.io/pool-")
    )


def ready(partition: Partition) -> tuple[bool, str, str]:
    """(ready, reason, message) of the Ready condition, in Slurm's words."""
    why = "; ".join(partition.reasons)
    if not partition.up:
        state = f" ({partition.state.upper()})" if partition.state else ""
        return False, PARTITION_DOWN, f"Slurm partition {partition.name} is not up{state}"
    if partition.nodes_usable == 0:
        states = ", ".join(f"{count} {state}" for state, count in sorted(partition.node_states.items()))
        message = f"no node of Slurm partition {partition.name} can run jobs ({states or 'no nodes'})"
        return False, NO_USABLE_NODES, f"{message}: {why}" if why else message
    message = f"{partition.nodes_usable} of {partition.nodes} Slurm nodes can run jobs"
    return True, "PartitionUp", f"{message} (others: {why})" if why else message


def node_object(partition: Partition, name: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "labels": labels(partition, name),
            "annotations": {"slurmlet.io/partition": partition.name},
        },
        "spec": {},
    }


def image_list(images: Iterable[tuple[str, str, int]]) -> list[dict[str, Any]]:
    """status.images of (name, name by digest, bytes): the largest first, cut off where a kubelet cuts it off."""
    found: dict[str, tuple[list[str], int]] = {}
    for name, by_digest, size_bytes in images:
        names, _ = found.setdefault(by_digest.rpartition("@")[2], ([], size_bytes))
        # Digests before tags, as the kubelet has them.
        if "@" in by_digest and by_digest not in names:
            names.insert(0, by_digest)
        if name and name not in names:
            names.append(name)
    largest = sorted((one for one in found.values() if one[0]), key=lambda one: (-one[1], one[0]))
    return [
        {"names": names[:_NAMES_PER_IMAGE], "sizeBytes": size_bytes}
        for names, size_bytes in largest[:_MOST_IMAGES]
    ]


def extended_resources(partition: Partition) -> dict[str, int]:
    """Generic resources as extended ones (model/pod_job maps them back). GPUs go by all their usual names; the partition
    has as many of them as it has in all, of the others as many as one of its nodes has."""
    found = dict.fromkeys(("nvidia.com/gpu", "amd.com/gpu"), partition.gpus) if partition.gpus else {}
    for word in partition.gres:
        parts = re.sub(r"\(.*", "", word).split(":")
        count = re.match(r"\d+", parts[-1])
        names = [re.sub(r"[^A-Za-z0-9_-]+", "-", part) for part in parts[:-1] if part != "no_consume"]
        for depth in range(1, len(names) + 1):
            resource = f"slurmlet.io/gres-{'.'.join(names[:depth])}"
            found[resource] = max(found.get(resource, 0), int(count.group()) if count else 1)
    return found


def node_status(
    partition: Partition,
    name: str,
    hub: HubFacts,
    now: str,
    old: Mapping[str, Any],
    images: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    capacity = {
        "cpu": str(partition.cpus),
        "memory": f"{partition.memory_mb}Mi",
        "pods": _PLENTY["pods"],
        "ephemeral-storage": _PLENTY["ephemeral-storage"],
    }
    extended = extended_resources(partition)
    return {
        "capacity": {**capacity, **{resource: str(count) for resource, count in extended.items()}},
        "allocatable": {**_PLENTY, **dict.fromkeys(extended, "100000")},
        "conditions": _conditions(partition, now, old),
        "addresses": [
            {"type": "InternalIP", "address": hub.address},
            {"type": "Hostname", "address": name},
        ],
        "features": {"supplementalGroupsPolicy": True},
        "daemonEndpoints": {"kubeletEndpoint": {"Port": hub.kubelet_port}},
        "images": images or [],
        "declaredFeatures": list(FEATURES),
        "nodeInfo": node_info(hub),
    }


# Exec and attach reach the hub as WebSockets: see docs/decisions/0011.
FEATURES = ("ExtendWebSocketsToKubelet", "RestartAllContainersOnContainerExits")


def node_info(hub: HubFacts) -> dict[str, str]:
    return {
        "machineID": hub.machine_id,
        "systemUUID": hub.machine_id,
        "bootID": hub.machine_id,
        "kernelVersion": platform.release(),
        "osImage": f"Slurm {hub.slurm_version}",
        "containerRuntimeVersion": "crun://rootless",
        "kubeletVersion": f"{hub.kubernetes_version}+slurmlet-{hub.version}",
        "kubeProxyVersion": "",
        "operatingSystem": "linux",
        "architecture": architecture(),
    }


def _conditions(partition: Partition, now: str, old: Mapping[str, Any]) -> list[dict[str, Any]]:
    return conditions(ready(partition), now, old)


def conditions(state: tuple[bool, str, str], now: str, old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """All conditions of a node; `state` is (ready, reason, message)."""
    is_ready, reason, message = state
    fine = {
        "MemoryPressure": ("KubeletHasSufficientMemory", "Slurm holds memory per job"),
        "DiskPressure": ("KubeletHasNoDiskPressure", "Slurm places jobs"),
        "PIDPressure": ("KubeletHasSufficientPID", "Slurm places jobs"),
    }
    found = [_condition(type_, False, *why, now, old) for type_, why in fine.items()]
    return [*found, _condition("Ready", is_ready, reason, message, now, old)]


def _condition(
    type_: str, true: bool, reason: str, message: str, now: str, old: Mapping[str, Any]
) -> dict[str, Any]:
    value = "True" if true else "False"
    before: Mapping[str, Any] = next((one for one in old.get("conditions") or () if one["type"] == type_), {})
    since = before.get("lastTransitionTime") if before.get("status") == value else None
    return {
        "type": type_,
        "status": value,
        "reason": reason,
        "message": message,
        "lastHeartbeatTime": now,
        "lastTransitionTime": since or now,
    }
