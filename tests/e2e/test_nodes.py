"""Nodes as people and Slurm's administrators treat them: cordoned, drained, deleted, their partition held back or gone."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, eventually, jobs_of, pod

pytestmark = pytest.mark.e2e


def scontrol(testbed: Testbed, *words: str) -> None:
    testbed.run(["scontrol", *words], user="root")


@contextlib.contextmanager
def partition(testbed: Testbed, host: str = "c3") -> Iterator[str]:
    """A partition of our own: what is done to it disturbs nobody."""
    name = f"t{uuid.uuid4().hex[:6]}"
    scontrol(testbed, "create", f"PartitionName={name}", f"Nodes={host}", "State=UP", "DefMemPerCPU=100")
    try:
        yield name
    finally:
        # Slurm keeps a partition that has jobs.
        testbed.run(["scancel", f"--partition={name}"], user="root", check=False)
        delete = ["scontrol", "delete", f"PartitionName={name}"]
        eventually(lambda: testbed.run(delete, user="root", check=False).ok, 30)


@pytest.fixture(scope="module")
def own(testbed: Testbed, cluster: str) -> Iterator[str]:
    with partition(testbed) as name:
        here = Kubectl(testbed, "default")
        soon(here, lambda: here("get", "node", name, check=False).ok)
        yield name


def soon(kubectl: Kubectl, probe: Callable[[], Any]) -> Any:
    """What a look at Slurm's partitions brings. At rest there is one in 45 s, and one whenever somebody asks."""

    def seen() -> Any:
        kubectl.testbed.run(["slurmlet", "status", "-c", kubectl.cluster])
        return probe()

    return eventually(seen, 90)


def ready(kubectl: Kubectl, node: str) -> dict[str, str]:
    conditions = kubectl.get("node", node)["status"]["conditions"]
    found: dict[str, str] = next(one for one in conditions if one["type"] == "Ready")
    return found


def on(node: str) -> dict[str, Any]:
    return {"nodeSelector": {"slurmlet.io/partition": node}}


def test_what_a_node_says(kubectl: Kubectl, own: str) -> None:
    kubectl.apply(pod("pulls", "true"))
    kubectl.wait_phase("pulls", "Succeeded")

    def with_image() -> dict[str, Any] | None:
        found: dict[str, Any] = kubectl.get("node", "batch")
        names = {name for one in found["status"].get("images", ()) for name in one["names"]}
        return found if IMAGE in names else None

    node = soon(kubectl, with_image)
    status = node["status"]
    assert status["capacity"]["cpu"] == "48"
    assert status["capacity"]["memory"] == "18000Mi"
    assert {one["type"] for one in status["conditions"]} == {
        "Ready",
        "MemoryPressure",
        "DiskPressure",
        "PIDPressure",
    }
    by_digest, by_tag = next(one["names"] for one in status["images"] if IMAGE in one["names"])
    assert by_tag == IMAGE
    assert by_digest.startswith("localhost:5000/busybox@sha256:")
    sizes = [one["sizeBytes"] for one in status["images"]]
    assert sizes == sorted(sizes, reverse=True)
    assert all(size > 0 for size in sizes)
    lease = kubectl.get("lease", "batch", "-n", "kube-node-lease")
    assert lease["spec"]["holderIdentity"] == "batch"
    assert [one["uid"] for one in lease["metadata"]["ownerReferences"]] == [node["metadata"]["uid"]]


def test_a_deleted_node_comes_back_and_its_pods_live(kubectl: Kubectl, own: str) -> None:
    kubectl.apply(pod("stays", **on(own)))
    before = kubectl.wait_phase("stays", "Running")
    old = kubectl.get("node", own)["metadata"]["uid"]
    kubectl("delete", "node", own)
    again = eventually(lambda: (one := kubectl("get", "node", own, "-o", "json", check=False)).ok and one, 10)
    assert again
    node = eventually(lambda: ready(kubectl, own)["status"] == "True" and kubectl.get("node", own), 10)
    assert node["metadata"]["uid"] != old
    assert node["metadata"]["labels"]["slurmlet.io/partition"] == own
    eventually(lambda: kubectl("get", "lease", own, "-n", "kube-node-lease", check=False).ok, 15)
    after = kubectl.pod("stays")
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert after["status"]["phase"] == "Running"
    assert after["status"]["containerStatuses"][0]["restartCount"] == 0
    assert kubectl("exec", "stays", "--", "echo", "alive").stdout == "alive\n"


