"""Gangs: pods that start together, in one Slurm allocation of their own, or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

GANG = "slurmlet.io/gang"


def small(cpu: str = "1", memory: str = "50Mi") -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu, "memory": memory}}}


def member(
    number: int, command: str, size: int = 3, asks: dict[str, Any] | None = None, **spec: Any
) -> dict[str, Any]:
    annotations = {GANG: "team", "slurmlet.io/gang-size": str(size)}
    made = pod(f"m{number}", command, container=asks or small(), **spec)
    made["metadata"]["annotations"] = annotations
    return made


def job(name: str, parallelism: int, command: str, asks: dict[str, Any], sbatch: str = "") -> dict[str, Any]:
    annotations = {"slurmlet.io/sbatch": sbatch} if sbatch else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "annotations": {GANG: "true"}},
        "spec": {
            "parallelism": parallelism,
            "completions": parallelism,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "template": {
                "metadata": {"annotations": annotations},
                "spec": pod(name, command, container=asks)["spec"],
            },
        },
    }


def queue(testbed: Testbed, kubectl: Kubectl) -> list[list[str]]:
    """(id, name, state, hosts) of this namespace's jobs that are not over."""
    said = testbed.run(["squeue", "--noheader", "-u", "user1", "-o", "%A|%j|%T|%D"]).stdout
    lines = [line.split("|") for line in said.splitlines()]
    return [line for line in lines if f".{kubectl.namespace}." in line[1] and line[2] != "COMPLETING"]


