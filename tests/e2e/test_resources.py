"""Resources: what reaches Slurm, and what happens to a pod that uses more than it may."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

_LIMIT_BYTES = 32 << 20


def resources(cpu: str = "", memory: str = "") -> dict[str, Any]:
    asked = {name: value for name, value in (("cpu", cpu), ("memory", memory)) if value}
    return {"resources": {"requests": asked}}


def scontrol_job(kubectl: Kubectl, name: str) -> dict[str, str]:
    shown = kubectl.testbed.run(["scontrol", "-o", "show", "job", kubectl.job_id(name)]).stdout
    return dict(word.partition("=")[::2] for word in shown.split())


def granted(kubectl: Kubectl, name: str) -> tuple[str, str]:
    """(CPUs, memory) that Slurm has put down for the pod's job."""
    shown = kubectl.testbed.run(["scontrol", "show", "job", kubectl.job_id(name)]).stdout
    words = dict(word.split("=", 1) for word in shown.split() if "=" in word)
    asked = dict(part.split("=") for part in words["ReqTRES"].split(","))
    return asked["cpu"], asked["mem"]


def test_the_job_is_as_large_as_kubernetes_says(kubectl: Kubectl) -> None:
    def init(name: str, **asked: Any) -> dict[str, Any]:
        return {"name": name, "image": IMAGE, "command": ["sh", "-c", "true"], **resources(**asked)}

    sidecar = {
        **init("side", cpu="500m", memory="64Mi"),
        "restartPolicy": "Always",
        "command": ["sleep", "3600"],
    }
    second = {"name": "second", "image": IMAGE, "command": ["true"], **resources("700m", "32Mi")}
    kubectl.apply(
        # Its init container beside the sidecar is the most at once: 0.5 + 2 CPUs, 64 + 100 MiB.
        pod("peak", "true", container=resources("300m", "16Mi"),
            initContainers=[sidecar, init("big", cpu="2", memory="100Mi")]),
        # Sum of containers and sidecar: 0.5 + 0.3 + 0.7 CPUs, 64 + 16 + 32 MiB.
        pod("sum", "true", container=resources("300m", "16Mi"), more_containers=[second],
            initContainers=[init("small", cpu="1"), sidecar]),
        # The pod's own word counts before that of its containers.
        pod("whole", "true", container=resources("300m", "16Mi"),
            resources={"requests": {"cpu": "3", "memory": "90Mi"}, "limits": {"cpu": "3", "memory": "90Mi"}}),
    )  # fmt: skip
    assert granted(kubectl, "peak") == ("3", "164M")
    assert granted(kubectl, "sum") == ("2", "112M")
    assert granted(kubectl, "whole") == ("3", "90M")
    status = eventually(lambda: (found := kubectl.pod("whole")["status"]).get("allocatedResources") and found)
    assert (status["allocatedResources"], status["qosClass"]) == (
        {"cpu": "3", "memory": "90Mi"},
        "Guaranteed",
    )


def test_gpus_are_the_jobs_and_are_seen_by_who_asked(kubectl: Kubectl) -> None:
    show = 'echo "$CUDA_VISIBLE_DEVICES"; ls /dev | grep nvidia; sleep 3600'
    capacity = kubectl.get("node", "batch")["status"]["capacity"]
    assert (capacity["nvidia.com/gpu"], capacity["slurmlet.io/gres-gpu"]) == ("2", "2")
    two = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    beside = {"name": "beside", "image": IMAGE, "command": ["sh", "-c", show]}
    kubectl.apply(pod("gpus", show, container=two, more_containers=[beside]))
    kubectl("wait", "--for=condition=Ready", "pod/gpus", "--timeout=60s")
    # Only one host of the testbed has any.
    job = scontrol_job(kubectl, "gpus")
    assert (job["TresPerNode"], job["NodeList"]) == ("gres/gpu:2", kubectl.testbed.plan.gpu_host)
    eventually(lambda: kubectl("logs", "gpus", "-c", "main").stdout == "0,1\nnvidia0\nnvidia1\n")
    eventually(lambda: kubectl("logs", "gpus", "-c", "beside").stdout == "\n")
    # None is left: the next one waits its turn in Slurm's queue.
    kubectl.apply(pod("more", container={"resources": {"limits": {"amd.com/gpu": "1"}}}))
    eventually(lambda: kubectl.told("more", "Queued", "is pending: Resources"))
    kubectl("delete", "pod", "gpus", "--wait=false")
    kubectl.wait_phase("more", "Running")


