"""What an administrator would have applied on a site with Slinky, Cluster API and Metal3: the objects of a test site. Pure.

One management cluster that is its own workload cluster: Slurm's controller is a StatefulSet of Slinky's there (its pod
stands for the slurmctld of host login), workers are MachineDeployments.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurmlet.testbed.provisioning.metal3_kinds import GROUP, HOST_GROUP, HOST_VERSION

Obj = dict[str, Any]
NAMESPACE = "workers"
SLURM_NAMESPACE = "slurm"
CLUSTER = "hpc"
SLURM = "slurm"
NODE = "login"
_CORE = "cluster.x-k8s.io"
_BOOTSTRAP = "bootstrap.cluster.x-k8s.io"
NAMESPACE_LABEL = "slurm-controller-namespace"


@dataclass(frozen=True)
class Workers:
    """One MachineDeployment with its templates and, for the autoscaler, its WorkerSet."""

    name: str = "small"
    cpus: int = 4
    memory_mb: int = 2000
    features: tuple[str, ...] = ("small",)
    host_labels: Mapping[str, str] = field(default_factory=dict)
    minimum: int = 0
    maximum: int = 4
    autoscaled: bool = True
    # Nodes of slurm.conf that Slurm's own power saving switches on and off, as Slurm writes lists of hosts.
    cloud_nodes: str = ""
    # Of the WorkerSet, beyond the fields above.
    more: Mapping[str, Any] = field(default_factory=dict)


def namespace(name: str) -> Obj:
    return _named("v1", "Namespace", name)


def cluster(kubeconfig: str) -> list[Obj]:
    """The Cluster that the workers are Machines of, and its kubeconfig as Cluster API names it."""
    reference = {"apiGroup": GROUP, "kind": "Metal3Cluster", "name": CLUSTER}
    endpoint = {"host": "127.0.0.1", "port": 6443}
    return [
        _named(f"{GROUP}/v1beta2", "Metal3Cluster", CLUSTER, spec={"controlPlaneEndpoint": endpoint}),
        _named(
            f"{_CORE}/v1beta2",
            "Cluster",
            CLUSTER,
            spec={"infrastructureRef": reference, "controlPlaneEndpoint": endpoint},
        ),
        {
            **_named("v1", "Secret", f"{CLUSTER}-kubeconfig", labels={f"{_CORE}/cluster-name": CLUSTER}),
            "type": f"{_CORE}/secret",
            "data": {"value": _encoded(kubeconfig.encode())},
        },
    ]


def hosts(count: int, labels: Mapping[int, Mapping[str, str]] | None = None) -> list[Obj]:
    """Bare metal that waits to be used; `labels` of some of them, by number."""
    return [
        _named(
            f"{HOST_GROUP}/{HOST_VERSION}",
            "BareMetalHost",
            f"host-{number}",
            labels=(labels or {}).get(number, {}),
            spec={"online": False, "bootMACAddress": f"52:54:00:00:00:{number:02x}"},
        )
        for number in range(1, count + 1)
    ]


def slinky_controller(key: bytes, namespace: str = SLURM_NAMESPACE) -> list[Obj]:
    """Slinky's Controller and the Secrets that it names."""
    return [
        {
            **_named("v1", "Secret", f"{SLURM}-auth-slurm", namespace=namespace),
            "data": {"slurm.key": _encoded(key)},
        },
        _named(
            "slinky.slurm.net/v1beta1",
            "Controller",
            SLURM,
            namespace=namespace,
            spec={
                "clusterName": SLURM,
                "slurmKeyRef": {"name": f"{SLURM}-auth-slurm", "key": "slurm.key"},
                "jwtHs256KeyRef": {"name": f"{SLURM}-auth-jwt", "key": "jwt_hs256.key"},
            },
        ),
    ]


def slinky_stateful_set(controller: Obj, namespace: str = SLURM_NAMESPACE, *, old: bool = False) -> Obj:
    """What Slinky's operator makes for a Controller; `old`: with the labels that the thesis's version wrote."""
    labels = {
        "app.kubernetes.io/name": "slurm-ctld" if old else "slurmctld",
        "app.kubernetes.io/component": "controller",
        "app.kubernetes.io/instance": SLURM,
    }
    container = {
        "name": "slurmctld",
        "image": "slurmctld",
        "ports": [{"name": "slurmctld", "containerPort": 6817, "hostPort": 6817}],
    }
    made = _named(
        "apps/v1",
        "StatefulSet",
        f"{SLURM}-controller",
        namespace=namespace,
        labels=labels,
        spec={
            "replicas": 1,
            "serviceName": f"{SLURM}-controller",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"nodeName": NODE, "hostNetwork": True, "containers": [container]},
            },
        },
    )
    owner = {
        "apiVersion": controller["apiVersion"],
        "kind": controller["kind"],
        "name": controller["metadata"]["name"],
        "uid": controller["metadata"]["uid"],
        "controller": True,
    }
    made["metadata"]["ownerReferences"] = [owner]
    return made


