"""Workloads as people apply them, seen from both sides: what the API server tells and what Slurm tells."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import CLUSTER, IMAGE, Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def busybox(testbed: Any, cluster: str) -> str:
    """The image the examples name, from a file: there may be no registry to reach."""
    archive = "/opt/slurmlet/images/busybox.tar"
    testbed.run(["slurmlet", "image", "load", "--name", "busybox:1", archive])
    return "busybox:1"


@pytest.fixture(scope="module", autouse=True)
def slow(testbed: Any, cluster: str) -> Iterator[Kubectl]:
    """What takes a minute by nature, begun before the first test and looked at by the last ones."""
    here = Kubectl(testbed, f"t-{uuid.uuid4().hex[:8]}")
    here("create", "namespace", here.namespace)
    eventually(lambda: here("get", "serviceaccount", "default", check=False).ok)
    here.apply(
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "hopeless"},
            "spec": {"backoffLimit": 2, "template": {"spec": pod("x", "echo try; exit 3")["spec"]}},
        },
        pod("endless", "sleep 3600", metadata={"annotations": {"slurmlet.io/time": "1"}}),
    )
    yield here
    here("delete", "namespace", here.namespace, "--wait=false", check=False)


def jobs(kubectl: Kubectl) -> dict[str, dict[str, str]]:
    """Live Slurm jobs whose comment names a pod of this namespace, by pod name."""
    form = "%A|%j|%T|%N|%k"
    found = {}
    for line in kubectl.testbed.run(["squeue", "--noheader", "-u", "user1", "-o", form]).stdout.splitlines():
        job_id, name, state, host, comment = line.split("|", 4)
        place = f"pod={kubectl.namespace}/"
        if place in comment:
            found[comment.rpartition(place)[2]] = {
                "id": job_id, "name": name, "state": state, "host": host, "comment": comment
            }  # fmt: skip
    return found


def accounted(kubectl: Kubectl, job_id: str) -> tuple[str, str]:
    """(state, exit code) once accounting has the job's end."""

    def ended() -> Any:
        words = ["sacct", "--noheader", "-X", "-P", "-j", job_id, "-o", "State,ExitCode"]
        said = kubectl.testbed.run(words).stdout.strip()
        return bool(said) and not said.startswith(("RUNNING", "PENDING")) and tuple(said.split("|"))

    state, code = eventually(ended, 20)
    return str(state), str(code)


def job_fields(kubectl: Kubectl, job_id: str) -> dict[str, str]:
    said = kubectl.testbed.run(["scontrol", "--oneliner", "show", "job", job_id]).stdout
    return dict(word.partition("=")[::2] for word in said.split() if "=" in word)


def lines_of(kubectl: Kubectl, name: str) -> list[str]:
    return kubectl("logs", name).stdout.splitlines()


def running(kubectl: Kubectl, selector: str, count: int, timeout_s: float = 60) -> list[Any]:
    """The pods of a selector once exactly so many are there, all Running and ready."""

    def probe() -> Any:
        items = kubectl.get("pods", None, "-l", selector)["items"]
        fine = [one for one in items if is_ready(one) and not one["metadata"].get("deletionTimestamp")]
        return len(fine) == len(items) == count and items

    return list(eventually(probe, timeout_s))


def is_ready(one: Any) -> bool:
    conditions = {item["type"]: item["status"] for item in one["status"].get("conditions") or ()}
    return one["status"].get("phase") == "Running" and conditions.get("Ready") == "True"


def test_the_hello_deployment_runs_scales_rolls_and_goes(kubectl: Kubectl, busybox: str) -> None:
    kubectl("apply", "-f", "-", stdin=(EXAMPLES / "hello-deployment.yaml").read_text())
    pods = {one["metadata"]["name"]: one for one in running(kubectl, "app=hello", 3)}
    hosts = {one["metadata"]["annotations"]["slurmlet.io/host"] for one in pods.values()}
    assert len(hosts) >= 2, hosts
    live = jobs(kubectl)
    assert set(live) == set(pods)
    for name, job in live.items():
        assert job["name"].startswith(f"{name}.{kubectl.namespace}.{CLUSTER}.")
        assert job["name"].endswith(f".{pods[name]['metadata']['uid']}")
        assert f"cluster={CLUSTER} pod={kubectl.namespace}/{name}" in job["comment"]
        assert pods[name]["metadata"]["uid"] in job["comment"]
        annotations = pods[name]["metadata"]["annotations"]
        assert (annotations["slurmlet.io/job-id"], annotations["slurmlet.io/host"]) == (
            job["id"],
            job["host"],
        )
        assert job["state"] == "RUNNING"
        address = pods[name]["status"]["hostIP"]
        said = eventually(partial(lines_of, kubectl, name))
        assert said[0] == f"hello from {name} on {name}, Slurm host {address}"

    kubectl("scale", "deployment/hello", "--replicas=4")
    assert set(pods) < {one["metadata"]["name"] for one in running(kubectl, "app=hello", 4)}
    kubectl("scale", "deployment/hello", "--replicas=2")
    two = {one["metadata"]["name"] for one in running(kubectl, "app=hello", 2)}
    eventually(lambda: set(jobs(kubectl)) == two)

    kubectl("rollout", "restart", "deployment/hello")
    rolled = kubectl("rollout", "status", "deployment/hello", "--timeout=60s")
    assert "successfully rolled out" in rolled.stdout
    assert two.isdisjoint(one["metadata"]["name"] for one in running(kubectl, "app=hello", 2))

    kubectl("delete", "deployment", "hello", "--cascade=foreground", "--timeout=60s")
    assert kubectl.get("pods")["items"] == []
    assert jobs(kubectl) == {}


