"""The kube-scheduler's configuration: pods go to the pool before the default partition, and there before the others.

The scheduler adds the terms below to each pod's own preferred node affinity. They match labels that the hub keeps on the
Nodes, so that this file stays right when pool nodes come and go and when Slurm's default partition changes. They only
rank: what a pod requires (node selector, required affinity, RuntimeClass, taints) is decided before anything is ranked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slurmlet.base.files import write_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.run_files import run_files
from slurmlet.model import allocation_node, partition_node

# The least that affinity terms can weigh: a pod's own preferred term of weight 3 or more outweighs both.
_POOL_WEIGHT, _DEFAULT_PARTITION_WEIGHT = 2, 1
# A plugin scores a node from 0 to 100, and the scheduler adds the scores up by these weights. All other plugins of
# Kubernetes 1.36 weigh 10 together (1000 points); one point of node affinity is 2000. So no spreading, balance of load or
# image that is present takes a pod to a lower rank, also where a pod's own term of weight 100 leaves one point between
# ranks. The proportion between the two is upstream's (3 to 2): a PreferNoSchedule taint of the user's own comes first.
_PLUGIN_WEIGHTS = {"TaintToleration": 3000, "NodeAffinity": 2000}
_API_VERSION = "kubescheduler.config.k8s.io/v1"


def write(files: ClusterFiles) -> None:
    write_json(files.scheduler_config, document(run_files(files).kubeconfig("kube-scheduler")))


def document(kubeconfig: Path) -> dict[str, Any]:
    # With --config the scheduler ignores its flags for what stands here.
    return {
        "apiVersion": _API_VERSION,
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "leaderElection": {"leaderElect": False},
        "enableProfiling": False,
        "profiles": [
            {
                "schedulerName": "default-scheduler",
                "plugins": {
                    "multiPoint": {
                        "enabled": [
                            {"name": name, "weight": weight} for name, weight in _PLUGIN_WEIGHTS.items()
                        ]
                    }
                },
                "pluginConfig": [{"name": "NodeAffinity", "args": _node_affinity()}],
            }
        ],
    }


def _node_affinity() -> dict[str, Any]:
    terms = [
        _term(_POOL_WEIGHT, partition_node.KIND_LABEL, allocation_node.KIND),
        _term(_DEFAULT_PARTITION_WEIGHT, partition_node.DEFAULT_LABEL, "true"),
    ]
    return {
        "apiVersion": _API_VERSION,
        "kind": "NodeAffinityArgs",
        "addedAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms},
    }


def _term(weight: int, label: str, value: str) -> dict[str, Any]:
    expression = {"key": label, "operator": "In", "values": [value]}
    return {"weight": weight, "preference": {"matchExpressions": [expression]}}
