"""Upstream's controllers over pods that are Slurm jobs: Jobs, CronJobs, DaemonSets, budgets, rolling updates."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e


def template(command: str, labels: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    made = pod("x", command, **changes)
    return {"metadata": {"labels": labels or {}}, "spec": made["spec"]}


def job(name: str, command: str, **spec: Any) -> dict[str, Any]:
    made = {"template": template(command, **spec.pop("pod", {})), **spec}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": made}


def finished(kubectl: Kubectl, name: str, type_: str) -> dict[str, Any]:
    """The Job's condition of that type, once it is true."""

    def look() -> Any:
        conditions = kubectl.get("job", name)["status"].get("conditions") or []
        return next((one for one in conditions if one["type"] == type_ and one["status"] == "True"), None)

    found: dict[str, Any] = eventually(look, 60)
    return found


def test_an_indexed_job_with_a_failure_policy(kubectl: Kubectl) -> None:
    policy = {"rules": [{"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}]}
    indexed = {"completionMode": "Indexed", "completions": 3, "parallelism": 3}
    kubectl.apply(
        job("squares", "echo $((JOB_COMPLETION_INDEX * JOB_COMPLETION_INDEX)); hostname", **indexed),
        # Six retries are due, but this exit code ends the Job at once.
        job("hopeless", "exit 42", backoffLimit=6, podFailurePolicy=policy),
    )
    finished(kubectl, "squares", "Complete")
    assert kubectl.get("job", "squares")["status"]["completedIndexes"] == "0-2"
    lines = kubectl("logs", "-l", "job-name=squares", "--prefix=false").stdout.split()
    assert {"0", "1", "4", "squares-0", "squares-1", "squares-2"} == set(lines)
    assert finished(kubectl, "hopeless", "Failed")["reason"] == "PodFailurePolicy"
    assert len(kubectl.get("pods", None, "-l", "job-name=hopeless")["items"]) == 1


def test_a_job_is_suspended_and_resumed(kubectl: Kubectl) -> None:
    kubectl.apply(job("nap", "test -e /resumed || sleep 5; echo done", suspend=True))
    assert kubectl.get("pods")["items"] == []

    def suspend(value: bool) -> None:
        kubectl("patch", "job", "nap", "-p", json.dumps({"spec": {"suspend": value}}))

    def running() -> Any:
        return [one for one in kubectl.get("pods")["items"] if one["status"].get("phase") == "Running"]

    suspend(False)
    eventually(running)
    suspend(True)
    eventually(lambda: not kubectl.get("pods")["items"])
    suspend(False)
    finished(kubectl, "nap", "Complete")


def test_a_daemon_set_has_one_pod_per_partition(kubectl: Kubectl) -> None:
    nodes = {one["metadata"]["name"] for one in kubectl.get("nodes")["items"]}
    spec = {
        "selector": {"matchLabels": {"app": "agent"}},
        "template": template("sleep 3600", {"app": "agent"}, restartPolicy="Always"),
    }
    kubectl.apply({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": {"name": "agent"}, "spec": spec})
    eventually(lambda: kubectl.get("daemonset", "agent")["status"].get("numberReady") == len(nodes))
    assert {one["spec"]["nodeName"] for one in kubectl.get("pods")["items"]} == nodes


def test_a_budget_blocks_an_eviction(kubectl: Kubectl) -> None:
    labels = {"app": "kept"}
    kubectl.apply(
        {"apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": {"name": "kept"},
         "spec": {"minAvailable": 1, "selector": {"matchLabels": labels}}},
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "metadata": {"name": "kept"},
         "spec": {"replicas": 1, "selector": {"matchLabels": labels},
                  "template": template("sleep 3600", labels, restartPolicy="Always")}},
    )  # fmt: skip
    eventually(lambda: kubectl.get("pdb", "kept")["status"].get("currentHealthy") == 1)
    name = kubectl.get("pods")["items"][0]["metadata"]["name"]
    eviction = json.dumps({"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": name}})
    path = f"/api/v1/namespaces/{kubectl.namespace}/pods/{name}/eviction"
    refused = kubectl("create", "--raw", path, "-f", "-", stdin=eviction, check=False)
    assert "violate the pod's disruption budget" in refused.stderr
    kubectl("scale", "replicaset", "kept", "--replicas=2")
    eventually(lambda: kubectl.get("pdb", "kept")["status"].get("disruptionsAllowed") == 1)
    kubectl("create", "--raw", path, "-f", "-", stdin=eviction)
    eventually(lambda: name not in [one["metadata"]["name"] for one in kubectl.get("pods")["items"]])


def test_a_rolling_update_never_leaves_nobody_ready(kubectl: Kubectl) -> None:
    labels = {"app": "rolling"}

    def container(version: str) -> dict[str, Any]:
        # Each version needs a while until it is ready.
        command = f"echo {version} > /version; sleep 2; touch /ready; sleep 3600"
        probe = {"exec": {"command": ["test", "-e", "/ready"]}, "periodSeconds": 1}
        return {"name": "main", "image": IMAGE, "command": ["sh", "-c", command], "readinessProbe": probe}

    spec = {
        "replicas": 2, "selector": {"matchLabels": labels},
        "strategy": {"rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "template": template("", labels, restartPolicy="Always", containers=[container("one")]),
    }  # fmt: skip
    kubectl.apply(
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "rolling"}, "spec": spec}
    )
    kubectl("rollout", "status", "deployment/rolling", "--timeout=60s")
    change = {"spec": {"template": {"spec": {"containers": [container("two")]}}}}
    kubectl("patch", "deployment", "rolling", "-p", json.dumps(change))
    seen = []

    def rolled() -> bool:
        found = kubectl.get("deployment", "rolling")
        status = found["status"]
        seen.append(status.get("readyReplicas", 0))
        counts = [status.get(name) for name in ("updatedReplicas", "replicas", "readyReplicas")]
        return bool(status["observedGeneration"] == found["metadata"]["generation"] and counts == [2, 2, 2])

    eventually(rolled, 60)
    assert min(seen) >= 2
    for one in kubectl.get("pods", None, "--field-selector=status.phase=Running")["items"]:
        if not one["metadata"].get("deletionTimestamp"):
            assert kubectl("exec", one["metadata"]["name"], "--", "cat", "/version").stdout == "two\n"


def test_a_cron_job_fires(kubectl: Kubectl) -> None:
    name = f"tick{random.randint(0, 999)}"
    spec = {"schedule": "* * * * *", "jobTemplate": {"spec": job("x", "echo tick")["spec"]}}
    kubectl.apply({"apiVersion": "batch/v1", "kind": "CronJob", "metadata": {"name": name}, "spec": spec})

    def done() -> Any:
        return [one for one in kubectl.get("jobs")["items"] if one["status"].get("succeeded")]

    (first, *_) = eventually(done, 90)
    assert first["metadata"]["name"].startswith(name)