def test_a_job_of_five_completions(kubectl: Kubectl, busybox: str) -> None:
    kubectl("apply", "-f", "-", stdin=(EXAMPLES / "squares-job.yaml").read_text())
    kubectl("wait", "--for=condition=complete", "job/squares", "--timeout=80s")
    status = kubectl.get("job", "squares")["status"]
    assert (status["succeeded"], status.get("failed", 0)) == (5, 0)
    assert status["completedIndexes"] == "0-4"
    pods = kubectl.get("pods", None, "-l", "job-name=squares")["items"]
    assert [one["status"]["phase"] for one in pods] == ["Succeeded"] * 5
    said = kubectl("logs", "-l", "job-name=squares", "--tail=-1", "--max-log-requests=5").stdout
    assert sorted(said.splitlines()) == [f"{n} squared is {n * n}" for n in range(5)]
    ids = {one["metadata"]["annotations"]["slurmlet.io/job-id"] for one in pods}
    assert len(ids) == 5
    assert {accounted(kubectl, job_id) for job_id in ids} == {("COMPLETED", "0:0")}
    assert job_fields(kubectl, ids.pop())["TimeLimit"] == "00:05:00"


def test_exit_codes_reach_kubernetes_and_slurm(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("seven", "echo about to fail >&2; exit 7"),
        pod("fine", "true"),
        pod("shot", "sh -c 'kill -9 $$$$'; exit $?"),
        pod("nothing", ["/no/such/program"]),
    )
    for name, phase, code, state in (
        ("seven", "Failed", 7, ("FAILED", "7:0")),
        ("fine", "Succeeded", 0, ("COMPLETED", "0:0")),
        # sacct shows a code of 128 or more without its 128.
        ("shot", "Failed", 137, ("FAILED", "9:0")),
        ("nothing", "Failed", 128, ("FAILED", "0:0")),
    ):
        found = kubectl.wait_phase(name, "Failed", "Succeeded")
        ended = found["status"]["containerStatuses"][0]["state"]["terminated"]
        assert (name, found["status"]["phase"], ended["exitCode"]) == (name, phase, code)
        assert accounted(kubectl, kubectl.job_id(name)) == state
        kubectl.tells(name, "Submitted", "Pulled", "Created")
    ended = kubectl.pod("nothing")["status"]["containerStatuses"][0]["state"]["terminated"]
    assert ended["reason"] == "StartError"
    assert "no such file" in ended["message"].lower()
    shown = {line.split()[0]: line.split()[2] for line in kubectl("get", "pods").stdout.splitlines()[1:]}
    assert shown == {"seven": "Error", "fine": "Completed", "shot": "Error", "nothing": "StartError"}


def test_a_crashing_container_restarts_inside_its_job(kubectl: Kubectl) -> None:
    kubectl.apply(pod("loop", "echo again; exit 3", restartPolicy="Always"))

    def backing_off() -> Any:
        found = kubectl.pod("loop")["status"]
        state = (found.get("containerStatuses") or [{"state": {}}])[0]
        return state["state"].get("waiting", {}).get("reason") == "CrashLoopBackOff" and (
            found["phase"],
            state,
        )

    job_id = kubectl.job_id("loop")
    phase, state = eventually(backing_off)
    assert (phase, state["ready"], state["lastState"]["terminated"]["exitCode"]) == ("Running", False, 3)
    assert state["restartCount"] >= 1
    assert "restarting failed container=main pod=loop_" in state["state"]["waiting"]["message"]
    assert kubectl("get", "pod", "loop", "--no-headers").stdout.split()[2] == "CrashLoopBackOff"
    assert jobs(kubectl)["loop"]["id"] == job_id == kubectl.job_id("loop")


