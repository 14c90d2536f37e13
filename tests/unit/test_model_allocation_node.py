"""A host of an allocation as a Node: sized to what Slurm granted, and by nothing else."""

from __future__ import annotations

from typing import Any

from slurmlet.model import allocation_node as model
from slurmlet.model.partition_node import HubFacts
from slurmlet.model.slurm_values import Grant

HUB = HubFacts("10.0.0.1", "login", 10250, "24.11", "v1.36.0", "0.1.0", "deadbeef")
HELLO: dict[str, Any] = {
    "job_id": "12", "host": "c1", "host_ip": "10.0.0.2", "partition": "batch", "cpus": 2, "memory_mb": 0, "gpus": 0,
    "host_memory_mb": 64000,
}  # fmt: skip


def status(facts: model.AllocationFacts) -> dict[str, Any]:
    return model.node_status(facts, HUB, model.READY, "2026-01-01T00:00:00Z", {}, [])


class TestSize:
    def test_slurms_record_outweighs_the_environment(self) -> None:
        facts = model.facts("c1", HELLO, Grant(4, 1500, (("gpu:a100", 2),)))
        assert (facts.cpus, facts.memory_mb, facts.gpus) == (4, 1500, 2)

    def test_without_a_record_the_environment_counts(self) -> None:
        facts = model.facts("c1", {**HELLO, "memory_mb": 900, "gpus": 1}, None)
        assert (facts.cpus, facts.memory_mb, facts.gpus) == (2, 900, 1)

    def test_where_slurm_holds_no_memory_the_hosts_is_there(self) -> None:
        assert model.facts("c1", HELLO, Grant(4, 0)).memory_mb == 64000

    def test_allocatable_is_a_limit(self) -> None:
        told = status(model.facts("c1", HELLO, Grant(4, 1500, (("gpu:a100", 2), ("shard", 8)))))
        assert told["allocatable"] == told["capacity"]
        wanted = {
            "cpu": "4", "memory": "1500Mi", "nvidia.com/gpu": "2", "slurmlet.io/gres-gpu": "2",
            "slurmlet.io/gres-gpu.a100": "2", "slurmlet.io/gres-shard": "8",
        }  # fmt: skip
        assert {name: told["allocatable"][name] for name in wanted} == wanted


def test_labels_say_what_it_is() -> None:
    labels = model.node_object(model.facts("c1", HELLO, None))["metadata"]["labels"]
    assert labels["slurmlet.io/kind"] == "allocation"
    assert (labels["slurmlet.io/partition"], labels["slurmlet.io/job"]) == ("batch", "12")


def test_the_kubelet_of_every_node_is_the_hub() -> None:
    told = status(model.facts("c1", HELLO, None))
    assert {"type": "InternalIP", "address": "10.0.0.1"} in told["addresses"]
    assert told["conditions"][-1]["type"] == "Ready"
    assert told["conditions"][-1]["status"] == "True"


def test_a_hosts_name_becomes_a_legal_one() -> None:
    assert model.node_name("Node_07.Site") == "node-07.site"