def pods_of(kubectl: Kubectl, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = kubectl.get("pods", None, "-l", f"job-name={name}")["items"]
    return found


def phases(kubectl: Kubectl) -> list[str]:
    return [one["status"]["phase"] for one in kubectl.get("pods")["items"]]


def gang_nodes(kubectl: Kubectl) -> list[str]:
    return [one["metadata"]["name"] for one in kubectl.get("nodes", None, "-l", GANG)["items"]]


def until_told(kubectl: Kubectl, pods: Callable[[], list[dict[str, Any]]], reason: str, words: str) -> None:
    """Every one of the pods has this event."""
    eventually(
        lambda: (
            (found := pods()) and all(kubectl.told(one["metadata"]["name"], reason, words) for one in found)
        )
    )


def test_a_job_starts_as_one_allocation_which_ends_with_it(testbed: Testbed, kubectl: Kubectl) -> None:
    command = "date +%s; sleep 4"
    kubectl.apply(job("train", 4, command, small("1", "100Mi"), "--ntasks-per-node=2"))
    (line,) = eventually(lambda: queue(testbed, kubectl))
    assert line[1].startswith("train.")
    eventually(lambda: phases(kubectl) == ["Running"] * 4, 90)
    (line,) = queue(testbed, kubectl)
    assert line[3] == "2"
    pods = pods_of(kubectl, "train")
    nodes = {one["spec"]["nodeName"] for one in pods}
    assert len(nodes) == 2
    assert nodes <= set(gang_nodes(kubectl))
    assert {one["metadata"]["annotations"]["slurmlet.io/job-id"] for one in pods} == {line[0]}
    kubectl("wait", "--for=condition=complete", "job/train", "--timeout=60s")
    begun = [float(kubectl("logs", one["metadata"]["name"]).stdout) for one in pods]
    assert max(begun) - min(begun) < 5, begun
    eventually(lambda: not queue(testbed, kubectl), 30)
    assert testbed.run(["sacct", "-nXP", "-j", line[0], "-o", "State,ExitCode"]).stdout.split() == [
        "COMPLETED|0:0"
    ]
    eventually(lambda: not nodes & set(gang_nodes(kubectl)), 30)


def test_gpus_of_a_gang_are_the_allocations(testbed: Testbed, kubectl: Kubectl) -> None:
    gpu = {"resources": {"limits": {"cpu": "1", "memory": "100Mi", "nvidia.com/gpu": "1"}}}
    # Which of the host's devices it may open is Slurm's to say (ConstrainDevices), as for any job; here it may open all.
    kubectl.apply(job("learn", 1, "echo $CUDA_VISIBLE_DEVICES; ls /dev/nvidia0; sleep 5", gpu))
    eventually(lambda: phases(kubectl) == ["Running"], 90)
    (line,) = queue(testbed, kubectl)
    said = testbed.run(["scontrol", "show", "job", line[0]]).stdout
    assert "gres/gpu:1" in said
    assert f"NodeList={testbed.plan.gpu_host}\n" in said
    (only,) = pods_of(kubectl, "learn")
    eventually(lambda: kubectl("logs", only["metadata"]["name"]).stdout == "0\n/dev/nvidia0\n")
    kubectl("wait", "--for=condition=complete", "job/learn", "--timeout=60s")


def test_none_starts_while_there_is_no_room_for_all(testbed: Testbed, kubectl: Kubectl) -> None:
    """Two of the three would fit beside what is there already."""
    holder = testbed.run(["sbatch", "--parsable", "-w", "c3", "--exclusive", "--wrap", "sleep 600"])
    holder_id = holder.stdout.strip()
    try:
        eventually(lambda: testbed.run(["squeue", "-h", "-j", holder_id, "-t", "R"]).stdout)
        cpus = testbed.run(["sinfo", "-h", "-n", "c1", "-o", "%c"]).stdout.split()[0].rstrip("+")
        kubectl.apply(job("wide", 3, "sleep 2", small(cpus)))
        until_told(kubectl, lambda: pods_of(kubectl, "wide"), "GangQueued", "is pending:")
        assert phases(kubectl) == ["Pending"] * 3
        assert not any(one["spec"].get("nodeName") for one in pods_of(kubectl, "wide"))
        ((job_id, _, state, _),) = queue(testbed, kubectl)
        assert state == "PENDING"
        kubectl.tells(pods_of(kubectl, "wide")[0]["metadata"]["name"], "GangSubmitted", words=job_id)
    finally:
        testbed.run(["scancel", holder_id])
    kubectl("wait", "--for=condition=complete", "job/wide", "--timeout=90s")


def test_what_slurm_can_never_grant_is_told_and_nothing_starts(testbed: Testbed, kubectl: Kubectl) -> None:
    kubectl.apply(job("huge", 3, "true", small("1000")))
    until_told(kubectl, lambda: pods_of(kubectl, "huge"), "GangRefused", "not available")
    assert phases(kubectl) == ["Pending"] * 3
    assert not queue(testbed, kubectl)


def test_bare_pods_wait_for_the_last_of_them(testbed: Testbed, kubectl: Kubectl) -> None:
    kubectl.apply(*(member(number, "sleep 3600") for number in range(2)))
    until_told(kubectl, lambda: kubectl.get("pods")["items"], "GangIncomplete", "2 of 3 pods exist")
    assert not queue(testbed, kubectl)
    kubectl.apply(member(2, "sleep 3600"))
    eventually(lambda: phases(kubectl) == ["Running"] * 3, 90)
    assert len(queue(testbed, kubectl)) == 1
    kubectl("delete", "pods", "--all", "--wait=true")
    eventually(lambda: not queue(testbed, kubectl), 30)


def test_deleted_before_it_began_leaves_no_job(testbed: Testbed, kubectl: Kubectl) -> None:
    kubectl.apply(job("later", 2, "true", small(), "--begin=now+1hour"))
    until_told(kubectl, lambda: kubectl.get("pods")["items"], "GangQueued", "BeginTime")
    kubectl("delete", "job", "later", "--wait=true")
    eventually(lambda: not queue(testbed, kubectl), 30)


def test_a_hub_that_dies_meanwhile_asks_for_nothing_twice(
    testbed: Testbed, kubectl: Kubectl, cluster: str
) -> None:
    hub = json.loads(testbed.run(["cat", f"/home/user1/.slurmlet/{cluster}/hub.json"]).stdout)["pid"]
    kubectl.apply(job("steady", 2, "sleep 6", small()))
    eventually(lambda: queue(testbed, kubectl))
    testbed.run(["kill", "-9", str(hub)])
    kubectl("wait", "--for=condition=complete", "job/steady", "--timeout=90s")
    seen = testbed.run(["sacct", "-nXP", "-u", "user1", "-o", "JobName%60"]).stdout.splitlines()
    assert sum(f".{kubectl.namespace}." in line for line in seen) == 1
    eventually(lambda: not queue(testbed, kubectl), 30)


def test_a_cancelled_allocation_fails_all_of_them(testbed: Testbed, kubectl: Kubectl) -> None:
    # Not of a Job: its controller deletes what still runs as soon as the first has failed.
    kubectl.apply(*(member(number, "sleep 3600", size=2) for number in range(2)))
    eventually(lambda: phases(kubectl) == ["Running"] * 2, 90)
    testbed.run(["scancel", queue(testbed, kubectl)[0][0]])
    eventually(lambda: phases(kubectl) == ["Failed"] * 2, 90)
    assert {one["status"]["reason"] for one in kubectl.get("pods")["items"]} == {"JobCancelled"}


def test_a_cancelled_allocation_fails_its_kubernetes_job(testbed: Testbed, kubectl: Kubectl) -> None:
    kubectl.apply(job("broken", 2, "sleep 3600", small()))
    eventually(lambda: phases(kubectl) == ["Running"] * 2, 90)
    testbed.run(["scancel", queue(testbed, kubectl)[0][0]])
    kubectl("wait", "--for=condition=failed", "job/broken", "--timeout=90s")


def test_others_stay_out_of_a_gangs_nodes(kubectl: Kubectl) -> None:
    kubectl.apply(*(member(number, "sleep 3600", size=2) for number in range(2)))
    eventually(lambda: phases(kubectl) == ["Running"] * 2, 90)
    node = kubectl.pod("m0")["spec"]["nodeName"]
    stranger = pod("stranger", nodeSelector={"kubernetes.io/hostname": node})
    kubectl.apply(stranger)
    eventually(lambda: kubectl.told("stranger", "FailedScheduling", "taint"))
    kubectl("delete", "pods", "--all", "--wait=true", "--grace-period=0", "--force")