def test_a_stateful_set_starts_in_order(kubectl: Kubectl) -> None:
    template = {
        "metadata": {"labels": {"app": "web"}},
        "spec": pod("x", "echo I am $HOSTNAME; sleep 3600")["spec"],
    }
    template["spec"]["restartPolicy"] = "Always"
    kubectl.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "StatefulSet",
            "metadata": {"name": "web"},
            "spec": {
                "serviceName": "web",
                "replicas": 2,
                "selector": {"matchLabels": {"app": "web"}},
                "template": template,
            },
        }
    )
    first, second = sorted(running(kubectl, "app=web", 2), key=lambda one: str(one["metadata"]["name"]))
    assert (first["metadata"]["name"], second["metadata"]["name"]) == ("web-0", "web-1")
    ready_at = next(c["lastTransitionTime"] for c in first["status"]["conditions"] if c["type"] == "Ready")
    assert second["metadata"]["creationTimestamp"] >= ready_at
    assert kubectl("logs", "web-1").stdout == "I am web-1\n"
    kubectl("delete", "pod", "web-0", "--timeout=60s")
    again, _ = sorted(running(kubectl, "app=web", 2), key=lambda one: str(one["metadata"]["name"]))
    assert again["metadata"]["name"] == "web-0"
    assert again["metadata"]["uid"] != first["metadata"]["uid"]
    kubectl("scale", "statefulset/web", "--replicas=1")
    assert running(kubectl, "app=web", 1)[0]["metadata"]["name"] == "web-0"


def test_scancel_fails_the_pod_and_says_who_did_it(kubectl: Kubectl) -> None:
    kubectl.apply(pod("mine"), pod("theirs", "trap '' TERM; sleep 3600 & wait; wait"))
    for name, user in (("mine", "user1"), ("theirs", "root")):
        kubectl.wait_phase(name, "Running")
        job_id = kubectl.job_id(name)
        kubectl.testbed.run(["scancel", job_id], user=user)
        found = kubectl.wait_phase(name, "Failed")
        assert found["status"]["reason"] == "JobCancelled"
        assert found["status"]["message"] == f"Slurm job {job_id} was cancelled by {user}"
        assert found["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137
        assert not is_ready(found)


def test_a_cancelled_pod_of_a_deployment_is_replaced(kubectl: Kubectl) -> None:
    spec = {**pod("x")["spec"], "restartPolicy": "Always"}
    kubectl.apply(
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"name": "kept"},
            "spec": {
                "replicas": 1,
                "selector": {"matchLabels": {"app": "kept"}},
                "template": {"metadata": {"labels": {"app": "kept"}}, "spec": spec},
            },
        }
    )
    (first,) = running(kubectl, "app=kept", 1)
    name = first["metadata"]["name"]
    kubectl.testbed.run(["scancel", kubectl.job_id(name)])
    assert kubectl.wait_phase(name, "Failed")["status"]["reason"] == "JobCancelled"

    def replaced() -> Any:
        return [
            one for one in kubectl.get("pods")["items"] if is_ready(one) and one["metadata"]["name"] != name
        ]

    assert len(eventually(replaced)) == 1


def test_a_queued_pod_says_why_and_goes_with_its_job(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("held", metadata={"annotations": {"slurmlet.io/sbatch": "--hold"}}),
        pod("later", metadata={"annotations": {"slurmlet.io/sbatch": "--begin=now+1hour"}}),
        pod("freed", "echo at last", metadata={"annotations": {"slurmlet.io/sbatch": "-H"}}),
    )
    for name, why in (("held", "JobHeldUser"), ("later", "BeginTime")):
        job_id = kubectl.job_id(name)
        told = ("Queued", f"Slurm job {job_id} is pending: {why}")
        eventually(partial(kubectl.told, name, *told))
        eventually(lambda name=name, told=told: kubectl.waiting(name) == told)
        assert kubectl.phase(name) == "Pending"
        assert kubectl("get", "pod", name, "--no-headers").stdout.split()[2] == "Queued"
        assert jobs(kubectl)[name]["state"] == "PENDING"
    kubectl.testbed.run(["scontrol", "release", kubectl.job_id("freed")])
    kubectl.wait_phase("freed", "Succeeded")
    assert kubectl("logs", "freed").stdout == "at last\n"
    ids = [kubectl.job_id(name) for name in ("held", "later")]
    kubectl("delete", "pod", "held", "later", "--timeout=30s")
    assert jobs(kubectl) == {}
    assert {accounted(kubectl, job_id)[0].split()[0] for job_id in ids} == {"CANCELLED"}


