"""Volumes as a container sees them: files of the API, their refresh, directories with limits, images, hosts' paths."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def kubectl(testbed: Testbed, cluster: str) -> Iterator[Kubectl]:
    """One namespace for all tests here: a fresh one for each would take longer than the tests."""
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    yield here
    here("delete", "pods", "--all", "--grace-period=0", "--force", "--wait=false", check=False)
    here("delete", "namespace", here.namespace, "--wait=false", check=False)


@pytest.fixture(scope="module", autouse=True)
def first_token(testbed: Testbed, cluster: str, kubectl: Kubectl) -> str:
    """Of a pod whose hub was killed then: replacing it takes its time, so the last test looks at it."""
    token = {"path": "token", "audience": "vault", "expirationSeconds": 600}
    sources = [{"serviceAccountToken": token}, {"configMap": {"name": "kube-root-ca.crt"}}]
    kubectl.apply(mounting("holder", "sleep 3600", {"name": "t", "projected": {"sources": sources}}))
    kubectl.wait_phase("holder", "Running")
    found = inside(kubectl, "holder", "cat /t/token")
    components = json.loads(
        testbed.run(["cat", f"/home/user1/.slurmlet/{cluster}/run/components.json"]).stdout
    )
    testbed.run(["kill", "-9", str(components["hub"]["pid"])])
    return found


def config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def secret(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}


def mounting(
    name: str, command: str, *volumes: dict[str, Any], mounts: Any = (), **more: Any
) -> dict[str, Any]:
    """A pod with each volume on /<its name>, or where `mounts` says."""
    plain = [{"name": one["name"], "mountPath": f"/{one['name']}"} for one in volumes]
    container = {"volumeMounts": list(mounts) or plain, **more.pop("container", {})}
    return pod(name, command, container=container, volumes=list(volumes), **more)


def said(kubectl: Kubectl, name: str) -> list[str]:
    """What a pod said, once it has ended well."""
    kubectl.wait_phase(name, "Succeeded")
    return kubectl("logs", name).stdout.splitlines()


def inside(kubectl: Kubectl, name: str, command: str) -> str:
    return kubectl("exec", name, "--", "sh", "-c", command, check=False).stdout.strip()


def told(kubectl: Kubectl, name: str, reason: str) -> list[str]:
    return [text for why, text in kubectl.events(name) if why == reason]


def test_files_lie_as_the_kubelet_lays_them(kubectl: Kubectl) -> None:
    items = [{"key": "a", "path": "deep/one"}, {"key": "b", "path": "two", "mode": 0o400}]
    kubectl.apply(
        config_map("layout", a="1", b="2"),
        mounting(
            "layout",
            "cd /cm; readlink two; readlink deep; readlink ..data; ls -A | sort; stat -L -c %a two deep/one;"
            " cat deep/one two; echo; touch x 2>/dev/null || echo read-only",
            {"name": "cm", "configMap": {"name": "layout", "items": items, "defaultMode": 0o440}},
        ),
    )
    lines = said(kubectl, "layout")
    assert lines[:2] == ["..data/two", "..data/deep"]
    dated = lines[2]
    assert dated.startswith("..20")
    assert lines[3:7] == sorted(["..data", dated, "deep", "two"])
    assert lines[7:] == ["400", "440", "12", "read-only"]


def test_changes_reach_running_containers_by_one_swap(kubectl: Kubectl) -> None:
    kubectl.apply(
        config_map("cm", key="old"),
        secret("s", word="old", gone="x"),
        mounting(
            "watcher",
            "sleep 3600",
            {"name": "cm", "configMap": {"name": "cm"}},
            {"name": "s", "secret": {"secretName": "s"}},
            {"name": "maybe", "configMap": {"name": "later", "optional": True}},
            {
                "name": "me",
                "downwardAPI": {
                    "items": [
                        {"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}},
                        {"path": "notes", "fieldRef": {"fieldPath": "metadata.annotations"}},
                    ]
                },
            },
            mounts=[
                *({"name": name, "mountPath": f"/{name}"} for name in ("cm", "s", "maybe", "me")),
                {"name": "cm", "mountPath": "/fixed", "subPath": "key"},
            ],
            metadata={"labels": {"stage": "one"}},
        ),
    )
    kubectl.wait_phase("watcher", "Running")
    before = inside(kubectl, "watcher", "readlink /cm/..data; readlink /s/..data").split()
    assert inside(kubectl, "watcher", "cat /me/labels; ls /maybe") == 'stage="one"'
    began_s = time.monotonic()
    kubectl.apply(config_map("cm", key="new"), config_map("later", here="now"))
    change = {"data": {"word": base64.b64encode(b"new").decode(), "gone": None}}
    kubectl("patch", "secret", "s", "-p", json.dumps(change))
    kubectl("label", "--overwrite", "pod", "watcher", "stage=two")
    expected = 'new|new|now|stage="two"'
    show = 'echo "$(cat /cm/key)|$(cat /s/word)|$(cat /maybe/here)|$(cat /me/labels)"'
    eventually(lambda: inside(kubectl, "watcher", show) == expected, 60)
    assert time.monotonic() - began_s < 60
    after = inside(kubectl, "watcher", "readlink /cm/..data; readlink /s/..data").split()
    assert before[0] != after[0]
    assert before[1] != after[1]
    assert inside(kubectl, "watcher", "ls /s") == "word"
    assert inside(kubectl, "watcher", "ls -A /cm | wc -l") == "3", "the old content is gone"
    # As upstream: what was mounted by subPath stays what it was.
    assert inside(kubectl, "watcher", "cat /fixed") == "old"
    assert "slurmlet.io/host" in inside(kubectl, "watcher", "cat /me/notes")

    # Its source deleted, a volume keeps what it has and says so.
    kubectl("delete", "configmap", "cm")
    words = eventually(lambda: told(kubectl, "watcher", "FailedMount"), 20)
    assert words == ['MountVolume.SetUp failed for volume "cm" : configmap "cm" not found']
    assert inside(kubectl, "watcher", "cat /cm/key") == "new"


def test_what_is_missing_is_waited_for_before_there_is_a_job(kubectl: Kubectl) -> None:
    items = [{"key": "k", "path": "k"}]
    kubectl.apply(
        config_map("keyless", other="x"),
        mounting("by-volume", "cat /s/k", {"name": "s", "secret": {"secretName": "absent"}}),
        mounting("by-key", "cat /c/k", {"name": "c", "configMap": {"name": "keyless", "items": items}}),
        pod("by-env", "echo $WORD", container={"envFrom": [{"secretRef": {"name": "absent"}}]}),
    )
    events = {
        "by-volume": ("FailedMount", 'MountVolume.SetUp failed for volume "s" : secret "absent" not found'),
        "by-key": (
            "FailedMount",
            'MountVolume.SetUp failed for volume "c" : configmap references non-existent config key: k',
        ),
        "by-env": ("Failed", 'Error: secret "absent" not found'),
    }
    reasons = {
        "by-volume": "ContainerCreating",
        "by-key": "ContainerCreating",
        "by-env": "CreateContainerConfigError",
    }
    for name, (reason, text) in events.items():
        assert eventually(lambda name=name, reason=reason: told(kubectl, name, reason), 20)[0] == text
        seen = kubectl.pod(name)
        assert seen["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == reasons[name]
        assert "slurmlet.io/job-id" not in seen["metadata"].get("annotations", {})
    kubectl.apply(secret("absent", k="found", WORD="found"), config_map("keyless", k="found"))
    for name in events:
        assert said(kubectl, name) == ["found"]


def test_trust_bundles(kubectl: Kubectl) -> None:
    root = kubectl.get("configmap", "kube-root-ca.crt")["data"]["ca.crt"].strip()
    name = f"slurmlet-{kubectl.namespace}"
    bundle = {
        "apiVersion": "certificates.k8s.io/v1beta1",
        "kind": "ClusterTrustBundle",
        "metadata": {"name": name},
        "spec": {"trustBundle": f"a comment\n{root}\n"},
    }
    kubectl.apply(
        bundle,
        mounting(
            "trusting",
            "cat /t/ca.pem",
            {
                "name": "t",
                "projected": {"sources": [{"clusterTrustBundle": {"name": name, "path": "ca.pem"}}]},
            },
        ),
    )
    assert "\n".join(said(kubectl, "trusting")) == root
    kubectl("delete", "clustertrustbundle", name)


def test_image_volumes(kubectl: Kubectl) -> None:
    source = {"image": {"reference": IMAGE, "pullPolicy": "IfNotPresent"}}
    kubectl.apply(
        mounting(
            "tools",
            "ls /img/bin/busybox /sub/busybox; touch /img/x 2>/dev/null || echo read-only;"
            " /img/bin/busybox true 2>/dev/null || echo no-exec",
            {"name": "img", **source},
            mounts=[
                {"name": "img", "mountPath": "/img"},
                {"name": "img", "mountPath": "/sub", "subPath": "bin"},
            ],
        ),
        mounting(
            "never",
            "true",
            {"name": "img", "image": {"reference": "localhost:5000/absent:1", "pullPolicy": "Never"}},
        ),
    )
    assert said(kubectl, "tools") == ["/img/bin/busybox", "/sub/busybox", "read-only", "no-exec"]
    waiting = eventually(
        lambda: (
            kubectl.pod("never")["status"].get("containerStatuses", [{}])[0].get("state", {}).get("waiting")
        ),
        20,
    )
    assert waiting["reason"] == "ErrImageNeverPull"


def test_an_empty_dir_over_its_limit_evicts_the_pod(kubectl: Kubectl) -> None:
    kubectl.apply(
        mounting(
            "greedy",
            "dd if=/dev/zero of=/d/big bs=64k count=48; sleep 3600",
            {"name": "d", "emptyDir": {"sizeLimit": "1Mi"}},
            restartPolicy="Always",
        ),
        mounting(
            "memory",
            "dd if=/dev/zero of=/m/big bs=64k count=48 2>&1 || true; stat -c %s /m/big",
            {"name": "m", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        ),
    )
    lines = said(kubectl, "memory")
    assert any("No space left" in line for line in lines)
    assert int(lines[-1]) == 1 << 20
    evicted = kubectl.wait_phase("greedy", "Failed", timeout_s=40)
    words = 'Usage of EmptyDir volume "d" exceeds the limit "1Mi". '
    assert (evicted["status"]["reason"], evicted["status"]["message"]) == ("Evicted", words)
    assert eventually(lambda: told(kubectl, "greedy", "Evicted"), 20)[0].strip() == words.strip()


def test_host_paths_of_every_type(testbed: Testbed, kubectl: Kubectl) -> None:
    base = f"/home/user1/paths-{uuid.uuid4().hex[:6]}"
    testbed.run(["sh", "-c", 'mkdir "$1"; echo content > "$1/file"', "sh", base])
    kinds = {
        "dir": ("Directory", base),
        "newdir": ("DirectoryOrCreate", f"{base}/made/deep"),
        "file": ("File", f"{base}/file"),
        "newfile": ("FileOrCreate", f"{base}/made.txt"),
        "null": ("CharDevice", "/dev/null"),
        "any": ("", f"{base}/whatever"),
    }
    volumes = [
        {"name": name, "hostPath": {"path": path, "type": kind}} for name, (kind, path) in kinds.items()
    ]
    command = "cat /file; [ -d /newdir ] && [ -f /newfile ] && [ -c /null ] && [ -d /any ] && ls /dir"
    kubectl.apply(
        mounting("typed", command, *volumes),
        mounting("wrong", "true", {"name": "h", "hostPath": {"path": f"{base}/file", "type": "Directory"}}),
    )
    assert said(kubectl, "typed") == ["content", "file", "made", "made.txt", "whatever"]
    words = f'MountVolume.SetUp failed for volume "h" : hostPath type check failed: {base}/file is not a directory'
    assert eventually(lambda: told(kubectl, "wrong", "FailedMount"), 20)[0] == words
    state = kubectl.pod("wrong")["status"]["containerStatuses"][0]["state"]
    assert state["waiting"]["reason"] == "ContainerCreating"
    testbed.run(["rm", "-r", base])


def test_sub_paths_with_variables_and_read_only_mounts(kubectl: Kubectl) -> None:
    env = [
        {"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        # Known only once the pod has a host.
        {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
    ]
    kubectl.apply(
        mounting(
            "expander",
            "echo hi > /mine/file; cat /all/expander/$IP/file; touch /all/no 2>/dev/null || echo refused",
            {"name": "d", "emptyDir": {}},
            mounts=[
                {"name": "d", "mountPath": "/mine", "subPathExpr": "$(ME)/$(IP)"},
                {"name": "d", "mountPath": "/all", "readOnly": True, "recursiveReadOnly": "Enabled"},
            ],
            container={"env": env},
        ),
        mounting(
            "climber",
            "true",
            {"name": "d", "emptyDir": {}},
            mounts=[{"name": "d", "mountPath": "/d", "subPathExpr": "$(UP)"}],
            container={"env": [{"name": "UP", "value": "../../etc"}]},
        ),
        # The host's /dev has mounts below it: they must be read-only too, not only the one on top.
        mounting(
            "recursive",
            "grep ' /host' /proc/self/mounts | cut -d' ' -f2,4 | cut -d, -f1",
            {"name": "host", "hostPath": {"path": "/dev"}},
            mounts=[{"name": "host", "mountPath": "/host", "readOnly": True, "recursiveReadOnly": "Enabled"}],
        ),
    )
    assert said(kubectl, "expander") == ["hi", "refused"]
    shown = kubectl.pod("expander")["status"]["containerStatuses"][0]["volumeMounts"]
    assert {"name": "d", "mountPath": "/mine"} in shown
    assert {"name": "d", "mountPath": "/all", "readOnly": True, "recursiveReadOnly": "Enabled"} in shown
    state = kubectl.pod("climber")["status"]["containerStatuses"][0]["state"]["waiting"]
    assert state["reason"] == "CreateContainerConfigError"
    assert "subPathExpr" in state["message"]
    assert ".." in state["message"]
    mounts = said(kubectl, "recursive")
    assert len(mounts) > 1
    assert all(line.endswith(" ro") for line in mounts), mounts


def test_a_group_for_volumes_is_accepted(kubectl: Kubectl) -> None:
    kubectl.apply(
        mounting(
            "grouped",
            "id -u; touch /d/file && echo wrote",
            {"name": "d", "emptyDir": {}},
            securityContext={"fsGroup": 2000, "runAsUser": 1234},
        )
    )
    assert said(kubectl, "grouped") == ["1234", "wrote"]


def claims_of(token: str) -> Any:
    body = token.split(".")[1]
    return json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))


def test_tokens_are_bound_and_replaced(kubectl: Kubectl, first_token: str) -> None:
    claims = claims_of(first_token)
    assert claims["aud"] == ["vault"]
    assert claims["exp"] - claims["iat"] == 600
    assert claims["kubernetes.io"]["pod"]["name"] == "holder"
    # A new hub cannot know how old the tokens of running pods are: it replaces them within a share of their life.
    newer = eventually(
        lambda: (now := inside(kubectl, "holder", "cat /t/token")) not in ("", first_token) and now,
        110,
        every_s=1,
    )
    assert claims_of(newer)["iat"] > claims["iat"]
    assert inside(kubectl, "holder", "head -1 /t/ca.crt") == "-----BEGIN CERTIFICATE-----"
