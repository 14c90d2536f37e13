"""Persistent volumes: claims become directories that every host sees, outlive pods and clusters, grow and go."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import CLUSTER, IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

VOLUMES = f"/home/user1/.slurmlet/{CLUSTER}/volumes"


@pytest.fixture(scope="module")
def kubectl(testbed: Testbed, cluster: str) -> Iterator[Kubectl]:
    """One namespace for all tests here: a fresh one for each would take longer than the tests."""
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    yield here
    here("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false", check=False)
    here("delete", "namespace", here.namespace, "--wait=false", check=False)


def claim(name: str, size: str = "1Gi", *modes: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": name},
        "spec": {
            "accessModes": list(modes) or ["ReadWriteOnce"],
            "resources": {"requests": {"storage": size}},
            **spec,
        },
    }


def using(name: str, command: str, claim_name: str, **more: Any) -> dict[str, Any]:
    """A pod with a claim on /data."""
    return pod(
        name,
        command,
        container={"volumeMounts": [{"name": "data", "mountPath": "/data", **more.pop("mount", {})}]},
        volumes=[
            {"name": "data", "persistentVolumeClaim": {"claimName": claim_name, **more.pop("source", {})}}
        ],
        **more,
    )


def bound(kubectl: Kubectl, name: str) -> Any:
    return eventually(lambda: (one := kubectl.get("pvc", name))["status"].get("phase") == "Bound" and one, 20)


def volume_of(kubectl: Kubectl, name: str) -> Any:
    return kubectl.get("pv", bound(kubectl, name)["spec"]["volumeName"])


def ls(testbed: Testbed, path: str) -> bool:
    return testbed.run(["test", "-e", path], user="root", check=False).ok


def test_every_cluster_has_two_classes(kubectl: Kubectl) -> None:
    classes = {one["metadata"]["name"]: one for one in kubectl.get("storageclass")["items"]}
    shared, wait = classes["shared"], classes["shared-wait"]
    assert shared["metadata"]["annotations"]["storageclass.kubernetes.io/is-default-class"] == "true"
    assert (shared["volumeBindingMode"], wait["volumeBindingMode"]) == ("Immediate", "WaitForFirstConsumer")
    for one in (shared, wait):
        assert (one["provisioner"], one["allowVolumeExpansion"]) == ("slurmlet.io/shared", True)
        assert one["reclaimPolicy"] == "Delete"


def test_pods_on_different_hosts_see_each_others_writes(kubectl: Kubectl) -> None:
    kubectl.apply(claim("shared", "1Gi", "ReadWriteMany"))
    say = "echo {0} > /data/{0}; until [ -e /data/{1} ]; do sleep 0.1; done; cat /data/{1}; sleep 3600"
    for mine, other, host in (("one", "two", "c1"), ("two", "one", "c2")):
        metadata = {"annotations": {"slurmlet.io/sbatch": f"--nodelist={host}"}}
        kubectl.apply(using(mine, say.format(mine, other), "shared", metadata=metadata))
    for mine, other in (("one", "two"), ("two", "one")):
        assert eventually(lambda name=mine: kubectl("logs", name, check=False).stdout) == f"{other}\n"
    hosts = {
        kubectl.wait_phase(name, "Running")["metadata"]["annotations"]["slurmlet.io/host"]
        for name in ("one", "two")
    }
    assert hosts == {"c1", "c2"}


def test_a_claim_becomes_a_private_directory_and_goes_with_it(testbed: Testbed, kubectl: Kubectl) -> None:
    kubectl.apply(claim("data"))
    volume = volume_of(kubectl, "data")
    path = volume["spec"]["hostPath"]["path"]
    assert path == f"{VOLUMES}/{volume['metadata']['name']}"
    mode = testbed.run(["stat", "-c", "%a %U", VOLUMES, path]).stdout
    assert mode == "700 user1\n700 user1\n"
    assert volume["spec"]["capacity"] == {"storage": "1Gi"}
    assert volume["spec"]["storageClassName"] == "shared"
    assert volume["spec"]["claimRef"]["name"] == "data"
    kubectl.tells("data", "Provisioning", "ProvisioningSucceeded")

    # What a container leaves behind must not keep the directory, whatever its permissions.
    kubectl.apply(
        using("writer", "mkdir -p /data/a/b; touch /data/a/b/c; chmod 0 /data/a/b; chmod 0 /data/a", "data")
    )
    kubectl.wait_phase("writer", "Succeeded")
    kubectl("delete", "pod", "writer")
    kubectl("delete", "pvc", "data")
    eventually(lambda: not ls(testbed, path), 20)
    eventually(lambda: not kubectl("get", "pv", volume["metadata"]["name"], check=False).ok, 20)


def test_retain_keeps_directory_and_volume(testbed: Testbed, kubectl: Kubectl) -> None:
    name = f"keep-{uuid.uuid4().hex[:6]}"
    kubectl.apply(
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": name},
            "provisioner": "slurmlet.io/shared",
            "reclaimPolicy": "Retain",
        },
        claim("kept", storageClassName=name),
    )
    volume = volume_of(kubectl, "kept")
    path, persistent = volume["spec"]["hostPath"]["path"], volume["metadata"]["name"]
    testbed.run(["touch", f"{path}/precious"])
    kubectl("delete", "pvc", "kept")
    eventually(lambda: kubectl.get("pv", persistent)["status"]["phase"] == "Released", 20)
    kubectl("delete", "pv", persistent)
    eventually(lambda: not kubectl("get", "pv", persistent, check=False).ok, 20)
    assert ls(testbed, f"{path}/precious")
    testbed.run(["rm", "-r", path])
    kubectl("delete", "storageclass", name)


def test_a_claim_that_waits_for_its_first_consumer(kubectl: Kubectl) -> None:
    kubectl.apply(claim("late", storageClassName="shared-wait"))
    told = eventually(lambda: kubectl.events("late"), 20)
    assert told[0][0] == "WaitForFirstConsumer"
    assert kubectl.get("pvc", "late")["status"]["phase"] == "Pending"
    kubectl.apply(using("first", "echo here > /data/x; cat /data/x", "late"))
    kubectl.wait_phase("first", "Succeeded")
    assert kubectl("logs", "first").stdout == "here\n"
    annotations = bound(kubectl, "late")["metadata"]["annotations"]
    assert annotations["volume.kubernetes.io/selected-node"] == kubectl.pod("first")["spec"]["nodeName"]


def test_a_claim_grows(kubectl: Kubectl) -> None:
    kubectl.apply(claim("growing", "1Gi"))
    bound(kubectl, "growing")
    change = {"spec": {"resources": {"requests": {"storage": "3Gi"}}}}
    kubectl("patch", "pvc", "growing", "-p", json.dumps(change))
    grown = eventually(
        lambda: (one := kubectl.get("pvc", "growing"))["status"]["capacity"]["storage"] == "3Gi" and one, 20
    )
    assert not grown["status"].get("conditions")
    assert volume_of(kubectl, "growing")["spec"]["capacity"]["storage"] == "3Gi"
    eventually(lambda: "VolumeResizeSuccessful" in {reason for reason, _ in kubectl.events("growing")}, 10)


def test_what_a_directory_cannot_be_is_refused_with_a_reason(kubectl: Kubectl) -> None:
    kubectl.apply(claim("block", volumeMode="Block"), claim("picky", selector={"matchLabels": {"a": "b"}}))
    for name, words in (("block", "spec.volumeMode Block"), ("picky", "spec.selector")):
        failures = eventually(
            lambda name=name: [
                text for reason, text in kubectl.events(name) if reason == "ProvisioningFailed"
            ],
            20,
        )
        assert words in failures[0]


def test_read_only_in_each_of_its_forms(kubectl: Kubectl) -> None:
    kubectl.apply(claim("ro"), claim("rox", "1Gi", "ReadOnlyMany"))
    # The complaint is on stderr, a pipe of its own: where it stands beside stdout is nobody's promise.
    attempt = "touch /data/x 2> /dev/null && echo wrote || echo refused"
    kubectl.apply(
        using("by-source", attempt, "ro", source={"readOnly": True}),
        using("by-mount", attempt, "ro", mount={"readOnly": True}),
        using("by-mode", attempt, "rox"),
        using("plain", attempt, "ro"),
    )
    expected = {"by-source": "refused", "by-mount": "refused", "by-mode": "refused", "plain": "wrote"}
    for name, word in expected.items():
        kubectl.wait_phase(name, "Succeeded")
        assert kubectl("logs", name).stdout == f"{word}\n", name


def test_one_pod_only(kubectl: Kubectl) -> None:
    kubectl.apply(claim("alone", "1Gi", "ReadWriteOncePod"), using("holder", "sleep 3600", "alone"))
    kubectl.wait_phase("holder", "Running")
    kubectl.apply(using("second", "echo mine", "alone"))
    told = eventually(
        lambda: [text for reason, text in kubectl.events("second") if reason == "FailedScheduling"], 20
    )
    assert "ReadWriteOncePod" in told[0]
    kubectl("delete", "pod", "holder")
    kubectl.wait_phase("second", "Succeeded")


def test_ephemeral_volumes_live_and_die_with_their_pod(kubectl: Kubectl) -> None:
    template = {"spec": claim("x")["spec"]}
    kubectl.apply(
        pod(
            "brief",
            "echo hi > /desk/file; cat /desk/file; sleep 3600",
            container={"volumeMounts": [{"name": "work", "mountPath": "/desk"}]},
            volumes=[{"name": "work", "ephemeral": {"volumeClaimTemplate": template}}],
        )
    )
    kubectl.wait_phase("brief", "Running")
    assert bound(kubectl, "brief-work")["metadata"]["ownerReferences"][0]["name"] == "brief"
    assert eventually(lambda: kubectl("logs", "brief").stdout) == "hi\n"
    kubectl("delete", "pod", "brief")
    eventually(lambda: not kubectl("get", "pvc", "brief-work", check=False).ok, 20)


def test_volumes_made_by_hand(testbed: Testbed, kubectl: Kubectl) -> None:
    own = f"/home/user1/by-hand-{uuid.uuid4().hex[:6]}"
    testbed.run(["sh", "-c", 'mkdir "$1"; echo given > "$1/file"', "sh", own])
    names = {kind: f"{kind}-{kubectl.namespace}" for kind in ("hand", "foreign")}
    sources = {"hand": {"hostPath": {"path": own}}, "foreign": {"nfs": {"server": "192.0.2.1", "path": "/x"}}}
    for kind, name in names.items():
        volume = {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": {"storage": "1Gi"},
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                **sources[kind],
            },
        }
        kubectl.apply(volume, claim(kind, "1Gi", "ReadWriteMany", storageClassName="", volumeName=name))
        bound(kubectl, kind)
    kubectl.apply(using("reader", "cat /data/file", "hand"), using("nfs", "true", "foreign"))
    kubectl.wait_phase("reader", "Succeeded")
    assert kubectl("logs", "reader").stdout == "given\n"
    refused = kubectl.wait_phase("nfs", "Failed")
    assert "spec.nfs" in refused["status"]["message"]
    kubectl("delete", "pv", "--wait=false", *names.values())
    testbed.run(["rm", "-r", own])


def test_a_pod_waits_for_its_claim_before_it_has_a_job(kubectl: Kubectl) -> None:
    node = kubectl.get("nodes")["items"][0]["metadata"]["name"]
    # Bound by hand: the scheduler would have waited itself.
    kubectl.apply(using("early", "echo ok", "coming", nodeName=node))
    told = eventually(
        lambda: [text for reason, text in kubectl.events("early") if reason == "FailedMount"], 20
    )
    assert 'persistentvolumeclaims "coming" not found' in told[0]
    early = kubectl.pod("early")
    assert "slurmlet.io/job-id" not in early["metadata"].get("annotations", {})
    assert early["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "ContainerCreating"
    kubectl.apply(claim("coming"))
    kubectl.wait_phase("early", "Succeeded")


def test_a_statefulset_keeps_its_data_through_everything(testbed: Testbed, kubectl: Kubectl) -> None:
    command = 'echo "$(hostname) $(cat /proc/sys/kernel/random/uuid)" >> /data/log; exec sleep 3600'
    kubectl.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "db"},
            "spec": {
                "serviceName": "db",
                "replicas": 2,
                "podManagementPolicy": "Parallel",
                "selector": {"matchLabels": {"app": "db"}},
                "template": {
                    "metadata": {"labels": {"app": "db"}},
                    "spec": {
                        "terminationGracePeriodSeconds": 0,
                        "containers": [
                            {
                                "name": "main",
                                "image": IMAGE,
                                "command": ["sh", "-c", command],
                                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                            }
                        ],
                    },
                },
                "volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": claim("x")["spec"]}],
            },
        }
    )

    def lines(count: int) -> list[str]:
        """What the first pod's volume holds, once it holds so many lines and the pod runs."""

        def probe() -> Any:
            said = kubectl("exec", "db-0", "--", "cat", "/data/log", check=False)
            return said.ok and len(found := said.stdout.splitlines()) == count and found

        return list(eventually(probe, 60))

    first = lines(1)
    assert first[0].startswith("db-0 ")
    kubectl("delete", "pod", "db-0")
    second = lines(2)
    assert second[0] == first[0]
    testbed.run(["slurmlet", "down", "-c", CLUSTER], timeout_s=120)
    testbed.run(["slurmlet", "up", "-c", CLUSTER], timeout_s=180)
    third = lines(3)
    assert third[:2] == second
    assert {line.split()[0] for line in third} == {"db-0"}