def node(address: str) -> Obj:
    return {
        **_named("v1", "Node", NODE),
        "status": {"addresses": [{"type": "InternalIP", "address": address}]},
    }


def workers(wanted: Workers) -> list[Obj]:
    name = wanted.name
    return [
        _named(
            f"{GROUP}/v1beta2",
            "Metal3DataTemplate",
            name,
            labels={NAMESPACE_LABEL: SLURM_NAMESPACE},
            spec={
                "clusterName": CLUSTER,
                "metaData": {
                    "objectNames": [
                        {"key": "name", "object": "machine"},
                        {"key": "local-hostname", "object": "machine"},
                    ]
                },
            },
        ),
        _named(
            f"{GROUP}/v1beta2",
            "Metal3MachineTemplate",
            name,
            spec={
                "template": {
                    "spec": {
                        "image": {"url": "file:///debian.img", "checksum": "none"},
                        "dataTemplate": {"name": name},
                        "hostSelector": {"matchLabels": dict(wanted.host_labels)},
                    }
                }
            },
        ),
        _bootstrap(wanted),
        machine_deployment(name, {"configRef": _reference(_BOOTSTRAP, "SlurmWorkerConfigTemplate", name)}),
        *([worker_set(wanted)] if wanted.autoscaled else []),
    ]


def machine_deployment(name: str, bootstrap: Mapping[str, Any]) -> Obj:
    labels = {"workers": name}
    return _named(
        f"{_CORE}/v1beta2",
        "MachineDeployment",
        name,
        spec={
            "clusterName": CLUSTER,
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "clusterName": CLUSTER,
                    "bootstrap": dict(bootstrap),
                    "infrastructureRef": _reference(GROUP, "Metal3MachineTemplate", name),
                },
            },
        },
    )


def _bootstrap(wanted: Workers) -> Obj:
    slurmd: Obj = {"packages": []}
    if wanted.cloud_nodes:
        # slurmctld waits for a boot later than its call; all hosts of a testbed have the machine's boot time, unless -b.
        slurmd |= {"cloud": True, "extraArguments": ["-b"]}
    else:
        slurmd["features"] = list(wanted.features)
        slurmd["conf"] = f"CPUs={wanted.cpus} RealMemory={wanted.memory_mb}"
    return _named(
        f"{_BOOTSTRAP}/v1alpha1",
        "SlurmWorkerConfigTemplate",
        wanted.name,
        spec={"template": {"spec": {"slurmd": slurmd}}},
    )


def slurm_cluster(connection: Mapping[str, Any]) -> Obj:
    return _named(
        "slurmlet.io/v1alpha1",
        "SlurmCluster",
        SLURM,
        spec={"connection": dict(connection), "controller": {"namespace": SLURM_NAMESPACE}},
    )


def worker_set(wanted: Workers) -> Obj:
    target = {"apiVersion": f"{_CORE}/v1beta2", "kind": "MachineDeployment", "name": wanted.name}
    made = _named(
        "slurmlet.io/v1alpha1",
        "WorkerSet",
        wanted.name,
        spec={
            "slurmCluster": SLURM,
            "scaleTargetRef": target,
            "partitions": [wanted.name] if wanted.cloud_nodes else ["batch", wanted.name],
            "features": list(wanted.features),
            "shape": {"cpus": wanted.cpus, "memoryMB": wanted.memory_mb},
            "min": wanted.minimum,
            "max": wanted.maximum,
            **wanted.more,
        },
    )
    if wanted.cloud_nodes:
        made["metadata"]["annotations"] = {"slurmlet.io/power-saving-nodes": wanted.cloud_nodes}
    return made


def secret(name: str, **data: str) -> Obj:
    return {
        **_named("v1", "Secret", name),
        "data": {key: _encoded(value.encode()) for key, value in data.items()},
    }


def _reference(group: str, kind: str, name: str) -> Obj:
    return {"apiGroup": group, "kind": kind, "name": name}


def _named(
    version: str,
    kind: str,
    name: str,
    *,
    namespace: str = NAMESPACE,
    labels: Mapping[str, str] | None = None,
    spec: Mapping[str, Any] | None = None,
) -> Obj:
    metadata: Obj = {"name": name}
    if kind not in ("Namespace", "Node"):
        metadata["namespace"] = namespace
    if labels:
        metadata["labels"] = dict(labels)
    made: Obj = {"apiVersion": version, "kind": kind, "metadata": metadata}
    return {**made, "spec": dict(spec)} if spec is not None else made


def _encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
