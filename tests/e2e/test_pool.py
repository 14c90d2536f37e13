"""The pool: Slurm allocations that serve pods at once. Grown, shrunk, renewed and lost, with pods on them all the time."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

IN_POOL = {"nodeSelector": {"slurmlet.io/kind": "allocation"}}
IN_QUEUE = {"nodeSelector": {"slurmlet.io/kind": "partition"}}


class Pool:
    def __init__(self, testbed: Testbed, cluster: str) -> None:
        self._testbed, self._cluster = testbed, cluster

    def __call__(self, *words: str) -> str:
        return self._testbed.run(["slurmlet", "pool", words[0], "-c", self._cluster, *words[1:]]).stdout

    def members(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self("ls", "-o", "json"))
        return found

    def clear(self) -> None:
        self("size", "--min", "0", "--max", "0", "--idle", "120", "--sbatch", "--time=UNLIMITED")
        eventually(lambda: not self.members(), 90)

    def ready(self) -> list[str]:
        return sorted(one["node"] for one in self.members() if one["ready"])

    def until(self, count: int, timeout_s: float = 60) -> list[str]:
        """The names of the members once there are so many, all of them Ready."""
        names: list[str] = eventually(
            lambda: (
                (found := self.ready()) is not None
                and len(found) == count == len(self.members())
                and [*found, ""]
            ),
            timeout_s,
        )
        return names[:-1]


@pytest.fixture
def pool(testbed: Testbed, cluster: str) -> Iterator[Pool]:
    here = Pool(testbed, cluster)
    here.clear()
    yield here
    here.clear()


def deployment(name: str, replicas: int) -> dict[str, Any]:
    spec = pod(name, "trap 'exit 0' TERM; while true; do sleep 0.2; done", **IN_POOL)["spec"]
    del spec["restartPolicy"]
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def budget(name: str, least: int) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name},
        "spec": {"minAvailable": least, "selector": {"matchLabels": {"app": name}}},
    }


def available(kubectl: Kubectl, name: str) -> int:
    return int(kubectl.get("deployment", name)["status"].get("availableReplicas", 0))


def test_pods_prefer_the_pool_and_spill_into_the_queue(pool: Pool, kubectl: Kubectl) -> None:
    pool("size", "--min", "1", "--max", "1", "--sbatch", "--cpus-per-task=2 --mem=300")
    (name,) = pool.until(1)
    node = kubectl.get("node", name)
    assert node["status"]["allocatable"]["cpu"] == "2"
    assert node["status"]["allocatable"]["memory"] == "300Mi"
    asks = {"resources": {"requests": {"cpu": "1", "memory": "50Mi"}}}
    kubectl.apply(*(pod(f"p{n}", container=asks) for n in range(3)), pod("chosen", "true", **IN_QUEUE))
    nodes = sorted(kubectl.wait_phase(f"p{n}", "Running")["spec"]["nodeName"] for n in range(3))
    assert nodes == ["batch", name, name], "two fit, the third is queued as a job of its own"
    assert kubectl.wait_phase("chosen", "Succeeded")["spec"]["nodeName"] != name
    inside = next(one for one in ("p0", "p1", "p2") if kubectl.pod(one)["spec"]["nodeName"] == name)
    assert kubectl("exec", inside, "--", "echo", "hello").stdout == "hello\n"
    kubectl("delete", "pod", inside, "--wait=true")
    assert pool.ready() == [name], "a pod's end is not its node's"


def test_two_hundred_pods_that_do_not_fit_all_go_to_the_default_partition(
    pool: Pool, kubectl: Kubectl
) -> None:
    """Half of them ask to be spread over nodes, which would take them to partitions with a short time limit."""
    pool("size", "--min", "1", "--max", "1", "--sbatch", "--cpus-per-task=1 --mem=300")
    (name,) = pool.until(1)
    asks = {"resources": {"requests": {"cpu": "1"}}}
    kubectl.apply(pod("first", container=asks))
    assert eventually(lambda: kubectl.pod("first")["spec"].get("nodeName")) == name
    # An image that is not there and must not be pulled: nothing is submitted, only the Node is chosen.
    waits = {**asks, "image": "localhost:5000/absent:1", "imagePullPolicy": "Never"}
    many = deployment("many", 100)
    spec = many["spec"]["template"]["spec"]
    del spec["nodeSelector"]
    spec["containers"][0].update(waits)
    term = {"labelSelector": many["spec"]["selector"], "topologyKey": "kubernetes.io/hostname"}
    spec["affinity"] = {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    }
    kubectl.apply(many, *(pod(f"p{n}", container=waits) for n in range(100)))

    def chosen() -> list[str]:
        listed = kubectl.get("pods")["items"]
        return [one["spec"]["nodeName"] for one in listed if one["spec"].get("nodeName")]

    eventually(lambda: len(chosen()) == 201)
    assert sorted(set(chosen())) == ["batch", name]
    assert chosen().count(name) == 1
    # Before the 200 others, and with no controller that makes them anew: the end of its node is waited for.
    kubectl("delete", "pod/first", "deployment/many", "--wait=true")


def test_a_pods_own_preference_comes_before_the_pool(pool: Pool, kubectl: Kubectl) -> None:
    pool("size", "--min", "1", "--max", "1")
    pool.until(1)
    here = {"key": "slurmlet.io/partition", "operator": "In", "values": ["short"]}
    on_queue = {"key": "slurmlet.io/kind", "operator": "In", "values": ["partition"]}
    preferred = [{"weight": 10, "preference": {"matchExpressions": [here, on_queue]}}]
    affinity = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    kubectl.apply(pod("p", "true", affinity=affinity))
    assert kubectl.wait_phase("p", "Succeeded")["spec"]["nodeName"] == "short"


def test_a_runtime_class_chooses(pool: Pool, kubectl: Kubectl) -> None:
    pool("size", "--min", "1", "--max", "1")
    (name,) = pool.until(1)
    kubectl.apply(
        pod("quick", "true", runtimeClassName="pool"), pod("patient", "true", runtimeClassName="queue")
    )
    assert kubectl.wait_phase("quick", "Succeeded")["spec"]["nodeName"] == name
    found = kubectl.wait_phase("patient", "Succeeded")
    assert (
        kubectl.get("node", found["spec"]["nodeName"])["metadata"]["labels"]["slurmlet.io/kind"]
        == "partition"
    )
    refused = kubectl("apply", "-f", "-", stdin=json.dumps(pod("p", runtimeClassName="gvisor")), check=False)
    assert "gvisor" in refused.stderr


def test_a_node_that_is_not_there_cannot_be_removed(pool: Pool, testbed: Testbed, cluster: str) -> None:
    pool("size", "--min", "1", "--max", "1")
    (name,) = pool.until(1)
    wrong = testbed.run(["slurmlet", "pool", "rm", "-c", cluster, "pool-none"], check=False)
    assert wrong.code != 0
    assert "no such pool node: pool-none" in wrong.stderr
    pool("rm", name)
    eventually(lambda: not pool.members())
    pool("size", "--min", "0", "--max", "0")
    kept = json.loads(testbed.run(["cat", f"/home/user1/.slurmlet/{cluster}/pool.json"]).stdout)
    assert kept["unwanted"] == [], "names of nodes that are gone are not kept"


def test_an_allocation_that_is_cancelled_fails_its_pods_and_is_replaced(
    pool: Pool, kubectl: Kubectl, testbed: Testbed
) -> None:
    pool("size", "--min", "1", "--max", "1")
    (name,) = pool.until(1)
    kubectl.apply(pod("p", **IN_POOL))
    kubectl.wait_phase("p", "Running")
    testbed.run(["scancel", pool.members()[0]["job"]])
    found = kubectl.wait_phase("p", "Failed")
    assert found["status"]["reason"] == "JobCancelled"
    assert "was cancelled by user1" in found["status"]["message"]
    eventually(lambda: not kubectl("get", "node", name, check=False).ok)
    assert pool.until(1) != [name]


def test_a_pool_that_slurm_refuses_is_told_of_and_asked_for_rarely(
    pool: Pool, kubectl: Kubectl, testbed: Testbed, cluster: str
) -> None:
    def told() -> list[dict[str, Any]]:
        found = kubectl(
            "get", "events", "-n", "default", "--field-selector", "involvedObject.kind=Pool", "-o", "json"
        )
        return [one for one in json.loads(found.stdout)["items"] if one["reason"] == "PoolRefused"]

    pool("size", "--min", "1", "--max", "1", "--sbatch", "--partition=nowhere")
    event = eventually(lambda: (told() or [None])[0])
    assert "invalid partition" in event["message"].lower(), "Slurm's own words"
    assert "slurmlet pool size --min N --max N --sbatch" in event["message"]
    time.sleep(16)
    assert sum(one.get("count", 1) for one in told()) <= 3, "at once, after 5 s, after 15 s"
    left = testbed.run(["sh", "-c", f"ls /home/user1/.slurmlet/{cluster}/nodes | grep -c pool-"], check=False)
    assert left.stdout.strip() == "0", "no keys of nodes that never were"
    pool("size", "--min", "1", "--max", "1", "--sbatch", "--partition=batch --time=UNLIMITED")
    pool.until(1)


def test_it_grows_while_pods_wait_and_shrinks_when_idle(pool: Pool, kubectl: Kubectl) -> None:
    pool("size", "--min", "0", "--max", "2", "--idle", "3", "--sbatch", "--cpus-per-task=1")
    asks = {"resources": {"requests": {"cpu": "600m"}}}
    kubectl.apply(*(pod(f"p{n}", container=asks, **IN_POOL) for n in range(2)))
    places = {kubectl.wait_phase(f"p{n}", "Running", timeout_s=90)["spec"]["nodeName"] for n in range(2)}
    assert len(places) == 2
    kubectl("delete", "pod", "p0", "--wait=true")
    gone = next(iter(places - {kubectl.pod("p1")["spec"]["nodeName"]}))
    eventually(lambda: gone not in {one["node"] for one in pool.members()}, 60)
    assert kubectl.phase("p1") == "Running", "the other one is not idle"


def test_a_drained_node_goes_when_its_pods_have(pool: Pool, kubectl: Kubectl) -> None:
    pool("size", "--min", "1", "--max", "1")
    (name,) = pool.until(1)
    kubectl.apply(pod("bare", "until test -e /tmp/end; do sleep 0.1; done", **IN_POOL))
    kubectl.wait_phase("bare", "Running")
    pool("rm", name)
    eventually(lambda: kubectl.get("node", name)["spec"].get("unschedulable"))
    time.sleep(3)  # longer than a turn of the pool's controller
    kubectl("exec", "bare", "--", "touch", "/tmp/end")
    assert kubectl.wait_phase("bare", "Succeeded"), "nobody made it end before its time"
    eventually(lambda: not pool.members())


def test_a_deployment_lives_through_renewals(pool: Pool, kubectl: Kubectl) -> None:
    """Members have a minute each: within two minutes every one is replaced, and the budget is kept all the time."""
    pool("size", "--min", "2", "--max", "2", "--sbatch", "--time=1 --cpus-per-task=2")
    before = pool.until(2)
    kubectl.apply(deployment("web", 3), budget("web", 2))
    eventually(lambda: available(kubectl, "web") == 3)
    fewest, deadline_s = 3, time.monotonic() + 150
    while set(before) & {one["node"] for one in pool.members()} and time.monotonic() < deadline_s:
        fewest = min(fewest, available(kubectl, "web"))
    assert not set(before) & {one["node"] for one in pool.members()}
    assert fewest >= 2, "never below minAvailable"
    eventually(lambda: available(kubectl, "web") == 3)
    kubectl("delete", "deployment", "web", "--wait=true")


def test_up_takes_the_size_of_the_pool(testbed: Testbed, cluster: str, pool: Pool) -> None:
    testbed.run(["slurmlet", "up", "-c", cluster, "--pool", "1"], timeout_s=120)
    assert len(pool.until(1)) == 1
    shown = testbed.run(["slurmlet", "pool", "ls", "-c", cluster]).stdout.splitlines()
    assert shown[0].split() == ["NODE", "JOB", "STATE", "READY", "TIME", "LEFT"]
    assert shown[1].split()[2:4] == ["RUNNING", "True"]


def test_images_are_those_of_the_store(kubectl: Kubectl, pool: Pool) -> None:
    pool("size", "--min", "1", "--max", "1")
    (name,) = pool.until(1)
    listed = json.dumps(kubectl.get("node", name)["status"]["images"])
    assert IMAGE.partition(":")[0] in listed


def test_a_users_own_defaults_for_squeue_change_nothing(testbed: Testbed) -> None:
    """The pool's jobs were not seen because of them, and a new one was asked for every 2 s for ever."""
    defaults = {"SQUEUE_PARTITION": "short", "SQUEUE_STATES": "COMPLETED", "SINFO_PARTITION": "short"}
    cluster = "defaults"
    pool = Pool(testbed, cluster)
    try:
        testbed.run(["slurmlet", "up", "-c", cluster, "--pool", "1"], env=defaults, timeout_s=180)
        pool.until(1)
        time.sleep(7)  # three turns of the pool
        listed = testbed.run(["squeue", "--noheader", "--states=all", "-o", "%j"]).stdout.split()
        mine = [name for name in listed if name.startswith(f"{cluster}.") and ".pool-" in name]
        assert len(mine) == 1, listed
    finally:
        testbed.run(["slurmlet", "down", "-c", cluster, "--purge"], timeout_s=120)
