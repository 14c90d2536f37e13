"""Ranking of Nodes, computed as the scheduler computes it: terms that match are summed, scaled to 100, weighted, added."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import scheduler_config
from slurmlet.controlplane.components import scheduler
from slurmlet.controlplane.run_files import make_dirs
from slurmlet.model import allocation_node, partition_node
from slurmlet.model.slurm_values import Partition

BATCH = Partition("batch", True, True, "infinite", 3, 3, 48, 16, 18000, 6000, 0)
SHORT = replace(BATCH, name="short", default=False)
POOL = allocation_node.AllocationFacts("pool-1", "c1", "10.0.0.2", "batch", "7", 2, 300, 0)
# Weights of the plugins of Kubernetes 1.36 that score and that the configuration leaves alone: NodeResourcesFit,
# VolumeBinding, PodTopologySpread, InterPodAffinity, DynamicResources, NodeResourcesBalancedAllocation, ImageLocality.
OTHERS = 100 * sum((1, 1, 2, 2, 2, 1, 1))


@pytest.fixture
def config() -> dict[str, Any]:
    return scheduler_config.document(Path("/run/kube-scheduler.kubeconfig"))


def labels() -> dict[str, dict[str, str]]:
    made = [partition_node.node_object(partition, partition.name) for partition in (BATCH, SHORT)]
    made.append(allocation_node.node_object(POOL))
    return {node["metadata"]["name"]: node["metadata"]["labels"] for node in made}


def scores(config: dict[str, Any], *own: tuple[int, str, str]) -> dict[str, int]:
    """Weighted points of NodeAffinity by node; `own`: (weight, label, value) of the pod's preferred terms."""
    (profile,) = config["profiles"]
    (plugin,) = profile["pluginConfig"]
    terms = []
    for term in plugin["args"]["addedAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]:
        (expression,) = term["preference"]["matchExpressions"]
        terms.append((term["weight"], expression["key"], expression["values"][0]))
    counts = {
        name: sum(weight for weight, key, value in [*terms, *own] if found.get(key) == value)
        for name, found in labels().items()
    }
    most = max(counts.values())
    weight = weights(config)["NodeAffinity"]
    return {name: weight * (count * 100 // most) for name, count in counts.items()}


def weights(config: dict[str, Any]) -> dict[str, int]:
    (profile,) = config["profiles"]
    return {one["name"]: one["weight"] for one in profile["plugins"]["multiPoint"]["enabled"]}


def test_the_pool_comes_before_the_default_partition_and_that_before_others(config: dict[str, Any]) -> None:
    found = scores(config)
    assert found["pool-1"] - found["batch"] > OTHERS
    assert found["batch"] - found["short"] > OTHERS


def test_what_a_pod_prefers_itself_comes_first_and_ranks_decide_the_rest(config: dict[str, Any]) -> None:
    chosen = scores(config, (3, "slurmlet.io/partition", "short"))
    assert chosen["short"] - max(chosen["pool-1"], chosen["batch"]) > OTHERS
    either = scores(config, (100, "slurmlet.io/kind", "partition"))
    assert either["batch"] - either["short"] > OTHERS
    assert either["short"] - either["pool-1"] > OTHERS


def test_a_taint_of_the_users_own_outweighs_ranks(config: dict[str, Any]) -> None:
    assert weights(config)["TaintToleration"] * 100 > weights(config)["NodeAffinity"] * 100 + OTHERS


def test_no_node_is_excluded(config: dict[str, Any]) -> None:
    assert "required" not in json.dumps(config)


def test_the_scheduler_reads_the_file_that_is_written(tmp_path: Path) -> None:
    files = ClusterFiles(tmp_path / "exp")
    make_dirs(files)
    scheduler_config.write(files)
    argv = scheduler(files, Path("/opt/bin"))
    assert f"--config={files.scheduler_config}" in argv
    assert not any(word.startswith(("--kubeconfig", "--leader-elect", "--profiling")) for word in argv), (
        "ignored"
    )
    written = json.loads(files.scheduler_config.read_text())
    assert written["clientConnection"]["kubeconfig"] == str(files.run / "kube-scheduler.kubeconfig")
    assert written["leaderElection"] == {"leaderElect": False}
    assert written["enableProfiling"] is False
