"""What a manifest asks for and what its containers then find: environment, volumes, users, order, endings."""

from __future__ import annotations

import base64
import json
import re
import time
from functools import partial
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, config_map, eventually, jobs_of, pod, secret

pytestmark = pytest.mark.e2e

APP = "localhost:5000/app:1"
CHOWNER = "localhost:5000/chowner:1"
HOSTILE = 'it\'s "quoted" $(id) `id` \\ ${HOME}\nsecond line --wrap'


def field(path: str) -> dict[str, Any]:
    return {"fieldRef": {"fieldPath": path}}


def said(kubectl: Kubectl, name: str, *phases: str) -> str:
    """The log of a pod that has ended well (or as the phases say)."""
    found = kubectl.wait_phase(name, "Succeeded", "Failed")
    text = kubectl("logs", name, "--all-containers").stdout
    assert found["status"]["phase"] in (phases or ("Succeeded",)), (found["status"], text)
    return text


def main_log(kubectl: Kubectl, name: str) -> list[str]:
    return kubectl("logs", name, "-c", "main", check=False).stdout.splitlines()


ENV = [
    {"name": "POD", "valueFrom": field("metadata.name")},
    {"name": "NAMESPACE", "valueFrom": field("metadata.namespace")},
    {"name": "UID_", "valueFrom": field("metadata.uid")},
    {"name": "LABEL", "valueFrom": field("metadata.labels['tier']")},
    {"name": "NOTE", "valueFrom": field("metadata.annotations['example.org/note']")},
    {"name": "NODE", "valueFrom": field("spec.nodeName")},
    {"name": "ACCOUNT", "valueFrom": field("spec.serviceAccountName")},
    {"name": "HOST_IP", "valueFrom": field("status.hostIP")},
    {"name": "POD_IP", "valueFrom": field("status.podIP")},
    {"name": "CPUS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
    {"name": "MILLIS", "valueFrom": {"resourceFieldRef": {"resource": "requests.cpu", "divisor": "1m"}}},
    {"name": "MEMORY", "valueFrom": {"resourceFieldRef": {"resource": "requests.memory", "divisor": "1Mi"}}},
    {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}},
    {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "hidden", "key": "password"}}},
    {"name": "ABSENT", "valueFrom": {"secretKeyRef": {"name": "nowhere", "key": "x", "optional": True}}},
    {"name": "shape", "value": "overridden"},
    {"name": "COMPOSED", "value": "$(POD)-$(KEY)-$$(KEY)-$(LATER)"},
    {"name": "LATER", "value": "too late"},
    {"name": "HOSTILE", "value": HOSTILE.replace("$", "$$")},
    {"name": "EMPTY", "value": ""},
]
ENV_FROM = [
    {"configMapRef": {"name": "settings"}},
    {"prefix": "S_", "secretRef": {"name": "hidden"}},
    {"configMapRef": {"name": "nowhere", "optional": True}},
]


def test_environment(kubectl: Kubectl) -> None:
    resources = {"requests": {"cpu": "250m", "memory": "64Mi"}, "limits": {"cpu": "1500m"}}
    script = 'env -0 | base64 | tr -d "\\n"; echo; echo "$(POD) $0 $1"'
    container = {"env": ENV, "envFrom": ENV_FROM, "resources": resources, "command": ["sh", "-c", script]}
    kubectl.apply(
        config_map("settings", colour="green", shape="round"),
        secret("hidden", password=HOSTILE),
        pod(
            "env",
            container={**container, "args": ["$(KEY)", "$$(KEY)"]},
            metadata={"labels": {"tier": "back"}, "annotations": {"example.org/note": "a b"}},
        ),
    )
    packed, words = said(kubectl, "env").splitlines()
    assert words == "env green $(KEY)"
    seen = dict(one.split("=", 1) for one in base64.b64decode(packed).decode().split("\0") if one)
    found = kubectl.pod("env")
    expected = {
        "POD": "env", "NAMESPACE": kubectl.namespace, "UID_": found["metadata"]["uid"], "LABEL": "back", "NOTE": "a b",
        "NODE": found["spec"]["nodeName"], "ACCOUNT": "default", "HOST_IP": found["status"]["hostIP"],
        "POD_IP": found["status"]["podIP"], "CPUS": "2", "MILLIS": "250", "MEMORY": "64", "KEY": "green",
        "SECRET": HOSTILE, "S_password": HOSTILE, "shape": "overridden", "colour": "green",
        "COMPOSED": "env-green-$(KEY)-$(LATER)", "HOSTILE": HOSTILE, "EMPTY": "", "HOSTNAME": "env", "HOME": "/root",
    }  # fmt: skip
    assert {name: seen.get(name) for name in expected} == expected
    assert "ABSENT" not in seen
    assert seen["KUBERNETES_SERVICE_HOST"]
    assert seen["KUBERNETES_SERVICE_PORT"].isdigit()
    assert "/bin" in seen["PATH"]
    # Nothing of the job's or the user's own environment may leak in.
    assert not [name for name in seen if name.startswith(("SLURM", "SLURMLET"))]


