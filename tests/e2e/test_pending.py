"""Pods that may not or cannot start: images and config maps that are not there, fields that are refused."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, config_map, eventually, jobs_of, pod, secret

pytestmark = pytest.mark.e2e


def said(kubectl: Kubectl, name: str, *phases: str) -> str:
    """The log of a pod that has ended well (or as the phases say)."""
    found = kubectl.wait_phase(name, "Succeeded", "Failed")
    text = kubectl("logs", name, "--all-containers").stdout
    assert found["status"]["phase"] in (phases or ("Succeeded",)), (found["status"], text)
    return text


def waits(kubectl: Kubectl, name: str, reason: str, words: str) -> bool:
    why, message = kubectl.waiting(name)
    return why == reason and words in message


def test_images_that_are_not_to_be_had(kubectl: Kubectl) -> None:
    def of(image: str, policy: str) -> dict[str, Any]:
        return {"image": image, "imagePullPolicy": policy}

    missing = "localhost:5000/nowhere:1"
    kubectl.apply(
        pod("never", container=of(missing, "Never")),
        pod("missing", container=of(missing, "IfNotPresent")),
        pod("invalid", container=of("Not/Valid:::1", "IfNotPresent")),
        pod("always", "echo pulled", container=of(IMAGE, "Always")),
        pod("present", "echo there", container=of(IMAGE, "Never")),
    )
    assert said(kubectl, "always") == "pulled\n"
    kubectl.tells("always", "Pulling", words=IMAGE)
    kubectl.tells("always", "Pulled", words="Successfully pulled image")
    assert said(kubectl, "present") == "there\n"
    kubectl.tells("present", "Pulled", words="already present on machine")
    for name, reason, words in (
        ("never", "ErrImageNeverPull", "is not present with pull policy of Never"),
        ("invalid", "InvalidImageName", "Not/Valid:::1"),
        ("missing", "ImagePullBackOff", "Back-off pulling image"),
    ):
        eventually(partial(waits, kubectl, name, reason, words), 15)
        assert kubectl.phase(name) == "Pending"
        assert kubectl("get", "pod", name, "--no-headers").stdout.split()[2] == reason
        assert "slurmlet.io/job-id" not in kubectl.pod(name)["metadata"].get("annotations", {})
    kubectl.tells("missing", "Failed", words="Failed to pull image")
    kubectl.tells("missing", "Failed", words="Error: ErrImagePull")
    kubectl.tells("invalid", "InspectFailed", words="Not/Valid:::1")
    kubectl("delete", "pod", "never", "missing", "invalid", "--timeout=20s")


def test_a_pod_waits_for_its_config_map_without_a_job(kubectl: Kubectl) -> None:
    volumes = [{"name": "late", "configMap": {"name": "late"}}]
    mounts = [{"name": "late", "mountPath": "/late"}]
    reference = [{"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "later", "key": "key"}}}]
    kubectl.apply(
        pod("volume", "cat /late/word", container={"volumeMounts": mounts}, volumes=volumes),
        pod("key", "echo $KEY", container={"env": reference}),
    )
    # As with a kubelet: the environment stops a container, a volume stops the pod before it has any.
    eventually(partial(waits, kubectl, "key", "CreateContainerConfigError", 'secret "later" not found'), 15)
    failed = 'MountVolume.SetUp failed for volume "late" : configmap "late" not found'
    eventually(partial(kubectl.told, "volume", "FailedMount", failed), 15)
    assert kubectl.waiting("volume")[0] == "ContainerCreating"
    assert not [line for line in jobs_of(kubectl.testbed) if kubectl.namespace in line]
    kubectl.apply(config_map("late", word="came"), secret("later", other="x"))
    assert said(kubectl, "volume") == "came"
    eventually(lambda: kubectl.waiting("key")[1] == "couldn't find key key in Secret later", 15)
    kubectl.apply(secret("later", key="turned"))
    assert said(kubectl, "key") == "turned\n"


def test_what_cannot_be_honoured_is_refused_by_name(kubectl: Kubectl) -> None:
    security = "spec.containers[0].securityContext"
    nfs = [{"name": "data", "nfs": {"server": "192.0.2.1", "path": "/"}}]
    ports = {"ports": [{"containerPort": 80, "hostPort": 80, "protocol": "SCTP"}]}
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "profile": (
            f"{security}.seccompProfile.type",
            {
                "container": {
                    "securityContext": {"seccompProfile": {"type": "Localhost", "localhostProfile": "x"}}
                }
            },
        ),
        "processes": ("spec.hostPID", {"hostPID": True}),
        "port": ("spec.containers[0].ports[0].hostPort", {"container": ports}),
        "volume": ("spec.volumes[0].nfs", {"volumes": nfs}),
    }
    kubectl.apply(*(pod(name, **change) for name, (_, change) in asked.items()))
    for name, (where, _) in asked.items():
        found = kubectl.wait_phase(name, "Failed")
        assert (name, found["status"]["reason"]) == (name, "PodRefused")
        assert found["status"]["message"].startswith(f"{where}: ")
        eventually(partial(kubectl.told, name, "PodRefused", f"{where}: "))
        assert "slurmlet.io/job-id" not in found["metadata"].get("annotations", {})


def test_a_refused_deployment_makes_no_flood(kubectl: Kubectl) -> None:
    made = pod("x", restartPolicy="Always", hostPID=True)
    template = {"metadata": {"labels": {"app": "refused"}}, "spec": made["spec"]}
    kubectl.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "refused"},
            "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "refused"}}, "template": template},
        }
    )

    def pods() -> list[str]:
        return sorted(one["metadata"]["name"] for one in kubectl.get("pods")["items"])

    names = eventually(lambda: len(seen := pods()) == 2 and seen)
    for name in names:
        eventually(partial(kubectl.told, name, "PodRefused", "spec.hostPID"))
    time.sleep(3)
    assert pods() == names
    for name in names:
        assert (kubectl.phase(name), kubectl.waiting(name)[0]) == ("Pending", "PodRefused")
        listed = kubectl.get(
            "events", None, "--field-selector", f"involvedObject.name={name},reason=PodRefused"
        )
        assert [one["count"] for one in listed["items"]] == [1]
