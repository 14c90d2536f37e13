"""The thin path through every part that talks to Slurm, short enough to run on the oldest Slurm too.
(`tests/e2e/run oldest`)

Says nothing that depends on a version: what a Slurm cannot do has an honest fallback, and the pod runs all the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e


def accounted(testbed: Testbed, job_id: str) -> str:
    """State and exit code of a job, once accounting has its end."""
    argv = ["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode"]

    def told() -> str:
        said = testbed.run(argv).stdout.strip()
        return "" if said.startswith(("RUNNING", "PENDING", "COMPLETING")) else said

    return str(eventually(told, 30))


def test_nodes_tell_the_version_of_slurm(testbed: Testbed, kubectl: Kubectl) -> None:
    said = {node["status"]["nodeInfo"]["osImage"] for node in kubectl.get("nodes")["items"]}
    assert len(said) == 1
    assert said.pop().startswith(f"Slurm {testbed.plan.slurm}.")


def test_a_pod_runs_with_logs_and_exec_and_its_exit_code_is_the_jobs(
    testbed: Testbed, kubectl: Kubectl
) -> None:
    kubectl.apply(pod("going", "echo hello; sleep 3600"), pod("bad", "exit 7"))
    kubectl.wait_phase("going", "Running")
    eventually(lambda: kubectl("logs", "going").stdout == "hello\n", 10)
    assert kubectl("exec", "going", "--", "hostname").stdout == "going\n"
    kubectl.wait_phase("bad", "Failed")
    assert accounted(testbed, kubectl.job_id("bad")) == "FAILED|7:0"
    job_id = kubectl.job_id("going")
    kubectl("delete", "pod", "going", "--wait=true")
    assert accounted(testbed, job_id).startswith(("COMPLETED", "CANCELLED", "FAILED"))


def test_a_job_that_is_cancelled_fails_its_pod(testbed: Testbed, kubectl: Kubectl) -> None:
    kubectl.apply(pod("p"))
    kubectl.wait_phase("p", "Running")
    testbed.run(["scancel", kubectl.job_id("p")])
    assert kubectl.wait_phase("p", "Failed")["status"]["reason"] == "JobCancelled"


def test_a_service_is_reached_by_its_name_from_another_host(kubectl: Kubectl) -> None:
    def there(host: str, **labels: str) -> dict[str, Any]:
        return {"labels": labels, "annotations": {"slurmlet.io/sbatch": f"--nodelist={host}"}}

    page = "mkdir /www; echo page > /www/index.html; httpd -f -p 8080 -h /www"
    fetch = "until wget -q -O - http://web/ 2>/dev/null; do sleep 0.2; done"
    web = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web"},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    kubectl.apply(web, pod("web", page, metadata=there("c1", app="web")))
    kubectl.apply(pod("client", fetch, metadata=there("c2")))
    kubectl.wait_phase("client", "Succeeded")
    assert kubectl("logs", "client").stdout == "page\n"


@pytest.fixture
def pool_node(testbed: Testbed, cluster: str) -> Iterator[str]:
    def resize(count: int) -> None:
        words = ["--min", str(count), "--max", str(count)]
        testbed.run(["slurmlet", "pool", "size", "-c", cluster, *words])

    def members() -> list[dict[str, Any]]:
        said = testbed.run(["slurmlet", "pool", "ls", "-c", cluster, "-o", "json"]).stdout
        found: list[dict[str, Any]] = json.loads(said)
        return found

    resize(1)
    yield eventually(lambda: next((one["node"] for one in members() if one["ready"]), None))
    resize(0)
    eventually(lambda: not members(), 90)


def test_a_pool_node_serves_pods(kubectl: Kubectl, pool_node: str) -> None:
    kubectl.apply(pod("p", "echo quick"))
    assert kubectl.wait_phase("p", "Succeeded")["spec"]["nodeName"] == pool_node
    assert kubectl("logs", "p").stdout == "quick\n"


def test_a_gang_starts_together(kubectl: Kubectl) -> None:
    gang = {"annotations": {"slurmlet.io/gang": "team", "slurmlet.io/gang-size": "2"}}
    asks = {"resources": {"requests": {"cpu": "1", "memory": "50Mi"}}}
    kubectl.apply(*(pod(f"m{n}", "echo here", metadata=gang, container=asks) for n in range(2)))
    for n in range(2):
        kubectl.wait_phase(f"m{n}", "Succeeded", timeout_s=90)
    assert kubectl.job_id("m0") == kubectl.job_id("m1")


def test_a_pod_that_asks_to_start_at_once_runs_at_once_or_queued(testbed: Testbed, kubectl: Kubectl) -> None:
    at_once = {"annotations": {"slurmlet.io/launch": "immediate"}}
    kubectl.apply(pod("p", "echo here; exit 3", metadata=at_once))
    kubectl.wait_phase("p", "Failed", timeout_s=90)
    assert kubectl("logs", "p").stdout == "here\n"
    (status,) = kubectl.pod("p")["status"]["containerStatuses"]
    assert status["state"]["terminated"]["exitCode"] == 3
    assert accounted(testbed, kubectl.job_id("p")) == "FAILED|3:0"


def test_a_cluster_inside_one_job(testbed: Testbed) -> None:
    testbed.run(["slurmlet", "image", "pull", IMAGE])
    script = (
        f"kubectl run one --image={IMAGE} --restart=Never -- echo from-a-pod >/dev/null\n"
        "kubectl wait --for=jsonpath='{.status.phase}'=Succeeded pod/one --timeout=60s >/dev/null\n"
        "kubectl logs one; kubectl get nodes -o name | wc -l\n"
    )
    done = testbed.run(["slurmlet", "run", "-N2", "--", "sh", "-c", script], timeout_s=120, check=False)
    assert (done.code, done.stdout.split()) == (0, ["from-a-pod", "2"]), done.stderr
