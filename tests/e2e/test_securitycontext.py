"""securityContext with one uid (user1) and with subordinate uids (user2): docs/security-context.md, row by row."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import CLUSTER, Kubectl, eventually, jobs_of, pod

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def second(testbed: Testbed) -> Iterator[Kubectl]:
    """kubectl of user2, who has subordinate uids, in a cluster of their own."""
    cluster = f"{CLUSTER}-2"
    testbed.run(["slurmlet", "up", "-c", cluster], user="user2", timeout_s=180)
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}", "user2", cluster)
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    yield here
    testbed.run(["slurmlet", "down", "-c", cluster, "--purge", "--yes"], user="user2", timeout_s=60)


@pytest.fixture(params=["one uid", "many uids"])
def anyone(request: pytest.FixtureRequest) -> Kubectl:
    found: Kubectl = request.getfixturevalue("kubectl" if request.param == "one uid" else "second")
    return found


def said(kubectl: Kubectl, name: str) -> str:
    kubectl.wait_phase(name, "Succeeded", "Failed")
    return kubectl("logs", name).stdout


def secure(**context: Any) -> dict[str, Any]:
    return {"securityContext": context}


def test_users_and_groups(anyone: Kubectl) -> None:
    command = "id -u; id -g; id -G; touch /tmp/mine; stat -c %u:%g /tmp/mine"
    context = {"runAsUser": 1000, "runAsGroup": 3000, "supplementalGroups": [4000], "fsGroup": 5000}
    anyone.apply(
        pod("users", command, securityContext=context, container=secure(allowPrivilegeEscalation=False)),
        pod("over", "id -u", securityContext=context, container=secure(runAsUser=1001)),
    )
    uid, gid, groups, owner = said(anyone, "users").splitlines()
    assert (uid, gid, owner) == ("1000", "3000", "1000:3000")
    status = anyone.pod("users")["status"]["containerStatuses"][0]["user"]["linux"]
    assert (status["uid"], status["gid"]) == (1000, 3000)
    if anyone.user == "user2":
        assert set(groups.split()) == {"3000", "4000", "5000"}
        assert status["supplementalGroups"] == [3000, 4000, 5000]
    else:
        # One mapped gid: there is no other to be a member of, and the status says so.
        assert status["supplementalGroups"] == [3000]
    assert said(anyone, "over") == "1001\n"


def test_ids_that_are_not_there(second: Kubectl) -> None:
    second.apply(pod("high", securityContext={"runAsUser": 70000000}))
    eventually(lambda: second.waiting("high")[0] == "CreateContainerConfigError")
    assert second.waiting("high")[1].startswith(
        "securityContext.runAsUser: 70000000 is beyond the ids you have"
    )
    second("delete", "pod", "high", "--wait=false")


def test_not_root_means_not_root(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("root", securityContext={"runAsNonRoot": True}),
        pod("told", securityContext={"runAsNonRoot": True, "runAsUser": 0}),
        pod("fine", "id -u", securityContext={"runAsNonRoot": True, "runAsUser": 7}),
    )
    uid = kubectl.pod("root")["metadata"]["uid"]
    where = f'(pod: "root_{kubectl.namespace}({uid})", container: main)'
    words = f"Error: container has runAsNonRoot and image will run as root {where}"
    eventually(partial(kubectl.told, "root", "Failed", words))
    eventually(partial(kubectl.told, "told", "Failed", "Error: container's runAsUser breaks non-root policy"))
    assert said(kubectl, "fine") == "7\n"
    assert not [line for line in jobs_of(kubectl.testbed) if f"root.{kubectl.namespace}" in line]


def test_what_a_process_may_do(anyone: Kubectl) -> None:
    show = "grep -E 'CapEff|CapBnd|NoNewPrivs|Seccomp:' /proc/self/status"
    # A user namespace needs no capability: only a filter of calls can forbid it.
    probe = f"{show}; touch /x && echo root writable; touch /data/x && echo data writable; unshare -U echo unshared"
    data: dict[str, Any] = {"volumes": [{"name": "data", "emptyDir": {}}]}
    mounts = [{"name": "data", "mountPath": "/data"}]
    tight = secure(
        readOnlyRootFilesystem=True, allowPrivilegeEscalation=False, capabilities={"drop": ["ALL"], "add": ["CHOWN"]},
        seccompProfile={"type": "RuntimeDefault"},
    )  # fmt: skip
    nobody = secure(runAsUser=65534, capabilities={"drop": ["ALL"]})
    anyone.apply(
        pod("tight", probe, container={**tight, "volumeMounts": mounts}, **data),
        pod("loose", probe, container={"volumeMounts": mounts}, **data),
        pod("nobody", show, container=nobody),
    )  # fmt: skip
    found = said(anyone, "tight")
    assert {"CapEff:\t0000000000000001", "CapBnd:\t0000000000000001", "NoNewPrivs:\t1", "Seccomp:\t2"} <= set(
        found.splitlines()
    )
    assert "touch: /x: Read-only file system" in found
    assert "data writable" in found
    assert "unshare(0x10000000): Operation not permitted" in found
    found = said(anyone, "loose")
    assert {"NoNewPrivs:\t0", "root writable", "data writable", "unshared"} <= set(found.splitlines())
    assert "CapEff:\t0000000000000000" in said(anyone, "nobody")


def test_privileged_is_everything_a_user_namespace_has(anyone: Kubectl) -> None:
    command = """
        awk '/^Cap(Eff|Bnd)/ { print $2 }' /proc/self/status; echo "last $(cat /proc/sys/kernel/cap_last_cap)"
        grep -c ' /proc/' /proc/self/mounts
        mkdir /t && mount -t tmpfs none /t && echo kept > /t/file && echo "mounted $(cat /t/file)"
        mkdir /t/proc && mount -t proc none /t/proc && echo "first is $(cat /t/proc/1/comm)" && umount /t/proc
        ls /dev/fuse /dev/net/tun
        # Beyond the user namespace nothing changes: the clock, modules and the host's files are the host's.
        date -s 2001-01-01 2>&1 | grep -o 'date: .*'
        mknod /block b 8 0 && cat /block || echo no disk
    """
    anyone.apply(
        pod("all", command, container=secure(privileged=True, seccompProfile={"type": "RuntimeDefault"}))
    )
    effective, bounding, last, masks, *words = said(anyone, "all").splitlines()
    every = f"{(1 << (int(last.split()[1]) + 1)) - 1:016x}"
    assert (effective, bounding, masks) == (every, every, "0")
    assert {"mounted kept", "first is sh", "/dev/fuse", "/dev/net/tun", "no disk"} <= set(words)
    assert "date: can't set date: Operation not permitted" in words


def test_a_privileged_container_debugs_a_running_pod(kubectl: Kubectl) -> None:
    kubectl.apply(pod("plain"))
    kubectl.wait_phase("plain", "Running")
    kubectl(
        *("debug", "plain", "--profile=sysadmin", "--image=localhost:5000/busybox:1", "--container=tools"),
        *("--", "sh", "-c", "mount -t tmpfs none /srv && echo mounted; sleep 60"),
        check=False,
    )
    eventually(lambda: "mounted" in kubectl("logs", "plain", "-c", "tools", check=False).stdout)


def test_proc_may_be_unmasked_and_sysctls_set(kubectl: Kubectl) -> None:
    command = "cat /proc/sys/kernel/shm_rmid_forced; grep -c ' /proc/' /proc/self/mounts"
    shm = {"sysctls": [{"name": "kernel.shm_rmid_forced", "value": "1"}]}
    net = {"sysctls": [{"name": "net.ipv4.tcp_syncookies", "value": "0"}]}
    unsafe = {"sysctls": [{"name": "kernel.msgmax", "value": "9000"}]}
    kubectl.apply(
        pod("masked", command, securityContext=shm),
        pod("unmasked", command, hostUsers=False, container=secure(procMount="Unmasked")),
        pod("net", securityContext=net),
        pod("unsafe", securityContext=unsafe),
    )
    forced, masks = said(kubectl, "masked").split()
    assert (forced, int(masks) > 0) == ("1", True)
    assert said(kubectl, "unmasked").split()[1] == "0"
    for name, words in (
        ("net", "which the pod shares with its host"),
        ("unsafe", '"kernel.msgmax" not allowlisted'),
    ):
        status = kubectl.wait_phase(name, "Failed")["status"]
        assert (status["reason"], words in status["message"]) == ("SysctlForbidden", True)


def test_what_cannot_be_is_refused_with_a_remedy(kubectl: Kubectl) -> None:
    own = "spec.containers[0].securityContext"
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "seccomp": (
            f"{own}.seccompProfile.type",
            {"container": secure(seccompProfile={"type": "Localhost", "localhostProfile": "x.json"})},
        ),
        "apparmor": (
            "spec.securityContext.appArmorProfile.type",
            {"securityContext": {"appArmorProfile": {"type": "Localhost", "localhostProfile": "x"}}},
        ),
    }
    kubectl.apply(*(pod(name, **change) for name, (_, change) in asked.items()))
    for name, (field, _) in asked.items():
        status = kubectl.wait_phase(name, "Failed")["status"]
        assert (status["reason"], status["message"].split(": ")[0]) == ("PodRefused", field)
        texts = eventually(
            lambda name=name: [text for why, text in kubectl.events(name) if why == "PodRefused"]
        )
        assert any(word in texts[0] for word in ("Remove", "Use ", "Name the"))
