"""Which pods are a gang, how large it is, and the one job it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.base.errors import RefusedPod
from slurmlet.model import gangs
from slurmlet.model.allocation_node import AllocationFacts, node_object
from slurmlet.model.ids import JobId
from slurmlet.model.pool_jobs import gang_jobs, pool_jobs
from slurmlet.model.slurm_values import Job, JobSpec
from slurmlet.slurm.command_options import sbatch_words


def pod(name: str = "p", *, owner: str = "", size: str = "", gang: str = "g", **spec: Any) -> dict[str, Any]:
    annotations = {gangs.GANG: gang} | ({gangs.SIZE_ANNOTATION: size} if size else {})
    metadata: dict[str, Any] = {"name": name, "namespace": "n", "uid": name, "annotations": annotations}
    metadata["resourceVersion"] = "5"
    if owner:
        metadata["ownerReferences"] = [
            {"kind": "Job", "name": owner, "uid": f"{owner}-1", "controller": True}
        ]
    return {"metadata": metadata, "spec": {"schedulingGates": [{"name": gangs.GANG}], **spec}}


def asking(**amounts: str) -> dict[str, Any]:
    return {"containers": [{"name": "c", "resources": {"requests": amounts}}]}


def partition(name: str, *, default: bool) -> dict[str, Any]:
    key = "slurmlet.io/partition"
    labels = {key: name, "slurmlet.io/default-partition": "true" if default else "false"}
    return {"metadata": {"name": name, "labels": labels, "annotations": {key: name}}, "spec": {}}


class TestWho:
    def test_pods_of_one_job_are_one_gang_and_those_of_another_are_not(self) -> None:
        assert gangs.key_of(pod("a", owner="j")) == gangs.key_of(pod("b", owner="j"))
        assert gangs.key_of(pod("a", owner="j")) != gangs.key_of(pod("a", owner="k"))

    def test_with_a_size_of_its_own_a_gang_spans_its_owners(self) -> None:
        assert gangs.key_of(pod("a", owner="j", size="3")) == gangs.key_of(pod("b", size="3"))
        assert gangs.key_of(pod("a", size="3")) != gangs.key_of(pod("a", size="3", gang="other"))

    def test_what_it_is_called(self) -> None:
        assert gangs.name_of(pod(owner="j", gang="true")) == "j"
        assert gangs.name_of(pod(owner="j", gang="team")) == "team"


class TestSize:
    @pytest.mark.parametrize(
        ("spec", "status", "size"),
        [
            ({"parallelism": 3, "completions": 3}, {}, 3),
            ({"parallelism": 3, "completions": 3}, {"succeeded": 2}, 1),
            ({"parallelism": 3, "completions": 10}, {"succeeded": 2}, 3),
            ({"parallelism": 4}, {"succeeded": 1}, 4),
            ({}, {}, 1),
        ],
    )
    def test_a_jobs_parallelism(self, spec: dict[str, int], status: dict[str, int], size: int) -> None:
        assert gangs.size_of(pod(owner="j"), {"spec": spec, "status": status}) == size

    def test_the_annotation_comes_first(self) -> None:
        assert gangs.job_of(pod(owner="j", size="5")) == ""
        assert gangs.size_of(pod(owner="j", size="5"), None) == 5

    @pytest.mark.parametrize("size", ["", "many", "-1"])
    def test_nobody_says(self, size: str) -> None:
        assert gangs.size_of(pod(size=size), None) == 0


def sized(pods: list[dict[str, Any]], partition: str) -> list[str]:
    """What sbatch is told of the size."""
    spec = gangs.sized(JobSpec("g", "", partition=partition), pods)
    own = ("--no-requeue", "--job-name=g", "--export=ALL")
    return [word for word in sbatch_words(spec) if word not in own]


class TestJob:
    def test_a_slot_for_each_as_large_as_the_largest(self) -> None:
        made = sized(
            [pod(**asking(cpu="500m", memory="1Gi")), pod(**asking(cpu="3", memory="100Mi"))], "batch"
        )
        assert made == ["--partition=batch", "--ntasks=2", "--cpus-per-task=3", "--mem-per-cpu=342M"]

    def test_devices_are_counted_per_host(self) -> None:
        made = sized([pod(containers=[gpu(2)]), pod(containers=[gpu(1)])], "")
        assert made == ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gres=gpu:2"]

    def test_annotations_come_last_and_pass_the_same_filter(self) -> None:
        one = pod(**asking(cpu="1"))
        one["metadata"]["annotations"]["slurmlet.io/sbatch"] = "--qos=high"
        assert sized([one], "")[-1] == "--qos=high"
        one["metadata"]["annotations"]["slurmlet.io/sbatch"] = "--wrap=reboot"
        with pytest.raises(RefusedPod):
            sized([one], "")

    def test_options_that_contradict_ours(self) -> None:
        one = pod(**asking(cpu="1", memory="1Gi"))
        one["metadata"]["annotations"]["slurmlet.io/sbatch"] = "--mem=3G"
        made = sized([one], "")
        assert made == ["--ntasks=1", "--cpus-per-task=1", "--mem=3G"]
        one["metadata"]["annotations"]["slurmlet.io/ntasks"] = "2"
        with pytest.raises(RefusedPod, match="number of its pods"):
            sized([one], "")

    def test_pods_of_the_queue_are_no_gang(self) -> None:
        with pytest.raises(RefusedPod, match="allocation of its own"):
            sized([pod(nodeSelector={"slurmlet.io/kind": "partition"})], "")

    def test_its_script_has_paths_of_ours_quoted(self) -> None:
        assert "'/home/a b/runner.pyz' '/home/a b/nodes/gang-1'" in gangs.script(
            "/home/a b/runner.pyz", "/home/a b/nodes/gang-1"
        )

    def test_its_partition(self) -> None:
        nodes = [partition("gpu", default=False), partition("batch", default=True)]
        assert gangs.partition_for(pod(), nodes) == "batch"
        assert gangs.partition_for(pod(nodeSelector={"slurmlet.io/partition": "gpu"}), nodes) == "gpu"
        assert gangs.partition_for(pod(), nodes[:1]) == "gpu"
        assert gangs.partition_for(pod(), []) == ""

    def test_its_job_is_told_from_the_pool_s(self) -> None:
        name = "gang-0123456789-abcdef"
        job = Job(JobId("7"), "PENDING", "Resources", "", "batch", f"slurmlet-pool:cafe:{name}", node_count=3)
        ((key, found),) = gang_jobs("cafe", [job]).items()
        assert (found.hosts, found.reason, found.node) == (3, "Resources", name)
        assert (key, pool_jobs("cafe", [job])) == ("0123456789", [])
        assert gangs.key_of_allocation("pool-abcdef") == ""


class TestLife:
    def test_released_for_nodes_of_its_allocation_alone(self) -> None:
        patch = gangs.release_patch(pod(tolerations=[{"key": "a"}]), "gang-x")
        assert patch["metadata"] == {"resourceVersion": "5"}
        assert patch["spec"]["schedulingGates"] == []
        assert patch["spec"]["nodeSelector"] == {gangs.GANG: "gang-x"}
        assert [one["key"] for one in patch["spec"]["tolerations"]] == ["a", gangs.GANG]

    def test_another_gate_keeps_it_back(self) -> None:
        assert gangs.is_held_by_us_alone(pod())
        both = pod(schedulingGates=[{"name": gangs.GANG}, {"name": "other"}])
        assert gangs.is_held(both)
        assert not gangs.is_held_by_us_alone(both)

    def test_a_pod_that_is_leaving_keeps_its_place_until_it_has_ended(self) -> None:
        leaving = pod(nodeName="n")
        leaving["metadata"]["deletionTimestamp"] = "now"
        assert not gangs.is_over(leaving)
        assert gangs.is_over({**leaving, "status": {"phase": "Failed"}})
        del leaving["spec"]["nodeName"]
        assert gangs.is_over(leaving)

    def test_its_nodes_are_for_nobody_else(self) -> None:
        facts = AllocationFacts("gang-0123456789-abcdef-2", "c1", "10.0.0.1", "batch", "7", 2, 100, 0)
        node = node_object(facts)
        assert node["metadata"]["labels"][gangs.GANG] == "gang-0123456789-abcdef"
        assert node["spec"]["taints"] == [gangs.taint("gang-0123456789-abcdef")]
        other = node_object(AllocationFacts("pool-abcdef", "c1", "10.0.0.1", "batch", "7", 2, 100, 0))
        assert gangs.GANG not in other["metadata"]["labels"]
        assert other["spec"] == {}


def gpu(count: int) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"nvidia.com/gpu": str(count)}}}