def test_resources_that_slurm_does_not_have_are_refused_by_name(kubectl: Kubectl) -> None:
    # Bound by hand: no node has any, so the scheduler would not.
    limits = {"slurmlet.io/gres-nic": "1"}
    kubectl.apply(pod("nics", container={"resources": {"limits": limits}}, nodeName="batch"))
    status = kubectl.wait_phase("nics", "Failed")["status"]
    assert status["reason"] == "SlurmRefused"
    assert "gres" in status["message"].lower()


@pytest.fixture
def limited() -> Iterator[Callable[[str], None]]:
    """Put the process with this word in its arguments into a memory cgroup, as Slurm's task/cgroup would."""
    line = next((one for one in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in one), "")
    parent = Path("/sys/fs/cgroup/memory" + line.partition(":memory:")[2])
    if not line or not os.access(parent / "cgroup.procs", os.W_OK):
        pytest.skip("this machine has no memory cgroups of version 1 to make one below")
    group = parent / f"slurmlet-e2e-{os.getpid()}"
    group.mkdir()
    (group / "memory.limit_in_bytes").write_text(str(_LIMIT_BYTES))

    def limit(word: str) -> None:
        pids = [entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit() and _has(entry, word)]
        assert pids, f"no process with {word} in its arguments"
        for pid in pids:
            (group / "cgroup.procs").write_text(pid)

    yield limit
    eventually(lambda: _removed(group), 20)


def _has(process: Path, word: str) -> bool:
    try:
        words = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return word.encode() in words


def _removed(group: Path) -> bool:
    try:
        group.rmdir()
    except OSError:
        return False
    return True


def test_the_container_that_ran_out_of_memory_is_named(
    kubectl: Kubectl, limited: Callable[[str], None]
) -> None:
    word = f"hog-{kubectl.namespace}"
    hog = "until test -e /tmp/go; do sleep 0.2; done; exec dd if=/dev/zero of=/dev/null bs=200M count=1"
    other = {"name": "other", "image": IMAGE, "command": ["sleep", "3600"]}
    kubectl.apply(pod("starved", ["sh", "-c", hog, word], more_containers=[other], restartPolicy="OnFailure"))
    kubectl.wait_phase("starved", "Running")
    limited(word)
    kubectl("exec", "starved", "-c", "main", "--", "touch", "/tmp/go")

    def last() -> Any:
        statuses = {one["name"]: one for one in kubectl.pod("starved")["status"]["containerStatuses"]}
        return statuses["main"]["lastState"].get("terminated") or statuses["main"]["state"].get("terminated")

    ended = eventually(last)
    assert (ended["reason"], ended["exitCode"]) == ("OOMKilled", 137)
    # The other goes on, and the one that died starts again in the same job.
    statuses = {one["name"]: one for one in kubectl.pod("starved")["status"]["containerStatuses"]}
    assert "running" in statuses["other"]["state"]
    eventually(lambda: kubectl.pod("starved")["status"]["containerStatuses"][0]["restartCount"] == 1)
    kubectl("delete", "pod", "starved", "--grace-period=0", "--force")


def test_pods_over_their_storage_limit_are_evicted(kubectl: Kubectl) -> None:
    def limit(size: str) -> dict[str, Any]:
        return {"resources": {"limits": {"ephemeral-storage": size}}}

    mounts = {"volumeMounts": [{"name": "data", "mountPath": "/data"}]}
    fill = "dd if=/dev/zero of={} bs=1M count=8; sleep 3600"
    began_s = time.monotonic()
    kubectl.apply(
        pod("layer", fill.format("/big"), container=limit("4Mi"), more_containers=[
            {"name": "room", "image": IMAGE, "command": ["sleep", "3600"], **limit("40Mi")}]),
        pod("volume", fill.format("/data/big"), container={**limit("4Mi"), **mounts},
            volumes=[{"name": "data", "emptyDir": {}}]),
        pod("within", fill.format("/big"), container=limit("40Mi")),
    )  # fmt: skip
    wanted = {
        "layer": 'Container main exceeded its local ephemeral storage limit "4Mi". ',
        "volume": "Pod ephemeral local storage usage exceeds the total limit of containers 4Mi. ",
    }
    for name, message in wanted.items():
        status = kubectl.wait_phase(name, "Failed", timeout_s=60)["status"]
        assert (status["reason"], status["message"]) == ("Evicted", message)
        eventually(partial(kubectl.told, name, "Evicted", message.strip()))
    assert time.monotonic() - began_s < 60
    assert kubectl.phase("within") == "Running"
