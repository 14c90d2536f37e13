"""Containers as a kubelet has them: environment, names, shared memory, last words, gates, resizes, `kubectl debug`."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from slurmlet.testbed.faults import inject
from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e


def said(kubectl: Kubectl, name: str, container: str = "main") -> str:
    """What a container wrote, once its pod is over."""
    kubectl.wait_phase(name, "Succeeded", "Failed")
    return kubectl("logs", name, "-c", container).stdout


def condition(kubectl: Kubectl, name: str, type_: str) -> dict[str, Any]:
    conditions = kubectl.pod(name)["status"].get("conditions") or []
    found: dict[str, Any] = next((one for one in conditions if one["type"] == type_), {})
    return found


def ephemeral(kubectl: Kubectl, name: str, container: str) -> dict[str, Any]:
    statuses = kubectl.pod(name)["status"].get("ephemeralContainerStatuses") or []
    found: dict[str, Any] = next((one for one in statuses if one["name"] == container), {})
    return found


def test_variables_from_a_file_that_an_init_container_wrote(kubectl: Kubectl) -> None:
    lines = "# made by init\\nUSER='ada'\\nPOEM='two\\nlines' # fine\\n"
    init = {
        "name": "writer", "image": IMAGE, "command": ["sh", "-c", f'printf "{lines}" > /config/app.env'],
        "volumeMounts": [{"name": "config", "mountPath": "/config"}],
    }  # fmt: skip

    def from_file(key: str, **more: Any) -> dict[str, Any]:
        return {"fileKeyRef": {"volumeName": "config", "path": "app.env", "key": key, **more}}

    env = [
        {"name": "WHO", "valueFrom": from_file("USER")},
        {"name": "POEM", "valueFrom": from_file("POEM")},
        {"name": "ABSENT", "valueFrom": from_file("NOBODY", optional=True)},
        {"name": "GREETING", "value": "hello $(WHO), $(ABSENT)"},
    ]
    config = [{"name": "config", "emptyDir": {}}]
    command = 'echo "$GREETING|$POEM|${ABSENT-unset}|$(WHO)"'
    wanting = [{"name": "WHO", "valueFrom": from_file("NOBODY")}]
    kubectl.apply(
        pod("filled", command, container={"env": env}, initContainers=[init], volumes=config),
        pod("wanting", container={"env": wanting}, initContainers=[init], volumes=config),
    )
    assert said(kubectl, "filled") == "hello ada, $(ABSENT)|two\nlines|unset|ada\n"
    eventually(lambda: kubectl.waiting("wanting")[0] == "CreateContainerConfigError")
    assert 'environment variable key "NOBODY" not found' in kubectl.waiting("wanting")[1]


def test_services_of_the_namespace_are_in_the_environment(kubectl: Kubectl) -> None:
    ports = [{"name": "sql", "port": 5432}, {"name": "stats", "port": 90, "protocol": "UDP"}]
    service = {"apiVersion": "v1", "kind": "Service", "spec": {"ports": ports}}
    headless = {"apiVersion": "v1", "kind": "Service", "spec": {"clusterIP": "None", "ports": [{"port": 1}]}}
    kubectl.apply({**service, "metadata": {"name": "my-db"}}, {**headless, "metadata": {"name": "no-ip"}})
    address = kubectl.get("service", "my-db")["spec"]["clusterIP"]
    kubectl.apply(pod("linked", "env"), pod("unlinked", "env", enableServiceLinks=False))
    found = dict(line.split("=", 1) for line in said(kubectl, "linked").splitlines())
    wanted = {
        "MY_DB_SERVICE_HOST": address, "MY_DB_SERVICE_PORT": "5432", "MY_DB_SERVICE_PORT_STATS": "90",
        "MY_DB_PORT": f"tcp://{address}:5432", "MY_DB_PORT_90_UDP": f"udp://{address}:90",
        "MY_DB_PORT_90_UDP_PROTO": "udp", "MY_DB_PORT_5432_TCP_ADDR": address,
    }  # fmt: skip
    assert wanted.items() <= found.items()
    assert not [name for name in found if name.startswith("NO_IP")]
    unlinked = said(kubectl, "unlinked")
    assert "MY_DB" not in unlinked
    assert f"KUBERNETES_SERVICE_HOST={found['KUBERNETES_SERVICE_HOST']}\n" in unlinked


def test_what_a_pod_is_called(kubectl: Kubectl) -> None:
    command = "hostname; cat /etc/hosts"
    aliases = [{"ip": "192.0.2.9", "hostnames": ["zz", "aa"]}, {"ip": "192.0.2.1", "hostnames": ["first"]}]
    kubectl.apply(
        pod("full", command, hostname="web", subdomain="pool", setHostnameAsFQDN=True),
        pod("short", command, hostname="web", subdomain="pool", hostAliases=aliases),
        pod("override", command, hostnameOverride="db.example.org"),
        pod("hosted", command, hostNetwork=True),
    )
    full = f"web.pool.{kubectl.namespace}.svc.cluster.local"
    lines = said(kubectl, "full").splitlines()
    assert lines[0] == full
    assert lines[-1].split("\t")[1:] == [full, "web"]
    short = said(kubectl, "short")
    assert short.startswith("web\n")
    assert f"\t{full}\tweb\n" in short
    assert short.endswith("# Entries added by HostAliases.\n192.0.2.9\tzz\taa\n192.0.2.1\tfirst\n")
    assert said(kubectl, "override").startswith("db.example.org\n")
    hosted = said(kubectl, "hosted")
    host = kubectl.pod("hosted")["metadata"]["annotations"]["slurmlet.io/host"]
    assert hosted.startswith(f"{host}\n# Kubernetes-managed hosts file (host network).\n")


def test_containers_of_a_pod_share_memory(kubectl: Kubectl) -> None:
    writer = {
        "name": "writer", "image": IMAGE, "command": ["sh", "-c", "echo word > /dev/shm/word; readlink /proc/self/ns/ipc"],
        "securityContext": {"runAsUser": 1234},
    }  # fmt: skip
    reader = "until cat /dev/shm/word 2>/dev/null; do sleep 0.2; done; readlink /proc/self/ns/ipc"
    kubectl.apply(
        pod("sharing", reader, more_containers=[writer]),
        pod(
            "hosts",
            "readlink /proc/self/ns/ipc; touch /dev/shm/$HOSTNAME && rm /dev/shm/$HOSTNAME",
            hostIPC=True,
        ),
    )
    word, own = said(kubectl, "sharing").split()
    assert word == "word"
    assert said(kubectl, "sharing", "writer").split() == [own]
    assert said(kubectl, "hosts").strip() != own
    host = kubectl.pod("hosts")["metadata"]["annotations"]["slurmlet.io/host"]
    outside = kubectl.testbed.run(["readlink", "/proc/self/ns/ipc"], host=host).stdout
    assert said(kubectl, "hosts") == outside


def test_last_words(kubectl: Kubectl) -> None:
    long = "seq 1 2000 > /dev/termination-log; exit 4"
    logs = {"terminationMessagePolicy": "FallbackToLogsOnError"}
    elsewhere = {"terminationMessagePath": "/var/run/last"}
    kubectl.apply(
        pod("long", long),
        pod("fallback", "seq 1 100; exit 5", container=logs),
        pod("fine", "echo unheard", container=logs),
        pod("elsewhere", "echo -n there > /var/run/last", container=elsewhere),
        pod("killed", "kill -KILL $$$$", shareProcessNamespace=True),
    )

    def ended(name: str) -> dict[str, Any]:
        status = kubectl.wait_phase(name, "Succeeded", "Failed")["status"]
        found: dict[str, Any] = status["containerStatuses"][0]["state"]["terminated"]
        return found

    assert ended("long")["message"].endswith("1999\n2000\n")
    assert len(ended("long")["message"]) == 4096
    assert ended("fallback")["message"] == "".join(f"{number}\n" for number in range(21, 101))
    assert "message" not in ended("fine")
    assert ended("elsewhere")["message"] == "there"
    assert (ended("killed")["exitCode"], ended("killed")["reason"]) == (137, "Error")


def test_readiness_gates_hold_a_pod_back(kubectl: Kubectl) -> None:
    kubectl.apply(pod("gated", readinessGates=[{"conditionType": "example.com/open"}]))
    eventually(lambda: condition(kubectl, "gated", "ContainersReady").get("status") == "True")
    closed = condition(kubectl, "gated", "Ready")
    assert (closed["status"], closed["reason"]) == ("False", "ReadinessGatesNotReady")
    assert (
        closed["message"]
        == 'corresponding condition of pod readiness gate "example.com/open" does not exist.'
    )

    def turn(status: str) -> None:
        change = {"status": {"conditions": [{"type": "example.com/open", "status": status}]}}
        kubectl("patch", "pod", "gated", "--subresource=status", "-p", json.dumps(change))

    turn("True")
    eventually(lambda: condition(kubectl, "gated", "Ready").get("status") == "True")
    turn("False")
    eventually(lambda: condition(kubectl, "gated", "Ready").get("status") == "False")
    assert condition(kubectl, "gated", "example.com/open")["status"] == "False"


def test_a_resize_cannot_be_and_says_so(kubectl: Kubectl) -> None:
    asked = {"requests": {"cpu": "100m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}}
    kubectl.apply(pod("sized", container={"resources": asked}))
    status = kubectl.wait_phase("sized", "Running")["status"]
    assert status["containerStatuses"][0]["resources"] == asked
    assert status["containerStatuses"][0]["allocatedResources"] == asked["requests"]
    assert (status["qosClass"], status["allocatedResources"]) == ("Burstable", asked["requests"])

    def resize(cpu: str) -> None:
        change = {"spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]}}
        kubectl("patch", "pod", "sized", "--subresource=resize", "-p", json.dumps(change))

    resize("200m")
    pending = eventually(lambda: condition(kubectl, "sized", "PodResizePending"))
    assert (pending["status"], pending["reason"]) == ("True", "Infeasible")
    assert "Slurm job" in pending["message"]
    now = kubectl.pod("sized")
    assert (
        now["status"]["observedGeneration"] == now["metadata"]["generation"] == pending["observedGeneration"]
    )
    assert now["status"]["containerStatuses"][0]["resources"] == asked
    eventually(partial(kubectl.told, "sized", "ResizeInfeasible", "Pod resize Infeasible: "))
    resize("100m")
    eventually(lambda: not condition(kubectl, "sized", "PodResizePending"))


def test_debug_looks_into_a_running_pod(kubectl: Kubectl) -> None:
    kubectl.apply(pod("subject", "exec sleep 3333", restartPolicy="Always"))
    kubectl.wait_phase("subject", "Running")
    debug = partial(kubectl, "debug", "subject", f"--image={IMAGE}")
    debug("--target=main", "-c", "looker", "--", "sh", "-c", "ps; exit 3")
    debug("-c", "alone", "--", "sh", "-c", "ps; sleep 3600")
    debug("-c", "bad", "--image=localhost:5000/none:1", "--", "true")
    ended = eventually(lambda: ephemeral(kubectl, "subject", "looker").get("state", {}).get("terminated"))
    assert ended["exitCode"] == 3
    eventually(lambda: "running" in ephemeral(kubectl, "subject", "alone").get("state", {}))
    waiting = eventually(lambda: ephemeral(kubectl, "subject", "bad").get("state", {}).get("waiting"))
    assert waiting["reason"] in ("ErrImagePull", "ImagePullBackOff")
    assert "sleep 3333" in kubectl("logs", "subject", "-c", "looker").stdout
    assert "sleep 3333" not in kubectl("logs", "subject", "-c", "alone").stdout
    code, out, _ = kubectl.raw(
        "debug", "-i", "subject", f"--image={IMAGE}", "--target=main", "-c", "typed", "--", "sh",
        stdin=b"echo $((6*7)); exit\n",
    )  # fmt: skip
    assert (code, b"42\n" in out) == (0, True)
    status = kubectl.pod("subject")["status"]
    # Whatever becomes of them, they count for nothing but themselves, and none is started again.
    assert (status["phase"], status["containerStatuses"][0]["restartCount"]) == ("Running", 0)
    assert {one["restartCount"] for one in status["ephemeralContainerStatuses"]} == {0}
    kubectl("delete", "pod", "subject", timeout_s=30)


def test_a_rule_may_restart_all_containers(kubectl: Kubectl) -> None:
    rules = [{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]
    mounts = [{"name": "data", "mountPath": "/data"}]
    count = "echo x >> /data/$0; "
    init = {"name": "first", "image": IMAGE, "command": ["sh", "-c", count, "first"], "volumeMounts": mounts}
    other = {
        "name": "other", "image": IMAGE, "volumeMounts": mounts,
        "command": ["sh", "-c", f"{count} until test -e /data/done; do sleep 0.2; done", "other"],
    }  # fmt: skip
    # The second run lets the pod end.
    again = "sleep 1; exit 42"
    script = (
        f"{count} test $(grep -c x /data/main) = 2 || {{ {again}; }}; touch /data/done; wc -l /data/first"
    )
    command = ["sh", "-c", script, "main"]
    container = {"restartPolicy": "Never", "restartPolicyRules": rules, "volumeMounts": mounts}
    kubectl.apply(
        pod("round", command, container=container, initContainers=[init], more_containers=[other],
            volumes=[{"name": "data", "emptyDir": {}}])
    )  # fmt: skip
    assert said(kubectl, "round").split()[0] == "2"
    status = kubectl.pod("round")["status"]
    statuses = {one["name"]: one for one in (*status["containerStatuses"], *status["initContainerStatuses"])}
    assert {name: one["restartCount"] for name, one in statuses.items()} == {
        "main": 1,
        "other": 1,
        "first": 1,
    }
    assert statuses["main"]["lastState"]["terminated"]["exitCode"] == 42
    assert statuses["other"]["lastState"]["terminated"]["exitCode"] == 137
    assert condition(kubectl, "round", "AllContainersRestarting")["reason"] == "PodCompleted"


def test_another_image_starts_the_container_again(kubectl: Kubectl) -> None:
    app = "localhost:5000/app:1"
    beside = {"name": "beside", "image": IMAGE, "command": ["sleep", "3600"]}
    # The policy has no say in it: the container did not end, it became another.
    command = "trap 'echo asked to end; exit 0' TERM; echo greeting=$GREETING; while :; do sleep 0.1; done"
    kubectl.apply(pod("moved", command, more_containers=[beside], terminationGracePeriodSeconds=20))
    kubectl("wait", "--for=condition=Ready", "pod/moved", "--timeout=60s")
    before = kubectl.pod("moved")
    kubectl("set", "image", "pod/moved", f"main={app}")

    def restarted() -> Any:
        found = {one["name"]: one for one in kubectl.pod("moved")["status"]["containerStatuses"]}
        return found["main"]["restartCount"] == 1 and "running" in found["main"]["state"] and found

    after = eventually(restarted)
    was = {one["name"]: one for one in before["status"]["containerStatuses"]}
    assert (was["main"]["image"], after["main"]["image"]) == (IMAGE, app)
    assert after["main"]["imageID"].startswith("localhost:5000/app@sha256:")
    assert after["main"]["imageID"] != was["main"]["imageID"]
    assert after["main"]["lastState"]["terminated"]["exitCode"] == 0
    assert after["beside"]["containerID"] == was["beside"]["containerID"], "the others are left alone"
    assert kubectl("logs", "moved", "-c", "main", "--previous").stdout == "greeting=\nasked to end\n"
    eventually(lambda: kubectl("logs", "moved", "-c", "main").stdout == "greeting=hello\n")
    kubectl.tells("moved", "Killing", words="Container main definition changed, will be restarted")
    assert kubectl.job_id("moved") == before["metadata"]["annotations"]["slurmlet.io/job-id"]

    kubectl("set", "image", "pod/moved", "main=localhost:5000/nothing:1")
    eventually(lambda: kubectl.told("moved", "Failed", 'Failed to pull image "localhost:5000/nothing:1"'))
    status = next(one for one in kubectl.pod("moved")["status"]["containerStatuses"] if one["name"] == "main")
    assert (status["image"], "running" in status["state"]) == (app, True)


def test_a_node_without_a_runtime_of_its_own_runs_pods_with_the_clusters_runc(
    kubectl: Kubectl, testbed: Testbed
) -> None:
    inject(testbed, "hide-runtimes", "c1")
    try:
        assert not testbed.run(["sh", "-c", "command -v crun || command -v runc"], host="c1", check=False).ok
        there = {"annotations": {"slurmlet.io/sbatch": "--nodelist=c1"}}
        kubectl.apply(pod("p", "cat /etc/hostname; sleep 3600", metadata=there))
        found = kubectl.wait_phase("p", "Running", "Failed")
        (status,) = found["status"]["containerStatuses"]
        assert status.get("containerID", "").startswith("runc://"), status
        eventually(lambda: kubectl("logs", "p").stdout == "p\n")
        assert kubectl("exec", "p", "--", "hostname").stdout == "p\n"
    finally:
        inject(testbed, "show-runtimes", "c1")
