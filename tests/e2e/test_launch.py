"""Pods that start at once: the same job in every respect but the wait. A job of its own, exact ends, nothing left over."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import Kubectl, eventually, pod
from tests.e2e.inspecting import Cluster, processes

pytestmark = pytest.mark.e2e

UP_S = 180
AT_ONCE = "started immediately"
SRUN = "srun --immediate"


@pytest.fixture
def here(testbed: Testbed, cluster: str) -> Cluster:
    return Cluster(testbed, cluster)


def launched(name: str, command: str | list[str], way: str = "immediate", **more: Any) -> dict[str, Any]:
    annotations = {"slurmlet.io/launch": way, **more.pop("annotations", {})}
    return pod(name, command, metadata={"annotations": annotations}, **more)


def accounted(testbed: Testbed, job_id: str) -> str:
    """State and exit code of the job itself, once accounting has its end: "FAILED|7:0"."""
    argv = ["sacct", "-n", "-P", "-X", "-j", job_id, "-o", "State,ExitCode"]

    def told() -> str:
        said = testbed.run(argv).stdout.strip()
        return "" if said.startswith(("RUNNING", "PENDING")) else said

    return str(eventually(told, 30))


def sruns(testbed: Testbed, uid: str) -> list[str]:
    return [one.line for one in processes(testbed, "login", f"/pods/{uid}") if SRUN in one.line]


def test_exit_codes_are_the_jobs_and_no_process_stays(kubectl: Kubectl, here: Cluster) -> None:
    """Three ends, each as accounting has it; while a pod runs, the login host has nothing of it."""
    kubectl.apply(launched("good", "exit 0"), launched("bad", "exit 7"), launched("going", "sleep 3600"))
    running = kubectl.wait_phase("going", "Running")
    kubectl.tells("going", "Submitted", words=AT_ONCE)
    eventually(lambda: not sruns(here.testbed, running["metadata"]["uid"]), 10)
    kubectl.wait_phase("good", "Succeeded")
    kubectl.wait_phase("bad", "Failed")
    assert accounted(here.testbed, kubectl.job_id("good")) == "COMPLETED|0:0"
    assert accounted(here.testbed, kubectl.job_id("bad")) == "FAILED|7:0"
    shown = here.testbed.run(["scontrol", "-o", "show", "job", kubectl.job_id("going")]).stdout
    assert "BatchFlag=0" in shown
    assert f"JobName=going.{kubectl.namespace}.{here.name}" in shown
    kubectl("delete", "pod", "going")
    assert accounted(here.testbed, kubectl.job_id("good")) == "COMPLETED|0:0"
    here.check_jobs(at_once=True)


def test_batch_is_batch(kubectl: Kubectl, here: Cluster) -> None:
    kubectl.apply(launched("patient", "echo here", way="batch"))
    kubectl.wait_phase("patient", "Succeeded")
    kubectl.tells("patient", "Submitted")
    assert not kubectl.told("patient", "Submitted", AT_ONCE)
    shown = here.testbed.run(["scontrol", "-o", "show", "job", kubectl.job_id("patient")]).stdout
    assert "BatchFlag=1" in shown


def test_an_unknown_way_is_refused(kubectl: Kubectl) -> None:
    kubectl.apply(launched("odd", "true", way="sideways"))
    eventually(lambda: any("slurmlet.io/launch" in text for _, text in kubectl.events("odd")), 30)
    assert "job-id" not in json.dumps(kubectl.pod("odd")["metadata"])


def test_scancel_gives_the_pod_its_grace(kubectl: Kubectl, here: Cluster) -> None:
    kubectl.apply(
        launched("killed", "trap 'echo told; exit 0' TERM; echo up; while true; do sleep 0.1; done")
    )
    kubectl.wait_phase("killed", "Running")
    eventually(lambda: kubectl("logs", "killed").stdout == "up\n", 20)
    job_id = kubectl.job_id("killed")
    here.testbed.run(["scancel", job_id])
    status = kubectl.wait_phase("killed", "Failed", timeout_s=40)["status"]
    assert status["reason"] == "JobCancelled"
    assert "user1" in status["message"]
    assert "told" in kubectl("logs", "killed").stdout.split()
    assert accounted(here.testbed, job_id).startswith("CANCELLED by ")


def test_the_end_without_a_hub(kubectl: Kubectl, here: Cluster) -> None:
    """The node itself tells Slurm: no helper on the login host is needed."""
    signs = here.testbed.run(["mktemp", "-d", "/home/user1/signs-XXXXXX"]).stdout.strip()
    volume = {"name": "signs", "hostPath": {"path": signs, "type": "Directory"}}
    mount = {"volumeMounts": [{"name": "signs", "mountPath": "/signs"}]}
    ending = "while [ ! -e /signs/end ]; do sleep 0.1; done; exit 7"
    kubectl.apply(launched("late", ending, container=mount, volumes=[volume]))
    kubectl.wait_phase("late", "Running")
    job_id = kubectl.job_id("late")
    here.signal(here.supervisor, "STOP")
    try:
        here.signal(here.pid("hub"), "KILL")
        here.testbed.run(["touch", f"{signs}/end"])
        assert accounted(here.testbed, job_id) == "FAILED|7:0"
    finally:
        here.signal(here.supervisor, "CONT")
        here.testbed.run(["rm", "-rf", signs])
    done = kubectl.wait_phase("late", "Failed")
    assert done["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7


def test_the_step_is_killed(kubectl: Kubectl, here: Cluster) -> None:
    """Nobody on the node is left to tell Slurm: the hub does, with the signal."""
    number = str(uuid.uuid4().int)[:12]
    kubectl.apply(launched("orphan", ["sleep", number]))
    seen = kubectl.wait_phase("orphan", "Running")
    uid, host = seen["metadata"]["uid"], seen["metadata"]["annotations"]["slurmlet.io/host"]
    runners = processes(here.testbed, host, f"/pods/{uid}")
    (outer,) = [one for one in runners if one.parent not in {other.pid for other in runners}]
    here.testbed.run(["kill", "-KILL", outer.pid], host=host)
    eventually(lambda: not processes(here.testbed, host, number, uid), 10)
    failed = kubectl.wait_phase("orphan", "Failed", timeout_s=40)["status"]
    assert (failed["reason"], "signal 9" in failed["message"]) == ("JobFailed", True)
    assert accounted(here.testbed, kubectl.job_id("orphan")) == "FAILED|0:9"


def test_where_nothing_is_free_the_pod_is_queued(kubectl: Kubectl, here: Cluster) -> None:
    on_one = {"slurmlet.io/sbatch": "--nodelist=c1"}
    shown = here.testbed.run(["scontrol", "-o", "show", "node", "c1"]).stdout
    cpus = next(word for word in shown.split() if word.startswith("CPUTot=")).partition("=")[2]
    whole = {"resources": {"requests": {"cpu": cpus}}}
    kubectl.apply(launched("holding", "sleep 3600", annotations=on_one))
    kubectl.wait_phase("holding", "Running")
    kubectl.apply(launched("waiting", "true", annotations=on_one, container=whole))
    job_id = kubectl.job_id("waiting")
    kubectl.tells("waiting", "Submitted", words="not started immediately: ")
    state = here.testbed.run(["squeue", "-h", "-j", job_id, "-o", "%T"]).stdout.strip()
    assert state == "PENDING"
    kubectl("delete", "pod", "waiting", "holding")
    eventually(lambda: job_id not in json.dumps([str(jobs) for jobs in here.live_jobs().values()]), 20)


WRAPPER = """\
#!/bin/sh
# Kills its parent, the hub, around the real srun; each order is given once.
order() { [ -e "$HOME/srun-crash/$1" ] && rm "$HOME/srun-crash/$1"; }
if order alone; then
  # An allocation, and nobody who gives it a step.
  for word in "$@"; do case "$word" in --comment=*) comment=$word;; esac; done
  /usr/bin/salloc --quiet --no-shell --immediate --ntasks=1 --mem=32M "$comment"
  kill -9 $PPID
  exit 1
