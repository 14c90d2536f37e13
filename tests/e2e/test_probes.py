"""Probes, hooks, deadlines and restarts as the kubelet has them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.e2e.conftest import Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

FAST = {"periodSeconds": 1, "timeoutSeconds": 2}


def main_status(kubectl: Kubectl, name: str) -> dict[str, Any]:
    statuses = kubectl.pod(name)["status"].get("containerStatuses") or [{}]
    found: dict[str, Any] = statuses[0]
    return found


def condition(kubectl: Kubectl, name: str, type_: str) -> str:
    conditions = kubectl.pod(name)["status"].get("conditions") or []
    return str(next((one["status"] for one in conditions if one["type"] == type_), ""))


def has_event(kubectl: Kubectl, name: str, reason: str, words: str = "") -> Any:
    return eventually(lambda: [m for r, m in kubectl.events(name) if r == reason and words in m], 20)


def test_readiness_follows_its_probe(kubectl: Kubectl) -> None:
    probe = {"exec": {"command": ["test", "-e", "/tmp/ready"]}, "failureThreshold": 1, **FAST}
    kubectl.apply(pod("reading", container={"readinessProbe": probe}))
    kubectl.wait_phase("reading", "Running")
    has_event(kubectl, "reading", "Unhealthy", "Readiness probe failed")
    assert not main_status(kubectl, "reading")["ready"]
    assert condition(kubectl, "reading", "Ready") == "False"
    kubectl("exec", "reading", "--", "touch", "/tmp/ready")
    eventually(lambda: condition(kubectl, "reading", "Ready") == "True", 20)
    kubectl("exec", "reading", "--", "rm", "/tmp/ready")
    eventually(lambda: condition(kubectl, "reading", "Ready") == "False", 20)
    assert main_status(kubectl, "reading")["restartCount"] == 0


def test_a_failed_liveness_probe_restarts_the_container_in_the_same_job(kubectl: Kubectl) -> None:
    probe = {"exec": {"command": ["cat", "/tmp/healthy"]}, "failureThreshold": 2, **FAST}
    command = "trap 'exit 3' TERM; touch /tmp/healthy; sleep 2; rm /tmp/healthy; while :; do sleep 1 & wait $!; done"
    kubectl.apply(pod("living", command, container={"livenessProbe": probe}, restartPolicy="Always"))
    job = kubectl.job_id("living")
    eventually(lambda: main_status(kubectl, "living").get("restartCount", 0) >= 1, 40)
    last = main_status(kubectl, "living")["lastState"]["terminated"]
    assert last["exitCode"] == 3
    has_event(kubectl, "living", "Unhealthy", "Liveness probe failed: cat: can't open '/tmp/healthy'")
    has_event(kubectl, "living", "Killing", "Container main failed liveness probe, will be restarted")
    assert kubectl.job_id("living") == job


def test_a_startup_probe_holds_the_others_back(kubectl: Kubectl) -> None:
    command = "sleep 3; touch /tmp/started; sleep 3600"
    container = {
        "startupProbe": {"exec": {"command": ["test", "-e", "/tmp/started"]}, "failureThreshold": 30, **FAST},
        # Would kill the container at once if it ran before the start.
        "livenessProbe": {"exec": {"command": ["test", "-e", "/tmp/started"]}, "failureThreshold": 1, **FAST},
    }
    kubectl.apply(pod("starting", command, container=container))
    kubectl.wait_phase("starting", "Running")
    first = main_status(kubectl, "starting")
    assert (first["started"], first["ready"]) == (False, False)
    eventually(lambda: main_status(kubectl, "starting")["started"], 20)
    eventually(lambda: condition(kubectl, "starting", "Ready") == "True", 20)
    assert main_status(kubectl, "starting")["restartCount"] == 0


def test_http_and_tcp_probes_reach_the_pods_server(kubectl: Kubectl) -> None:
    port = random.randint(20000, 29999)
    command = f"mkdir /www; echo fine > /www/healthz; sleep 2; httpd -f -p {port} -h /www"
    http = {"httpGet": {"path": "/healthz", "port": "web"}, **FAST}
    container = {
        "ports": [{"name": "web", "containerPort": port}],
        "readinessProbe": http,
        "livenessProbe": {"tcpSocket": {"port": port}, "initialDelaySeconds": 4, **FAST},
    }
    kubectl.apply(pod("serving", command, container=container))
    eventually(lambda: condition(kubectl, "serving", "Ready") == "True", 40)
    kubectl("exec", "serving", "--", "rm", "/www/healthz")
    eventually(lambda: condition(kubectl, "serving", "Ready") == "False", 20)
    has_event(
        kubectl, "serving", "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 404"
    )
    assert main_status(kubectl, "serving")["restartCount"] == 0


def test_post_start_runs_before_the_container_counts_as_running(kubectl: Kubectl) -> None:
    hook = {"postStart": {"exec": {"command": ["sh", "-c", "sleep 1; echo hooked > /tmp/hook"]}}}
    kubectl.apply(pod("hooked", container={"lifecycle": hook}))
    kubectl.wait_phase("hooked", "Running")
    assert kubectl("exec", "hooked", "--", "cat", "/tmp/hook").stdout == "hooked\n"


def test_a_failed_post_start_kills_the_container(kubectl: Kubectl) -> None:
    hook = {"postStart": {"exec": {"command": ["sh", "-c", "echo no luck; exit 4"]}}}
    kubectl.apply(pod("unhooked", container={"lifecycle": hook}))
    ended = kubectl.wait_phase("unhooked", "Failed")
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] != 0
    has_event(kubectl, "unhooked", "FailedPostStartHook", "no luck")


def test_pre_stop_comes_before_the_signal_and_within_the_grace(kubectl: Kubectl) -> None:
    command = "trap 'echo signalled; exit 0' TERM; echo up; while :; do sleep 1 & wait $!; done"
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "echo stopping > /proc/1/fd/1; sleep 1"]}}}
    kubectl.apply(pod("stopping", command, container={"lifecycle": hook}, terminationGracePeriodSeconds=20))
    kubectl.wait_phase("stopping", "Running")
    following = kubectl.start("logs", "-f", "stopping")
    try:
        kubectl("delete", "pod", "stopping")
        assert following.communicate(timeout=30)[0].decode().split() == ["up", "stopping", "signalled"]
    finally:
        kubectl.testbed.stop(following)


def test_a_pod_over_its_deadline_is_failed(kubectl: Kubectl) -> None:
    kubectl.apply(pod("late", activeDeadlineSeconds=3))
    ended = kubectl.wait_phase("late", "Failed", timeout_s=30)
    assert ended["status"]["reason"] == "DeadlineExceeded"
    job = kubectl.job_id("late")
    eventually(lambda: job not in kubectl.testbed.run(["squeue", "-h", "-o", "%A"]).stdout.split(), 20)


def test_a_containers_own_restart_rules_win(kubectl: Kubectl) -> None:
    rules = [{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]
    container = {"restartPolicy": "Never", "restartPolicyRules": rules}
    command = "test -e /data/second && exit 5; touch /data/second; exit 42"
    container["volumeMounts"] = [{"name": "data", "mountPath": "/data"}]
    kubectl.apply(pod("ruled", command, container=container, volumes=[{"name": "data", "emptyDir": {}}]))
    ended = kubectl.wait_phase("ruled", "Failed", timeout_s=60)
    status = ended["status"]["containerStatuses"][0]
    assert status["restartCount"] == 1
    assert status["lastState"]["terminated"]["exitCode"] == 42
    assert status["state"]["terminated"]["exitCode"] == 5


def test_a_sidecar_has_started_before_the_main_container(kubectl: Kubectl) -> None:
    sidecar = {
        "name": "side",
        "image": "localhost:5000/busybox:1",
        "restartPolicy": "Always",
        "command": ["sh", "-c", "sleep 2; date +%s > /data/side; sleep 3600"],
        "startupProbe": {"exec": {"command": ["test", "-e", "/data/side"]}, "failureThreshold": 30, **FAST},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    container = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    kubectl.apply(
        pod(
            "accompanied",
            "cat /data/side",
            container=container,
            initContainers=[sidecar],
            volumes=[{"name": "data", "emptyDir": {}}],
        )
    )
    kubectl.wait_phase("accompanied", "Succeeded", timeout_s=60)
    assert kubectl("logs", "accompanied", "-c", "main").stdout.strip().isdigit()
