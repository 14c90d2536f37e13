"""What dies may die: hub, runner, API server, etcd, slurmctld. Afterwards every pod's state is right and has one job.

Each test leaves the cluster healthy. The crashes at the worst moment have a cluster of their own, whose sbatch is a
wrapper that kills the hub.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import pytest

from slurmlet.testbed.faults import inject
from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import Kubectl, eventually, pod
from tests.e2e.inspecting import Cluster, exists, processes

pytestmark = pytest.mark.e2e

UP_S = 180
COUNT = "i=0; while true; do i=$((i+1)); echo n $i; sleep 0.1; done"
HELD = {"annotations": {"slurmlet.io/sbatch": "--hold"}}


@pytest.fixture
def here(testbed: Testbed, cluster: str) -> Cluster:
    return Cluster(testbed, cluster)


def assert_unbroken(log: str) -> int:
    """A counter's log has every number once, in order; returns the last."""
    numbers = [int(line.split()[1]) for line in log.splitlines()]
    assert numbers == list(range(1, len(numbers) + 1))
    return len(numbers)


def gone(kubectl: Kubectl, name: str) -> bool:
    return not kubectl("get", "pod", name, check=False).ok


def test_hub_killed_amid_everything(kubectl: Kubectl, here: Cluster, testbed: Testbed) -> None:
    """Pods running, starting, finishing, being deleted and queued; the hub away for some seconds."""
    signs = testbed.run(["mktemp", "-d", "/home/user1/signs-XXXXXX"]).stdout.strip()
    volume = {"name": "signs", "hostPath": {"path": signs, "type": "Directory"}}
    mount = {"volumeMounts": [{"name": "signs", "mountPath": "/signs"}]}
    ending = "while [ ! -e /signs/end ]; do sleep 0.1; done; exit 7"
    kubectl.apply(
        pod("running", COUNT),
        pod("finishing", ending, container=mount, volumes=[volume]),
        pod("deleted"),
        pod("queued", "echo released", metadata=HELD),
        pod("dropped", metadata=HELD),
    )
    for name in ("running", "finishing", "deleted"):
        kubectl.wait_phase(name, "Running")
    for name in ("queued", "dropped"):
        kubectl.job_id(name)
    before = kubectl.pod("running")["status"]["containerStatuses"][0]
    uids = {name: kubectl.pod(name)["metadata"]["uid"] for name in ("finishing", "dropped", "deleted")}
    # A stopped supervisor starts no new hub: the time without one is ours to choose.
    here.signal(here.supervisor, "STOP")
    try:
        kubectl.apply(pod("starting"), pod("starting-too"))
        here.signal(here.pid("hub"), "KILL")
        testbed.run(["touch", f"{signs}/end"])
        kubectl.apply(pod("submitted-late"))
        kubectl("delete", "pod", "deleted", "dropped", "--wait=false")
        eventually(lambda: here.jobs()[uids["finishing"]][0].over, 20)
        assert kubectl.phase("finishing") == "Running", "nobody was there to tell"
    finally:
        here.signal(here.supervisor, "CONT")
        testbed.run(["rm", "-rf", signs])
    done = kubectl.wait_phase("finishing", "Failed", "Succeeded")
    assert done["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 7
    for name in ("deleted", "dropped"):
        eventually(lambda name=name: gone(kubectl, name), 30)  # type: ignore[misc]
        eventually(lambda name=name: all(job.over for job in here.jobs()[uids[name]]), 10)  # type: ignore[misc]
    for name in ("starting", "starting-too", "submitted-late", "running"):
        kubectl.wait_phase(name, "Running")
    after = kubectl.pod("running")["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)
    assert assert_unbroken(kubectl("logs", "running").stdout) > 30
    assert kubectl("exec", "starting", "--", "echo", "back").stdout == "back\n"
    testbed.run(["scontrol", "release", kubectl.job_id("queued")])
    kubectl.wait_phase("queued", "Succeeded")
    assert kubectl("logs", "queued").stdout == "released\n"
    here.check_jobs()


def test_a_stranger_takes_the_hubs_ports(kubectl: Kubectl, here: Cluster) -> None:
    """While the hub is away another user binds its ports: the new hub takes others, runners and API server follow."""
    kubectl.apply(pod("waiting"))
    kubectl.wait_phase("waiting", "Running")
    ports = here.read("hub.json")
    listen = (
        "import socket, sys, time\n"
        "held = [socket.create_server(('0.0.0.0', int(port))) for port in sys.argv[1:]]\n"
        "print('held', flush=True)\ntime.sleep(60)"
    )
    here.signal(here.supervisor, "STOP")
    try:
        here.signal(here.pid("hub"), "KILL")
        argv = ["python3", "-c", listen, str(ports["runner_port"]), str(ports["kubelet_port"])]
        squatter = here.testbed.popen(argv, user="user2")
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == b"held\n"
    finally:
        here.signal(here.supervisor, "CONT")
    try:
        eventually(lambda: here.read("hub.json")["pid"] != ports["pid"], 30)
        now = here.read("hub.json")
        assert now["runner_port"] != ports["runner_port"]
        assert now["kubelet_port"] != ports["kubelet_port"]
        said = eventually(lambda: kubectl("exec", "waiting", "--", "echo", "found", check=False).stdout, 30)
        assert said == "found\n"
    finally:
        here.testbed.stop(squatter)
    here.check_jobs()


def test_api_server_and_etcd_killed(kubectl: Kubectl, here: Cluster) -> None:
    kubectl.apply(pod("steady", COUNT), pod("ending", "sleep 8; exit 3"))
    before = kubectl.wait_phase("steady", "Running")["status"]["containerStatuses"][0]
    kubectl.wait_phase("ending", "Running")
    old = {name: here.pid(name) for name in ("kube-apiserver", "etcd")}
    for process in old.values():
        here.signal(process, "KILL")
    eventually(lambda: all(here.pid(name) != number for name, number in old.items()), 30)
    eventually(lambda: kubectl("get", "--raw=/readyz", check=False).ok, 60)
    ended = kubectl.wait_phase("ending", "Failed", timeout_s=30)
    assert ended["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    after = kubectl.pod("steady")["status"]["containerStatuses"][0]
    assert (after["containerID"], after["restartCount"]) == (before["containerID"], 0)
    assert_unbroken(eventually(lambda: kubectl("logs", "steady", check=False).stdout, 30))
    assert (
        eventually(lambda: kubectl("exec", "steady", "--", "echo", "yes", check=False).stdout, 30) == "yes\n"
    )
    kubectl.apply(pod("next", "true"))
    kubectl.wait_phase("next", "Succeeded")
    here.check_jobs()


def test_slurmctld_away_while_a_pod_is_created(kubectl: Kubectl, here: Cluster) -> None:
    kubectl.apply(pod("running", COUNT))
    kubectl.wait_phase("running", "Running")
    inject(here.testbed, "stop-slurmctld")
    try:
        kubectl.apply(pod("patient", "echo here"))
        time.sleep(5)
        assert kubectl.phase("running") == "Running"
        assert kubectl.phase("patient") == "Pending"
    finally:
        inject(here.testbed, "start-slurmctld")
    kubectl.wait_phase("patient", "Succeeded")
    assert kubectl.phase("running") == "Running"
    here.check_jobs()


@pytest.fixture(scope="module")
def abandoned() -> list[tuple[str, str, float]]:
    """(host, scratch, when) of pods whose runner was killed."""
    return []


def test_runner_killed(kubectl: Kubectl, here: Cluster, abandoned: list[tuple[str, str, float]]) -> None:
    """kill -9 of the runner's outer process: the kernel takes the rest with it, Slurm tells how the job ended."""
    number = str(uuid.uuid4().int)[:12]
    kubectl.apply(pod("orphan", ["sleep", number]))
    seen = kubectl.wait_phase("orphan", "Running")
    uid, host = seen["metadata"]["uid"], seen["metadata"]["annotations"]["slurmlet.io/host"]
    runners = processes(here.testbed, host, f"/pods/{uid}")
    (outer,) = [one for one in runners if one.parent not in {other.pid for other in runners}]
    assert processes(here.testbed, host, number), "the container runs"
    here.testbed.run(["kill", "-KILL", outer.pid], host=host)
    eventually(lambda: not processes(here.testbed, host, number, uid), 10)
    failed = kubectl.wait_phase("orphan", "Failed", timeout_s=30)["status"]
    assert failed["reason"] == "JobFailed"
    assert "signal 9" in failed["message"]
    assert failed["containerStatuses"][0]["state"]["terminated"]["reason"] == "ContainerStatusUnknown"
    assert kubectl("logs", "orphan").ok
    left = f"/tmp/slurmlet-{outer.uid}/pods/{uid}"
    assert exists(here.testbed, host, left)
    abandoned.append((host, left, time.monotonic()))
    here.check_jobs()


def test_force_delete_leaves_no_job(kubectl: Kubectl, here: Cluster) -> None:
    number = str(uuid.uuid4().int)[:12]
    kubectl.apply(
        pod("running", ["sleep", number], terminationGracePeriodSeconds=600),
        pod("queued", metadata=HELD),
        pod("fresh"),
    )
    seen = kubectl.wait_phase("running", "Running")
    kubectl.job_id("queued")
    host = seen["metadata"]["annotations"]["slurmlet.io/host"]
    kubectl("delete", "pods", "--all", "--grace-period=0", "--force")
    uids = {seen["metadata"]["uid"]}
    eventually(lambda: not (uids & set(here.live_jobs())), 20)
    eventually(lambda: not processes(here.testbed, host, number), 10)
    here.check_jobs()
    listed = here.testbed.run(["ls", f"{here.root}/pods"]).stdout
    assert not uids & set(listed.split()), "the pod's directory goes with it"


def test_down_then_up(kubectl: Kubectl, here: Cluster) -> None:
    deployment = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {
            "replicas": 2, "selector": {"matchLabels": {"app": "web"}},
            "template": {
                "metadata": {"labels": {"app": "web"}},
                "spec": {**pod("web")["spec"], "restartPolicy": "Always"},
            },
        },
    }  # fmt: skip
    kubectl.apply(deployment, pod("single"))
    kubectl("rollout", "status", "deployment/web", "--timeout=60s")
    kubectl.wait_phase("single", "Running")
    # The id is read now: `down` may forget it.
    assert here.live_jobs()
    here.testbed.run(["slurmlet", "down", "-c", here.name], timeout_s=UP_S)
    assert not here.live_jobs()
    here.testbed.run(["slurmlet", "up", "-c", here.name], timeout_s=UP_S)
    eventually(lambda: kubectl.get("deployment", "web")["status"].get("readyReplicas") == 2, 60)
    failed = kubectl.wait_phase("single", "Failed", timeout_s=30)["status"]
    assert failed["reason"] == "JobCancelled"
    assert "user1" in failed["message"]
    here.check_jobs()


def test_hub_killed_again_and_again_while_pods_are_created(kubectl: Kubectl, here: Cluster) -> None:
    names = [f"burst-{number}" for number in range(20)]
    kubectl.apply(*(pod(name, f"sleep 1; echo {name}") for name in names))
    for _ in range(4):
        # Long enough for some of it to be done, short enough to hit the rest; the supervisor's pause grows meanwhile.
        old = here.read("run/components.json")["hub"]["restarts"]
        here.signal(here.pid("hub"), "KILL")
        eventually(lambda old=old: here.read("run/components.json")["hub"]["restarts"] > old, 30, 0.05)  # type: ignore[misc]
        time.sleep(1.2)
    eventually(
        lambda: {item["status"].get("phase") for item in kubectl.get("pods")["items"]} == {"Succeeded"}, 120
    )
    for name in names[::7]:
        assert kubectl("logs", name).stdout == f"{name}\n"
    here.check_jobs()


WRAPPER = """\
#!/bin/sh
# Kills its parent, the hub, before or after the real sbatch; each order is given once.
if [ -e "$HOME/crash/before" ]; then
  rm "$HOME/crash/before"
  kill -9 $PPID
  sleep 4
fi
said=$(/usr/bin/sbatch "$@")
code=$?
if [ -e "$HOME/crash/after" ]; then
  rm "$HOME/crash/after"
  kill -9 $PPID
fi
printf '%s\\n' "$said"
exit $code
"""


@pytest.fixture(scope="module")
def crashing(testbed: Testbed) -> Iterator[Kubectl]:
    """A cluster whose sbatch kills the hub when a file says so, started where few files may be open."""
    testbed.run(["mkdir", "-p", "/home/user1/crash/bin"])
    testbed.run(["tee", "/home/user1/crash/bin/sbatch"], stdin=WRAPPER)
    testbed.run(["chmod", "700", "/home/user1/crash/bin/sbatch"])
    path = f"/home/user1/crash/bin:{testbed.environment('user1')['PATH']}"
    few = ["sh", "-c", 'ulimit -Sn 300; exec "$@"', "sh"]
    testbed.run([*few, "env", f"PATH={path}", "slurmlet", "up", "-c", "crash"], timeout_s=UP_S)
    yield Kubectl(testbed, "default", cluster="crash")
    testbed.run(["slurmlet", "down", "-c", "crash", "--purge", "--yes"], timeout_s=UP_S, check=False)
    testbed.run(["rm", "-rf", "/home/user1/crash"])


def test_crash_around_sbatch(crashing: Kubectl) -> None:
    """The hub dies with the job submitted and nothing written down, and with an sbatch still under way."""
    here = Cluster(crashing.testbed, "crash")
    for moment in ("after", "before"):
        number = here.pid("hub")
        crashing.testbed.run(["touch", f"/home/user1/crash/{moment}"])
        queued = {"annotations": {"slurmlet.io/launch": "batch"}}
        crashing.apply(pod(f"crash-{moment}", "echo once", metadata=queued))
        eventually(lambda number=number: here.pid("hub") != number, 30)  # type: ignore[misc]
        crashing.wait_phase(f"crash-{moment}", "Succeeded", timeout_s=40)
        assert crashing("logs", f"crash-{moment}").stdout == "once\n"
    # An sbatch that outlived its hub would have submitted by now.
    time.sleep(3)
    here.check_jobs()
    assert len(here.jobs()) == 2


def test_strangers_who_only_connect(crashing: Kubectl) -> None:
    """Another user holds more connections open than the hub could have files by default: pods come and go as ever."""
    here = Cluster(crashing.testbed, "crash")
    ports = here.read("hub.json")
    connect = (
        "import socket, sys, time\n"
        "held = [socket.create_connection(('127.0.0.1', int(port))) for port in sys.argv[1:] for _ in range(250)]\n"
        "print('held', flush=True)\ntime.sleep(60)"
    )
    argv = ["python3", "-c", connect, str(ports["runner_port"]), str(ports["kubelet_port"])]
    crowd = here.testbed.popen(argv, user="user2")
    try:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == b"held\n"
        files = ["ls", f"/proc/{ports['pid']}/fd"]
        eventually(lambda: len(here.testbed.run(files).stdout.split()) > 500, 10)
        crashing.apply(pod("undisturbed", "echo here; sleep 60"))
        crashing.wait_phase("undisturbed", "Running")
        assert crashing("exec", "undisturbed", "--", "echo", "yes").stdout == "yes\n"
    finally:
        here.testbed.stop(crowd)
    here.check_jobs()


def test_a_later_pod_removes_what_a_killed_runner_left(
    kubectl: Kubectl, here: Cluster, abandoned: list[tuple[str, str, float]]
) -> None:
    """Comes last: a directory younger than a minute might be one that is just being made, and is left alone."""
    if not abandoned:
        pytest.skip("test_runner_killed did not run before")
    ((host, left, when_s),) = abandoned
    time.sleep(max(0.0, when_s + 62 - time.monotonic()))
    here_too = {"annotations": {"slurmlet.io/sbatch": f"--nodelist={host}"}}
    kubectl.apply(pod("cleaner", "sleep 1", metadata=here_too))
    kubectl.wait_phase("cleaner", "Succeeded")
    eventually(lambda: not exists(here.testbed, host, left), 10)