def test_volumes_where_users_have_many_ids(testbed: Testbed) -> None:
    """With subordinate ids other users write to a volume; neither a deleted claim nor a purge leaves their files."""
    name, user = f"{CLUSTER[:20]}-ids", "user2"
    testbed.run(["slurmlet", "up", "-c", name], user=user, timeout_s=180)
    try:
        kubectl = Kubectl(testbed, "default", user=user, cluster=name)
        eventually(lambda: kubectl("get", "serviceaccount", "default", check=False).ok)
        context = {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 2000}
        command = "cd /data; mkdir own; echo x > own/file; stat -c '%u %g' own own/file; chmod 700 own"
        for one in ("first", "second"):
            kubectl.apply(claim(one), using(one, command, one, securityContext=context))
        for one in ("first", "second"):
            kubectl.wait_phase(one, "Succeeded")
            assert kubectl("logs", one).stdout == "1000 2000\n1000 2000\n"
        path = volume_of(kubectl, "first")["spec"]["hostPath"]["path"]
        assert testbed.run(["stat", "-c", "%u", f"{path}/own"], user="root").stdout.strip() != "1002"
        kubectl("delete", "pod", "first", "second")
        kubectl("delete", "pvc", "first")
        eventually(lambda: not ls(testbed, path), 20)
    finally:
        testbed.run(["slurmlet", "down", "-c", name, "--purge", "--yes"], user=user, timeout_s=120)
    assert not ls(testbed, f"/home/{user}/.slurmlet/{name}")