PROJECTED = [
    {"configMap": {"name": "settings", "items": [{"key": "colour", "path": "deep/er/colour"}]}},
    {"secret": {"name": "hidden", "items": [{"key": "password", "path": "pw", "mode": 0o440}]}},
    {"downwardAPI": {"items": [{"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}]}},
    {"serviceAccountToken": {"path": "token", "audience": "vault", "expirationSeconds": 900}},
]
VOLUMES = [
    {"name": "whole", "configMap": {"name": "settings", "defaultMode": 0o755}},
    {"name": "hidden", "secret": {"secretName": "hidden", "defaultMode": 0o400}},
    {
        "name": "info",
        "downwardAPI": {"items": [{"path": "labels", "fieldRef": {"fieldPath": "metadata.labels"}}]},
    },
    {"name": "mixed", "projected": {"defaultMode": 0o640, "sources": PROJECTED}},
    {"name": "maybe", "configMap": {"name": "nowhere", "optional": True}},
    {"name": "disk", "emptyDir": {}},
    {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": "4Mi"}},
]
MOUNTS = [
    *(
        {"name": name, "mountPath": f"/{name}"}
        for name in ("whole", "hidden", "info", "mixed", "maybe", "disk")
    ),
    {"name": "memory", "mountPath": "/memory"},
    {"name": "host", "mountPath": "/host"},
    {"name": "host", "mountPath": "/host-ro", "readOnly": True},
    {"name": "disk", "mountPath": "/part", "subPath": "some/part"},
    {"name": "whole", "mountPath": "/etc/colour", "subPath": "colour"},
]
SCRIPT = """
modes() { for f; do echo "$f $(stat -L -c %a $f) $(cat $f)"; done; }
modes /whole/colour /hidden/password /info/labels /mixed/deep/er/colour /mixed/pw /mixed/name /etc/colour
echo "maybe: $(ls /maybe)"
for d in /whole /hidden /mixed /host-ro /etc; do touch $d/new 2>/dev/null && echo "$d writable" || echo "$d not"; done
cat /disk/early; echo in-part > /part/file; cat /disk/some/part/file; stat -c %a /disk /memory
grep ' /memory ' /proc/mounts | cut -d' ' -f3; head -c 8000000 /dev/zero > /memory/big 2>/dev/null || echo full
cat /host-ro/in; echo from inside > /host/out; cut -d. -f2 /mixed/token
"""
FOUND_IN_VOLUMES = [
    "/whole/colour 755 green",
    "/hidden/password 400 xyzzy",
    '/info/labels 644 a="1"',
    'b="two"',
    "/mixed/deep/er/colour 640 green",
    "/mixed/pw 440 xyzzy",
    "/mixed/name 640 volumes",
    "/etc/colour 755 green",
    "maybe: ",
    "/whole not",
    "/hidden not",
    "/mixed not",
    "/host-ro not",
    "/etc writable",
    "early",
    "in-part",
    "777",
    "1777",
    "tmpfs",
    "full",
    "from outside",
]


def test_volumes(kubectl: Kubectl) -> None:
    shared = f"/home/user1/shared-{kubectl.namespace}"
    kubectl.testbed.run(["mkdir", shared])
    kubectl.testbed.run(["sh", "-c", 'echo from outside > "$1/in"', "sh", shared])
    host = {"name": "host", "hostPath": {"path": shared, "type": "Directory"}}
    write_first = {"name": "first", "image": IMAGE, "command": ["sh", "-c", "echo early > /disk/early"]}
    kubectl.apply(
        config_map("settings", colour="green\n"),
        secret("hidden", password="xyzzy\n"),
        pod(
            "volumes",
            SCRIPT,
            metadata={"labels": {"a": "1", "b": "two"}},
            container={"volumeMounts": MOUNTS},
            initContainers=[{**write_first, "volumeMounts": [{"name": "disk", "mountPath": "/disk"}]}],
            volumes=[*VOLUMES, host],
        ),
    )
    *lines, token = said(kubectl, "volumes").splitlines()
    assert lines == FOUND_IN_VOLUMES
    claims = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
    assert claims["aud"] == ["vault"]
    assert 800 < claims["exp"] - claims["iat"] <= 900
    assert kubectl.testbed.run(["cat", f"{shared}/out"]).stdout == "from inside\n"
    assert kubectl.testbed.run(["stat", "-c", "%U", f"{shared}/out"]).stdout == "user1\n"
    kubectl.testbed.run(["rm", "-r", shared])


def test_a_service_account_token_works_from_inside(kubectl: Kubectl) -> None:
    kubectl(
        "create", "rolebinding", "see", "--clusterrole=view", f"--serviceaccount={kubectl.namespace}:default"
    )
    script = """
    cd /var/run/secrets/kubernetes.io/serviceaccount; cat namespace; echo; cat ca.crt
    ask() { wget -q -O - --no-check-certificate --header "Authorization: Bearer $1" \
        "https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT/api/v1/namespaces/$(cat namespace)/pods/token"; }
    ask nonsense && echo let in by mistake
    ask "$(cat token)" | tr -d ' \n' | grep -o '"name":"token"' | head -n 1
    """
    kubectl.apply(
        pod("token", script),
        pod("without", "ls /var/run/secrets", automountServiceAccountToken=False),
    )
    lines = said(kubectl, "token")
    authority = kubectl.get("configmap", "kube-root-ca.crt")["data"]["ca.crt"]
    assert lines.startswith(f"{kubectl.namespace}\n{authority}")
    assert lines.splitlines()[-1] == '"name":"token"'
    assert "let in by mistake" not in lines
    assert "No such file" in said(kubectl, "without", "Failed")


def test_what_the_image_says_and_what_the_pod_says_over_it(kubectl: Kubectl) -> None:
    def of(image: str, name: str, **container: Any) -> dict[str, Any]:
        made = pod(name, container={"image": image, **container})
        if "command" not in container:
            del made["spec"]["containers"][0]["command"]
        return made

    who = "id -u; id -g; id -un; pwd; touch /tmp/x && stat -c %u /tmp/x; echo $HOME"
    kubectl.apply(
        of(APP, "app"),
        of(APP, "args", args=["echo", "only", "args"]),
        of(APP, "own", command=["sh", "-c", who], workingDir="/var/tmp", securityContext={"runAsUser": 0}),
        of(
            IMAGE,
            "as1000",
            command=["sh", "-c", who],
            securityContext={"runAsUser": 1000, "runAsGroup": 1000},
        ),
        of(IMAGE, "as4242", command=["sh", "-c", "id -u; id -g"], securityContext={"runAsUser": 4242}),
        of(CHOWNER, "chowner"),
        of(IMAGE, "frozen", command=["touch", "/etc/x"], securityContext={"readOnlyRootFilesystem": True}),
        of(IMAGE, "noroot", command=["true"], securityContext={"runAsNonRoot": True}),
    )
    identity, place, greeting = said(kubectl, "app").splitlines()
    assert re.match(r"uid=1000\(app\) gid=1000\(app\)", identity)
    assert (place, greeting) == ("/srv/app", "hello")
    assert said(kubectl, "args") == "only args\n"
    assert said(kubectl, "own").splitlines() == ["0", "0", "root", "/var/tmp", "0", "/root"]
    assert said(kubectl, "as1000").splitlines() == ["1000", "1000", "app", "/", "1000", "/home/app"]
    assert said(kubectl, "as4242").splitlines() == ["4242", "0"]
    assert said(kubectl, "chowner") == "started\n"
    assert "Read-only file system" in said(kubectl, "frozen", "Failed")
    # As with a kubelet it waits, should its image change.
    eventually(lambda: kubectl.waiting("noroot")[0] == "CreateContainerConfigError")
    assert "runAsNonRoot" in kubectl.waiting("noroot")[1]


def test_init_containers_run_in_order_and_a_failure_ends_the_pod(kubectl: Kubectl) -> None:
    def step(name: str, command: str, **more: Any) -> dict[str, Any]:
        mounts = [{"name": "notes", "mountPath": "/notes"}]
        return {
            "name": name,
            "image": IMAGE,
            "command": ["sh", "-c", command],
            "volumeMounts": mounts,
            **more,
        }

    notes: dict[str, Any] = {"volumes": [{"name": "notes", "emptyDir": {}}]}
    steps = [step("one", "sleep 0.3; echo one >> /notes/all"), step("two", "echo two >> /notes/all")]
    sidecar = step("beside", "echo beside >> /notes/all; sleep 3600", restartPolicy="Always")
    main = step("main", "sleep 0.5; sort /notes/all")
    kubectl.apply(
        pod("order", container=main, initContainers=[steps[0], sidecar, steps[1]], **notes),
        pod("broken", container=main, initContainers=[step("one", "exit 6"), steps[1]], **notes),
    )
    assert kubectl.wait_phase("order", "Succeeded", "Failed")["status"]["phase"] == "Succeeded"
    assert kubectl("logs", "order", "-c", "main").stdout == "beside\none\ntwo\n"
    inits = {one["name"]: one["state"] for one in kubectl.pod("order")["status"]["initContainerStatuses"]}
    assert inits["one"]["terminated"]["finishedAt"] <= inits["two"]["terminated"]["startedAt"]
    assert "terminated" in inits["beside"]
    failed = kubectl.wait_phase("broken", "Failed")
    first, second = failed["status"]["initContainerStatuses"]
    assert first["state"]["terminated"]["exitCode"] == 6
    assert "waiting" in second["state"]
    assert failed["status"]["containerStatuses"][0]["state"]["waiting"]["reason"] == "PodInitializing"
    assert kubectl("get", "pod", "broken", "--no-headers").stdout.split()[2] == "Init:Error"


def test_last_words_hosts_and_a_shared_process_list(kubectl: Kubectl) -> None:
    beside = {"name": "beside", "image": IMAGE, "command": ["sleep", "77"]}
    kubectl.apply(
        pod("message", "echo told > /dev/termination-log; exit 1"),
        pod("own-path", "echo here > /tmp/why", container={"terminationMessagePath": "/tmp/why"}),
        pod("fallback", "echo noise; echo the end; exit 1", container={"terminationMessagePolicy": "FallbackToLogsOnError"}),
        pod(
            "hosts",
            "hostname; cat /etc/hostname; test -e /etc/resolv.conf; echo $?; grep example /etc/hosts; "
            "until ps -o args | grep '^sleep 77'; do sleep 0.1; done",
            hostname="other",
            hostAliases=[{"ip": "192.0.2.7", "hostnames": ["a.example", "b.example"]}],
            shareProcessNamespace=True,
            more_containers=[beside],
        ),
    )  # fmt: skip
    for name, phase, words in (
        ("message", "Failed", "told\n"),
        ("own-path", "Succeeded", "here\n"),
        ("fallback", "Failed", "noise\nthe end\n"),
    ):
        ended = kubectl.wait_phase(name, phase)["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (name, ended["message"]) == (name, words)
    lines = eventually(lambda: len(seen := main_log(kubectl, "hosts")) == 5 and seen)
    assert lines[:3] == ["other", "other", "0"]
    assert lines[3].split() == ["192.0.2.7", "a.example", "b.example"]
    assert lines[4] == "sleep 77"


def test_deletion_gives_the_grace_that_was_asked_for(kubectl: Kubectl) -> None:
    shared = f"/home/user1/grace-{kubectl.namespace}"
    kubectl.testbed.run(["mkdir", shared])
    host = {"volumes": [{"name": "host", "hostPath": {"path": shared}}]}
    mounts = {"volumeMounts": [{"name": "host", "mountPath": "/host"}]}
    polite = "trap 'sleep 0.5; echo bye > /host/polite; exit 0' TERM; echo up; while true; do sleep 0.1; done"
    stubborn = "trap 'echo no > /host/stubborn' TERM; echo up; while true; do sleep 0.1; done"
    kubectl.apply(
        pod("polite", polite, container=mounts, terminationGracePeriodSeconds=20, **host),
        pod("stubborn", stubborn, container=mounts, terminationGracePeriodSeconds=2, **host),
        pod("forced", stubborn, container=mounts, terminationGracePeriodSeconds=600, **host),
    )
    for name in ("polite", "stubborn", "forced"):
        eventually(partial(main_log, kubectl, name))
    began_s = time.monotonic()
    kubectl("delete", "pod", "polite", "--timeout=30s")
    assert time.monotonic() - began_s < 15  # well before the grace ends
    assert kubectl.testbed.run(["cat", f"{shared}/polite"]).stdout == "bye\n"
    began_s = time.monotonic()
    kubectl("delete", "pod", "stubborn", "--timeout=30s")
    assert 2 <= time.monotonic() - began_s < 15
    assert kubectl.testbed.run(["cat", f"{shared}/stubborn"]).stdout == "no\n"
    # The object goes at once; its job must not outlive it for long.
    kubectl("delete", "pod", "forced", "--grace-period=0", "--force", "--timeout=10s")
    eventually(lambda: not [line for line in jobs_of(kubectl.testbed) if kubectl.namespace in line], 15)
    kubectl.testbed.run(["rm", "-r", shared])
