"""Partitions as Nodes: names, labels, readiness."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from slurmlet.model import partition_node
from slurmlet.model.slurm_values import Partition

PART = Partition("batch", True, True, "infinite", 3, 3, 48, 16, 18000, 6000, 0)
HUB = partition_node.HubFacts("10.0.0.1", "login", 40123, "24.11.5", "v1.36.3", "0.1.0", "deadbeef")
# k8s.io/apimachinery/pkg/util/validation
DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
LABEL = re.compile(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?")

ODD_NAMES = [
    "GPU_a100",
    "a..b",
    "a.-b",
    "-x-",
    "_",
    "ü",
    "x" * 300,
    "q" * 239 + "-" * 9 + "z",
    "a b",
    "$(x)",
    "1",
]


@pytest.mark.parametrize("name", ["batch", "a100", "gpu-long", "v1.2", *ODD_NAMES])
def test_every_partition_gets_a_legal_node_name(name: str) -> None:
    made = partition_node.node_names([name])[name]
    assert DNS_NAME.fullmatch(made)
    assert len(made) <= 253


def test_plain_names_are_kept_and_others_made_plain() -> None:
    assert partition_node.node_names(["batch", "GPU_a100"]) == {"batch": "batch", "GPU_a100": "gpu-a100"}


def test_names_are_unique_and_do_not_depend_on_the_order() -> None:
    partitions = ["A", "a", "a_2", "a-2", "B!", "b?", "!", "?"]
    made = partition_node.node_names(partitions)
    assert len(set(made.values())) == len(partitions)
    assert partition_node.node_names(reversed(partitions)) == made


def test_a_new_partition_that_looks_alike_takes_nobodys_name() -> None:
    assert partition_node.node_names(["a", "A", "a-2"]) == {"a": "a", "a-2": "a-2", "A": "a-3"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("infinite", "infinite"), ("1-00:00:00", "1-00-00-00"), ("10:00", "10-00"), ("", "none"), ("---", "none"),
        ("a" * 80, "a" * 63), ("a" * 62 + "_b", "a" * 62), ("ü", "none"),
    ],
)  # fmt: skip
def test_label_values(text: str, value: str) -> None:
    assert partition_node.label_value(text) == value


@pytest.mark.parametrize("name", ["batch", *ODD_NAMES])
def test_all_labels_are_legal(name: str) -> None:
    features = frozenset({"ib", "a=b", "rack/7", "x" * 99, "-", "CPU@2.4GHz"})
    made = partition_node.labels(
        replace(PART, name=name, features=features, time_limit="1-00:00:00"),
        partition_node.node_names([name])[name],
    )
    for key, value in made.items():
        prefix, _, rest = key.rpartition("/")
        assert DNS_NAME.fullmatch(prefix)
        for text in (rest, value):
            assert LABEL.fullmatch(text)
            assert len(text) <= 63
    assert made["feature.slurmlet.io/ib"] == "true"
    assert made["slurmlet.io/kind"] == "partition"


def test_a_label_tells_the_default_partition_and_no_taint_does() -> None:
    other = replace(PART, name="short", default=False)
    made = [partition_node.node_object(partition, partition.name) for partition in (PART, other)]
    # Both values: a label that is merely left out would stay on a Node whose partition is the default no longer.
    assert [node["metadata"]["labels"]["slurmlet.io/default-partition"] for node in made] == ["true", "false"]
    assert not any(node["spec"].get("taints") for node in made)


@pytest.mark.parametrize(
    ("key", "effect", "obsolete"),
    [
        ("slurmlet.io/partition", "PreferNoSchedule", True),
        ("slurmlet.io/pool-0", "PreferNoSchedule", True),
        ("slurmlet.io/partition", "NoSchedule", False),
        ("slurmlet.io/gang", "NoSchedule", False),
        ("mine", "PreferNoSchedule", False),
    ],
)
def test_taints_that_an_earlier_version_set_to_rank_nodes(key: str, effect: str, obsolete: bool) -> None:
    assert partition_node.is_obsolete_taint({"key": key, "effect": effect}) is obsolete


@pytest.mark.parametrize(
    ("partition", "ready", "reason", "words"),
    [
        (PART, True, "PartitionUp", "3 of 3"),
        (replace(PART, nodes_usable=1), True, "PartitionUp", "1 of 3"),
        (replace(PART, up=False), False, "PartitionDown", "partition batch is not up"),
        (
            replace(PART, nodes_usable=0, node_states={"down": 2, "drained": 1}),
            False, "NoUsableNodes", "(2 down, 1 drained)",
        ),
        (replace(PART, nodes=0, nodes_usable=0), False, "NoUsableNodes", "(no nodes)"),
    ],
)  # fmt: skip
def test_readiness_in_slurms_words(partition: Partition, ready: bool, reason: str, words: str) -> None:
    found = partition_node.ready(partition)
    assert found[:2] == (ready, reason)
    assert words in found[2]


def conditions(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["type"]: one for one in status["conditions"]}


def test_the_status_of_a_node() -> None:
    status = partition_node.node_status(replace(PART, gpus=4), "batch", HUB, "2026-01-01T00:00:00Z", {})
    assert status["capacity"] == {
        "cpu": "48", "memory": "18000Mi", "pods": "100000", "ephemeral-storage": "1Pi", "nvidia.com/gpu": "4",
        "amd.com/gpu": "4",
    }  # fmt: skip
    # Not a limit on queueing: Slurm decides what waits.
    assert int(status["allocatable"]["cpu"]) > 48
    assert status["daemonEndpoints"] == {"kubeletEndpoint": {"Port": 40123}}
    assert status["addresses"][0] == {"type": "InternalIP", "address": "10.0.0.1"}
    assert status["declaredFeatures"] == ["ExtendWebSocketsToKubelet", "RestartAllContainersOnContainerExits"]
    assert status["nodeInfo"]["kubeletVersion"] == "v1.36.3+slurmlet-0.1.0"
    assert {type_: one["status"] for type_, one in conditions(status).items()} == {
        "MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": "True",
    }  # fmt: skip


def test_a_partition_without_gpus_offers_none() -> None:
    status = partition_node.node_status(PART, "batch", HUB, "2026-01-01T00:00:00Z", {})
    assert "nvidia.com/gpu" not in {**status["capacity"], **status["allocatable"]}


def test_transition_times_change_only_with_the_status() -> None:
    first = partition_node.node_status(PART, "batch", HUB, "2026-01-01T00:00:00Z", {})
    later = partition_node.node_status(PART, "batch", HUB, "2026-01-01T01:00:00Z", first)
    assert conditions(later)["Ready"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
    assert conditions(later)["Ready"]["lastHeartbeatTime"] == "2026-01-01T01:00:00Z"
    down = partition_node.node_status(replace(PART, up=False), "batch", HUB, "2026-01-01T02:00:00Z", later)
    assert conditions(down)["Ready"]["lastTransitionTime"] == "2026-01-01T02:00:00Z"
    assert conditions(down)["Ready"]["reason"] == "PartitionDown"
    assert conditions(down)["MemoryPressure"]["lastTransitionTime"] == "2026-01-01T00:00:00Z"