def test_a_cordoned_node_gets_no_pods_and_stays_cordoned(kubectl: Kubectl, own: str) -> None:
    kubectl("cordon", own)
    try:
        kubectl.apply(pod("waits", **on(own)))

        def refused() -> bool:
            return any("unschedulable" in message for reason, message in kubectl.events("waits"))

        eventually(refused, 15)
        # A change of Slurm's makes the hub write the node again; the cordon is not its to undo.
        scontrol(kubectl.testbed, "update", f"PartitionName={own}", "MaxTime=55:00")
        soon(
            kubectl,
            lambda: kubectl.get("node", own)["metadata"]["labels"]["slurmlet.io/time-limit"] == "55-00",
        )
        assert kubectl.get("node", own)["spec"]["unschedulable"] is True
        assert kubectl.phase("waits") == "Pending"
    finally:
        kubectl("uncordon", own)
    kubectl.wait_phase("waits", "Running", timeout_s=30)


def test_drain_evicts_what_a_disruption_budget_allows(kubectl: Kubectl, own: str) -> None:
    budget = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "one"},
        "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "guarded"}}},
    }
    kubectl.apply(
        budget,
        pod("guarded", metadata={"labels": {"app": "guarded"}}, **on(own)),
        pod("plain", **on(own)),
    )
    kubectl.wait_phase("guarded", "Running")
    kubectl.wait_phase("plain", "Running")
    job_id = kubectl.job_id("plain")
    eventually(lambda: kubectl.get("pdb", "one")["status"].get("currentHealthy") == 1, 15)
    drain = ("drain", own, "--force", "--ignore-daemonsets", "--pod-selector=app!=other")
    try:
        first = kubectl(*drain, "--timeout=6s", check=False)
        assert first.code == 1
        assert "would violate the pod's disruption budget" in first.stderr
        assert not kubectl("get", "pod", "plain", check=False).ok
        assert kubectl.phase("guarded") == "Running"
        eventually(lambda: not any(line.split()[0] == job_id for line in jobs_of(kubectl.testbed)), 15)
        kubectl("delete", "pdb", "one")
        assert "drained" in kubectl(*drain, "--timeout=30s").stdout
        assert not kubectl("get", "pod", "guarded", check=False).ok
    finally:
        kubectl("uncordon", own)


def test_a_partition_that_is_down_is_not_ready(kubectl: Kubectl, own: str) -> None:
    kubectl.apply(pod("runs-on", **on(own)))
    kubectl.wait_phase("runs-on", "Running")
    scontrol(kubectl.testbed, "update", f"PartitionName={own}", "State=DOWN")
    try:
        soon(kubectl, lambda: ready(kubectl, own)["status"] == "False")
        found = ready(kubectl, own)
        assert (found["reason"], "DOWN" in found["message"]) == ("PartitionDown", True)
        taints = eventually(lambda: kubectl.get("node", own)["spec"].get("taints"), 15)
        assert "node.kubernetes.io/not-ready" in {one["key"] for one in taints}
        # Slurm lets jobs run on in such a partition, and so do we.
        tolerated = {
            one["key"]: one.get("tolerationSeconds", 0)
            for one in kubectl.pod("runs-on")["spec"]["tolerations"]
        }
        assert tolerated["node.kubernetes.io/not-ready"] > 24 * 3600
        assert kubectl("exec", "runs-on", "--", "echo", "alive").stdout == "alive\n"
        # Another `up` is not held up by it.
        began_s = time.monotonic()
        kubectl.testbed.run(["slurmlet", "up", "-c", kubectl.cluster], timeout_s=30)
        assert time.monotonic() - began_s < 20
    finally:
        scontrol(kubectl.testbed, "update", f"PartitionName={own}", "State=UP")
    soon(kubectl, lambda: ready(kubectl, own)["status"] == "True")


def test_drained_hosts_make_a_node_not_ready_with_slurms_reason_and_it_goes_with_its_partition(
    kubectl: Kubectl, testbed: Testbed, own: str
) -> None:
    # Elsewhere nothing changes but that new jobs go to the other hosts for a moment.
    scontrol(testbed, "update", "NodeName=c3", "State=DRAIN", "Reason=fans of rack 7 | call Ada")
    try:
        with partition(testbed) as name:
            soon(kubectl, lambda: kubectl("get", "node", name, check=False).ok)
            found = ready(kubectl, name)
            assert (found["status"], found["reason"]) == ("False", "NoUsableNodes")
            assert found["message"].endswith(": fans of rack 7 | call Ada")
            assert ready(kubectl, own)["status"] == "False"
            assert ready(kubectl, "batch")["status"] == "True"
    finally:
        scontrol(testbed, "update", "NodeName=c3", "State=RESUME")
    soon(kubectl, lambda: not kubectl("get", "node", name, check=False).ok)
    eventually(lambda: not kubectl("get", "lease", name, "-n", "kube-node-lease", check=False).ok, 20)
    soon(kubectl, lambda: ready(kubectl, own)["status"] == "True")