def test_requests_and_annotations_reach_the_job(kubectl: Kubectl) -> None:
    resources = {"requests": {"cpu": "1500m", "memory": "200Mi"}}
    ours = {
        "slurmlet.io/time": "7",
        "slurmlet.io/account": "research",
        "slurmlet.io/qos": "normal",
        "slurmlet.io/sbatch": "--nice=17 --exclude 'c1,c2'",
        "slurmlet.io/tyme": "7",
    }
    hpk = {"slurm-job.hpk.io/flags": "--cpus-per-task=3 -t 9", "slurm-job.hpk.io/mpi-flags": "-np 2"}
    slinky = {
        "slurmjob.slinky.slurm.net/timelimit": "8",
        "slurmjob.slinky.slurm.net/account": "research",
        "slurmjob.slinky.slurm.net/mem-per-node": "123M",
    }
    sidecar = {"name": "beside", "image": IMAGE, "command": ["sleep", "3600"], "resources": resources}
    kubectl.apply(
        pod(
            "ours",
            metadata={"annotations": ours},
            container={"resources": resources},
            more_containers=[sidecar],
        ),
        pod("hpk", metadata={"annotations": hpk}),
        pod("slinky", metadata={"annotations": slinky}, nodeSelector={"slurmlet.io/partition": "short"}),
    )
    expected = {
        "ours": {
            "CPUs/Task": "3", "NumCPUs": "3", "MinMemoryNode": "400M", "TimeLimit": "00:07:00", "Account": "research",
            "QOS": "normal", "Nice": "17", "ExcNodeList": "c[1-2]", "Requeue": "0", "Partition": "batch",
        },
        "hpk": {"CPUs/Task": "3", "TimeLimit": "00:09:00", "NumTasks": "1"},
        "slinky": {
            "TimeLimit": "00:08:00", "Account": "research", "MinMemoryNode": "123M", "Partition": "short",
            "NumCPUs": "1",
        },
    }  # fmt: skip
    for name, wanted in expected.items():
        fields = job_fields(kubectl, kubectl.job_id(name))
        assert (name, {key: fields.get(key) for key in wanted}) == (name, wanted)
    assert kubectl.wait_phase("ours", "Running")["metadata"]["annotations"]["slurmlet.io/host"] == "c3"
    assert kubectl.pod("slinky")["spec"]["nodeName"] == "short"
    for name in ("ours", "hpk"):
        kubectl.tells(name, "AnnotationWithoutEffect")
    notes = {
        name: [m for reason, m in kubectl.events(name) if reason == "AnnotationWithoutEffect"]
        for name in expected
    }
    assert notes["slinky"] == []
    assert len(notes["ours"]) == 1
    assert "slurmlet.io/tyme" in notes["ours"][0]
    assert len(notes["hpk"]) == 1
    assert "slurm-job.hpk.io/mpi-flags" in notes["hpk"][0]


def test_what_slurm_refuses_is_told_in_its_words(kubectl: Kubectl) -> None:
    def annotated(name: str, **annotations: str) -> Any:
        return pod(
            name, metadata={"annotations": {f"slurmlet.io/{key}": text for key, text in annotations.items()}}
        )

    kubectl.apply(
        annotated("feature", constraint="no-such-feature"),
        annotated("wrap", sbatch="--wrap=id"),
        annotated("quotes", sbatch="--comment='x"),
        pod("huge", container={"resources": {"requests": {"cpu": "500"}}}),
    )
    for name, reason, words in (
        ("feature", "SlurmRefused", "Invalid feature specification"),
        ("wrap", "PodRefused", "sbatch option '--wrap' cannot be used here"),
        ("quotes", "PodRefused", "annotation slurmlet.io/sbatch: No closing quotation"),
        ("huge", "SlurmRefused", "CPU count"),
    ):
        found = kubectl.wait_phase(name, "Failed")
        assert (name, found["status"]["reason"]) == (name, reason)
        assert words in found["status"]["message"]
        eventually(partial(kubectl.told, name, reason, words))
        assert [why for why, _ in kubectl.events(name)].count(reason) == 1
    assert jobs(kubectl) == {}


def test_backoff_limit_retries_twice_then_gives_up(slow: Kubectl) -> None:
    slow("wait", "--for=condition=failed", "job/hopeless", "--timeout=80s")
    status = slow.get("job", "hopeless")["status"]
    assert status["failed"] == 3
    assert [c["reason"] for c in status["conditions"] if c["type"] == "Failed"] == ["BackoffLimitExceeded"]
    pods = slow.get("pods", None, "-l", "job-name=hopeless")["items"]
    assert [one["status"]["phase"] for one in pods] == ["Failed"] * 3
    codes = [one["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] for one in pods]
    assert codes == [3, 3, 3]
    assert len({one["metadata"]["annotations"]["slurmlet.io/job-id"] for one in pods}) == 3


def test_a_pod_over_its_time_limit_fails_with_slurms_reason(slow: Kubectl) -> None:
    # Slurm enforces whole minutes, and looks every half minute.
    found = slow.wait_phase("endless", "Failed", timeout_s=120)
    assert found["status"]["reason"] == "JobTimeout"
    assert "reached its time limit" in found["status"]["message"]
    assert accounted(slow, slow.job_id("endless"))[0] == "TIMEOUT"