fi
if order before; then kill -9 $PPID; fi
exec /usr/bin/srun "$@"
"""


@pytest.fixture(scope="module")
def crashing(testbed: Testbed) -> Iterator[Kubectl]:
    """A cluster whose srun kills the hub when a file says so."""
    testbed.run(["mkdir", "-p", "/home/user1/srun-crash/bin"])
    testbed.run(["tee", "/home/user1/srun-crash/bin/srun"], stdin=WRAPPER)
    testbed.run(["chmod", "700", "/home/user1/srun-crash/bin/srun"])
    path = f"/home/user1/srun-crash/bin:{testbed.environment('user1')['PATH']}"
    testbed.run(["env", f"PATH={path}", "slurmlet", "up", "-c", "srun-crash"], timeout_s=UP_S)
    yield Kubectl(testbed, "default", cluster="srun-crash")
    testbed.run(["slurmlet", "down", "-c", "srun-crash", "--purge", "--yes"], timeout_s=UP_S, check=False)
    testbed.run(["rm", "-rf", "/home/user1/srun-crash"])


@pytest.mark.parametrize("moment", ["before", "alone"])
def test_the_hub_dies_between_the_steps(crashing: Kubectl, moment: str) -> None:
    """Before srun asks, with srun left to go on alone; and with resources granted that no step will ever use."""
    testbed, name = crashing.testbed, f"crash-{moment}"
    here = Cluster(testbed, "srun-crash")
    crashing.apply(launched(f"warm-{moment}", "true"))
    crashing.wait_phase(f"warm-{moment}", "Succeeded")
    number = here.pid("hub")
    testbed.run(["touch", f"/home/user1/srun-crash/{moment}"])
    crashing.apply(launched(name, "echo once; sleep 2"))
    eventually(lambda: here.pid("hub") != number, 30)
    crashing.wait_phase(name, "Succeeded", timeout_s=60)
    assert crashing("logs", name).stdout == "once\n"
    uid = crashing.pod(name)["metadata"]["uid"]
    eventually(lambda: not sruns(testbed, uid), 20)
    eventually(lambda: not here.live_jobs(), 20)
    # The supervisor ends what a dead hub started: srun may get far enough, or the pod's second job does.
    states = [job.state for job in here.jobs()[uid]]
    assert states.count("COMPLETED") == 1
    assert len(states) <= 2
