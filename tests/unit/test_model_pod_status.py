"""A pod's status from the runner's report and Slurm's word, by the kubelet's rules."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.model import job_states
from slurmlet.model.downward_api import Place
from slurmlet.model.ids import JobId
from slurmlet.model.job_states import Fate, Stage
from slurmlet.model.pod_status import Facts, is_terminal, pod_status
from slurmlet.model.slurm_values import EndedJob, Job
from slurmlet.protocol.pod_report import PodReport
from tests.unit.reports import pod_report

T0, T1, NOW = "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z", "2026-01-01T00:01:00Z"

WAITING = {"state": "waiting", "reason": "ContainerCreating"}
INITIALIZING = {"state": "waiting", "reason": "PodInitializing"}
RUNNING = {"state": "running", "started_at": T0, "started": True, "ready": True, "container_id": "crun://1"}


def ended_container(code: int = 0, **more: Any) -> dict[str, Any]:
    reason = "Completed" if code == 0 else "Error"
    times = {"started_at": T0, "finished_at": T1}
    return {
        "state": "terminated",
        "exit_code": code,
        "reason": reason,
        **times,
        "container_id": "crun://1",
        **more,
    }


def crash_looping(code: int = 1) -> dict[str, Any]:
    return {
        "state": "waiting", "reason": "CrashLoopBackOff", "message": "back-off 10s", "restart_count": 2,
        "last": ended_container(code),
    }  # fmt: skip


def report(
    *containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), phase: str = "Running", **more: Any
) -> PodReport:
    told = (
        {f"c{number}": one for number, one in enumerate(containers)},
        {f"i{number}": one for number, one in enumerate(init)},
    )
    return pod_report(*told, phase=phase, **more)


def pod(
    containers: int = 1, init: tuple[str, ...] = (), restart: str = "Always", **status: Any
) -> dict[str, Any]:
    """`init`: the restart policy of each init container, "" for a plain one."""
    return {
        "metadata": {"name": "p", "namespace": "ns", "uid": "u", "generation": 1},
        "spec": {
            "restartPolicy": restart,
            "containers": [{"name": f"c{number}", "image": "app:1"} for number in range(containers)],
            "initContainers": [
                {"name": f"i{number}", "image": "app:1", **({"restartPolicy": policy} if policy else {})}
                for number, policy in enumerate(init)
            ],
        },
        "status": status,
    }


def status_of(asked: dict[str, Any] | None = None, **facts: Any) -> dict[str, Any]:
    return pod_status(Facts(pod=asked or pod(), now=NOW, job_id="7", **facts))


def fate(state: str, reason: str = "", **ended: Any) -> Fate:
    if ended:
        return job_states.fate_of_ended(
            EndedJob(JobId("7"), state, ended.get("code", 0), 0, ended.get("by"), reason)
        )
    return job_states.fate_of(Job(JobId("7"), state, reason, "", "batch", ""))


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str | None]]:
    return {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}


def state_of(status: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = status["containerStatuses"][number]["state"]
    return found


PHASES = [
    ("nothing is known yet", pod(), {}, "Pending"),
    ("queued", pod(), {"fate": fate("PENDING", "Resources")}, "Pending"),
    ("the job runs, its runner has not spoken", pod(), {"fate": fate("RUNNING")}, "Pending"),
    ("containers are being made", pod(), {"report": report(WAITING, phase="Starting")}, "Pending"),
    ("running", pod(), {"report": report(RUNNING), "fate": fate("RUNNING")}, "Running"),
    ("one of two has not begun", pod(2), {"report": report(RUNNING, WAITING)}, "Pending"),
    ("one of two crashes", pod(2), {"report": report(RUNNING, crash_looping())}, "Running"),
    ("the only one crashes", pod(), {"report": report(crash_looping())}, "Running"),
    ("one of two has ended", pod(2, restart="Never"), {"report": report(RUNNING, ended_container())}, "Running"),
    ("all ended, the runner tidies up", pod(), {"report": report(ended_container(), phase="Stopping")}, "Running"),
    ("an init container runs", pod(init=("",)), {"report": report(INITIALIZING, init=(RUNNING,))}, "Pending"),
    ("an init container crashes", pod(init=("",)), {"report": report(INITIALIZING, init=(crash_looping(),))}, "Pending"),
    ("init done, running", pod(init=("",)), {"report": report(RUNNING, init=(ended_container(),))}, "Running"),
    ("ended well", pod(restart="Never"), {"report": report(ended_container(), phase="Done")}, "Succeeded"),
    ("ended badly", pod(restart="Never"), {"report": report(ended_container(3), phase="Done")}, "Failed"),
    ("one of two ended badly", pod(2), {"report": report(ended_container(), ended_container(1), phase="Done")}, "Failed"),
    (
        "an init container failed for good", pod(init=("",), restart="Never"),
        {"report": report(INITIALIZING, init=(ended_container(1),), phase="Done")}, "Failed",
    ),
    (
        "a sidecar was stopped at the end", pod(init=("Always",), restart="Never"),
        {"report": report(ended_container(), init=(ended_container(143),), phase="Done")}, "Succeeded",
    ),
    (
        "ended well, and the job with it", pod(restart="Never"),
        {"report": report(ended_container(), phase="Done"), "fate": fate("COMPLETED")}, "Succeeded",
    ),
    (
        "the exit code of the pod is that of the job", pod(restart="Never"),
        {"report": report(ended_container(3), phase="Done"), "fate": fate("FAILED", code=3)}, "Failed",
    ),
    (
        "cancelled, although its containers took it well", pod(restart="Never"),
        {"report": report(ended_container(), phase="Done"), "fate": fate("CANCELLED", by=1002)}, "Failed",
    ),
    ("a node failed under it", pod(), {"report": report(RUNNING), "fate": fate("NODE_FAIL", by=None)}, "Failed"),
    ("the job ended without a word", pod(), {"fate": fate("COMPLETED")}, "Failed"),
    ("still cleaning up", pod(), {"report": report(RUNNING), "fate": fate("COMPLETING")}, "Running"),
    ("a state of the future", pod(), {"report": report(RUNNING), "fate": fate("HIBERNATING")}, "Running"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "facts", "phase"), [row[1:] for row in PHASES], ids=[row[0] for row in PHASES]
)
def test_the_phase(asked: dict[str, Any], facts: dict[str, Any], phase: str) -> None:
    status = status_of(asked, **facts)
    assert status["phase"] == phase
    assert is_terminal(status) is (phase in ("Succeeded", "Failed"))


def test_a_queued_pod_tells_slurms_reason() -> None:
    asked = {**pod(), "status": {"startTime": "2000-01-01T00:00:00Z"}}
    status = status_of(asked, fate=fate("PENDING", "Priority"))
    assert state_of(status) == {
        "waiting": {"reason": "Queued", "message": "Slurm job 7 is pending: Priority"}
    }
    assert state_of(status_of(asked, fate=fate("PENDING"))) == {"waiting": {"reason": "ContainerCreating"}}


def test_a_job_that_is_about_to_start_is_not_called_queued() -> None:
    assert state_of(status_of(fate=fate("PENDING", "Priority"))) == {
        "waiting": {"reason": "ContainerCreating"}
    }


def test_waiting_for_an_image_is_told_by_the_container_that_needs_it() -> None:
    asked = pod(2)
    asked["spec"]["containers"][1]["image"] = "other:1"
    status = status_of(asked, waiting={"other:1": ("ErrImagePull", "no such image")})
    assert state_of(status, 0) == {"waiting": {"reason": "ContainerCreating"}}
    assert state_of(status, 1) == {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}


def test_waiting_for_a_config_map_is_told_by_all() -> None:
    status = status_of(pod(2), waiting={"": ("CreateContainerConfigError", 'configmap "x" not found')})
    assert {state_of(status, number)["waiting"]["reason"] for number in (0, 1)} == {
        "CreateContainerConfigError"
    }


def test_containers_behind_init_containers_are_initializing() -> None:
    status = status_of(pod(init=("",)))
    assert state_of(status) == {"waiting": {"reason": "PodInitializing"}}
    assert status["initContainerStatuses"][0]["state"] == {"waiting": {"reason": "PodInitializing"}}


def test_a_running_container() -> None:
    (one,) = status_of(report=report(RUNNING), image_ids={"app:1": "app@sha256:1"})["containerStatuses"]
    assert one == {
        "name": "c0", "image": "app:1", "imageID": "app@sha256:1", "ready": True, "started": True, "restartCount": 0,
        "state": {"running": {"startedAt": T0}}, "lastState": {}, "containerID": "crun://1", "resources": {},
    }  # fmt: skip


def test_a_crashing_container() -> None:
    (one,) = status_of(report=report(crash_looping(3)))["containerStatuses"]
    assert one["state"] == {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}}
    assert (one["restartCount"], one["ready"], one["started"]) == (2, False, False)
    assert one["lastState"]["terminated"] == {
        "exitCode": 3, "reason": "Error", "startedAt": T0, "finishedAt": T1, "containerID": "crun://1",
    }  # fmt: skip


def test_a_signalled_container() -> None:
    (one,) = status_of(report=report(ended_container(137, signal=9, message="bye")))["containerStatuses"]
    ended = one["state"]["terminated"]
    assert (ended["exitCode"], ended["signal"], ended["message"]) == (137, 9, "bye")


def test_init_containers_are_ready_when_done_and_sidecars_while_they_run() -> None:
    asked = pod(init=("", "Always"))
    status = status_of(asked, report=report(RUNNING, init=(ended_container(), RUNNING)))
    assert [one["ready"] for one in status["initContainerStatuses"]] == [True, True]
    failed = status_of(asked, report=report(INITIALIZING, init=(ended_container(1), WAITING)))
    assert [one["ready"] for one in failed["initContainerStatuses"]] == [False, False]


LOST = [
    ("cancelled in the queue", pod(), None, fate("CANCELLED", by=1002), "JobCancelled", "ContainerStatusUnknown"),
    ("its node went away", pod(), report(RUNNING), fate("NODE_FAIL", by=None), "NodeFailure", "ContainerStatusUnknown"),
    ("too much memory", pod(), report(RUNNING), fate("OUT_OF_MEMORY", by=None), "OutOfMemory", "OOMKilled"),
    ("out of time between restarts", pod(), report(crash_looping()), fate("TIMEOUT", by=None),
     "JobTimeout", "ContainerStatusUnknown"),
    ("unknown to Slurm", pod(), report(RUNNING), job_states.fate_of_lost("7"), "JobLost", "ContainerStatusUnknown"),
    ("after its init container", pod(init=("",)), report(WAITING, init=(ended_container(),)), fate("NODE_FAIL", by=None),
     "NodeFailure", "ContainerStatusUnknown"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "told", "end", "reason", "container_reason"),
    [row[1:] for row in LOST],
    ids=[row[0] for row in LOST],
)
def test_a_pod_whose_job_ended_under_it(
    asked: dict[str, Any], told: dict[str, Any] | None, end: Fate, reason: str, container_reason: str
) -> None:
    status = status_of(asked, report=told, fate=end)
    assert (status["phase"], status["reason"], status["message"]) == ("Failed", reason, end.message)
    terminated = state_of(status)["terminated"]
    assert (terminated["exitCode"], terminated["reason"]) == (137, container_reason)
    assert (terminated["message"], terminated["finishedAt"]) == (end.message, NOW)
    assert status["containerStatuses"][0]["ready"] is False


def test_a_container_that_ended_before_its_job_was_lost_keeps_its_end() -> None:
    status = status_of(pod(2), report=report(ended_container(3), RUNNING), fate=fate("NODE_FAIL", by=None))
    assert state_of(status, 0)["terminated"]["exitCode"] == 3
    assert state_of(status, 1)["terminated"]["reason"] == "ContainerStatusUnknown"


def test_containers_that_never_had_their_turn_keep_waiting_in_a_lost_pod() -> None:
    """As the kubelet's TerminatePod: only what may have run is called unknown."""
    asked = pod(init=("", ""))
    status = status_of(
        asked, report=report(INITIALIZING, init=(RUNNING, WAITING)), fate=fate("NODE_FAIL", by=None)
    )
    first, second = status["initContainerStatuses"]
    assert first["state"]["terminated"]["reason"] == "ContainerStatusUnknown"
    assert "waiting" in second["state"]
    assert state_of(status) == {"waiting": {"reason": "PodInitializing"}}


def test_the_runners_problem_is_the_pods_reason() -> None:
    told = report(WAITING, phase="Done", problem={"reason": "NoRuntime", "message": "no crun"})
    status = status_of(report=told, fate=fate("FAILED", code=1))
    assert (status["phase"], status["reason"], status["message"]) == ("Failed", "NoRuntime", "no crun")


@pytest.mark.parametrize(
    ("restart", "phase", "reason"),
    [("Always", "Pending", None), ("OnFailure", "Failed", "PodRefused"), ("Never", "Failed", "PodRefused")],
)
def test_a_refused_pod_of_a_controller_waits_and_any_other_fails(
    restart: str, phase: str, reason: str | None
) -> None:
    status = status_of(pod(restart=restart), refused=("PodRefused", "spec.hostPID: no"))
    assert (status["phase"], status["reason"], status["message"]) == (phase, reason, "spec.hostPID: no")
    assert state_of(status) == {"waiting": {"reason": "PodRefused", "message": "spec.hostPID: no"}}


def test_a_pod_refused_while_its_job_ran_keeps_its_own_reason() -> None:
    refused = ("CreateContainerConfigError", "would run as root")
    status = status_of(refused=refused, fate=fate("CANCELLED", by=1002))
    assert status["phase"] == "Pending"
    assert state_of(status)["waiting"]["reason"] == "CreateContainerConfigError"


CONDITIONS = [
    ("no runner yet", pod(), {}, {
        "PodReadyToStartContainers": ("False", None), "Initialized": ("True", None),
        "Ready": ("False", "ContainersNotReady"), "ContainersReady": ("False", "ContainersNotReady")}),
    ("running", pod(), {"report": report(RUNNING)}, {
        "PodReadyToStartContainers": ("True", None), "Initialized": ("True", None),
        "Ready": ("True", None), "ContainersReady": ("True", None)}),
    ("half ready", pod(2), {"report": report(RUNNING, {**RUNNING, "ready": False})}, {
        "Ready": ("False", "ContainersNotReady"), "ContainersReady": ("False", "ContainersNotReady")}),
    ("a sidecar is not ready", pod(init=("Always",)), {"report": report(RUNNING, init=({**RUNNING, "ready": False},))}, {
        "Initialized": ("True", None), "Ready": ("False", "ContainersNotReady")}),
    ("initializing", pod(init=("",)), {"report": report(INITIALIZING, init=(RUNNING,))}, {
        "Initialized": ("False", "ContainersNotInitialized"), "Ready": ("False", "ContainersNotReady")}),
    ("a sidecar restarts", pod(init=("Always",)), {"report": report(RUNNING, init=(crash_looping(),))}, {
        "Initialized": ("True", None), "Ready": ("False", "ContainersNotReady")}),
    ("succeeded", pod(restart="Never"), {"report": report(ended_container(), phase="Done")}, {
        "PodReadyToStartContainers": ("False", None), "Initialized": ("True", "PodCompleted"),
        "Ready": ("False", "PodCompleted"), "ContainersReady": ("False", "PodCompleted")}),
    ("failed", pod(), {"report": report(RUNNING), "fate": fate("NODE_FAIL", by=None)}, {
        "PodReadyToStartContainers": ("False", None),
        "Ready": ("False", "PodFailed"), "ContainersReady": ("False", "PodFailed")}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "facts", "wanted"), [row[1:] for row in CONDITIONS], ids=[row[0] for row in CONDITIONS]
)
def test_conditions(
    asked: dict[str, Any], facts: dict[str, Any], wanted: dict[str, tuple[str, str | None]]
) -> None:
    found = conditions(status_of(asked, **facts))
    assert {type_: found[type_] for type_ in wanted} == wanted
    assert found["PodScheduled"] == ("True", None)


def test_unready_containers_are_named() -> None:
    asked = pod(2, init=("",))
    told = report(INITIALIZING, INITIALIZING, init=(RUNNING,))
    messages = {one["type"]: one["message"] for one in status_of(asked, report=told)["conditions"]}
    assert messages["Ready"] == "containers with unready status: [c0 c1]"
    assert messages["Initialized"] == "containers with incomplete status: [i0]"


def times(status: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: one["lastTransitionTime"] for one in status["conditions"]}


def test_transition_times_change_only_with_the_condition() -> None:
    asked = pod(
        conditions=[
            {"type": "Ready", "status": "False", "lastTransitionTime": T0},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": T1},
        ]
    )
    still = times(status_of(asked))
    assert (still["Ready"], still["PodScheduled"], still["ContainersReady"]) == (T0, T1, NOW)
    changed = times(status_of(asked, report=report(RUNNING)))
    assert (changed["Ready"], changed["PodScheduled"]) == (NOW, T1)


def test_the_start_time_is_set_once() -> None:
    assert status_of()["startTime"] == NOW
    assert status_of(pod(startTime=T0))["startTime"] == T0


def test_addresses_come_with_the_place() -> None:
    place = Place(host_ip="10.0.0.5")
    status = status_of(report=report(RUNNING), place=place)
    assert (status["hostIP"], status["podIP"], status["podIPs"]) == (
        "10.0.0.5",
        "10.0.0.5",
        [{"ip": "10.0.0.5"}],
    )
    assert "podIP" not in status_of(place=place)
    own = status_of(place=Place(host_ip="10.0.0.5", own_ip="10.244.0.7"), report=report(RUNNING))
    assert (own["hostIP"], own["podIP"], own["podIPs"]) == ("10.0.0.5", "10.244.0.7", [{"ip": "10.244.0.7"}])
    assert "podIP" not in status_of(place=Place(host_ip="10.0.0.5", own_ip=None), report=report(RUNNING))
    assert "hostIP" not in status_of()


def test_a_hub_that_was_started_anew_keeps_the_image_ids() -> None:
    """It has not looked at the images of running pods, and need not."""
    old = [{"name": "c0", "imageID": "app@sha256:1"}]
    (one,) = status_of(pod(containerStatuses=old), report=report(RUNNING))["containerStatuses"]
    assert one["imageID"] == "app@sha256:1"


def test_the_qos_class_of_the_api_server_stays() -> None:
    assert status_of(pod(qosClass="Burstable"))["qosClass"] == "Burstable"
    assert status_of()["qosClass"] == "BestEffort"


def test_ending_is_not_ended() -> None:
    assert fate("COMPLETING").stage is Stage.ENDING
    assert (
        status_of(report=report(ended_container(), phase="Done"), fate=fate("COMPLETING"))["phase"]
        == "Succeeded"
    )


def condition_of(status: dict[str, Any], type_: str) -> dict[str, Any]:
    found: dict[str, Any] = next((one for one in status["conditions"] if one["type"] == type_), {})
    return found


@pytest.mark.parametrize(
    ("known", "ready", "message"),
    [
        ([], "False", 'corresponding condition of pod readiness gate "example.com/a" does not exist.'),
        (
            [("example.com/a", "False")],
            "False",
            'the status of pod readiness gate "example.com/a" is not "True", but False',
        ),
        ([("example.com/a", "True")], "True", None),
    ],
)
def test_readiness_gates(known: list[tuple[str, str]], ready: str, message: str | None) -> None:
    asked = pod(conditions=[{"type": type_, "status": value} for type_, value in known])
    asked["spec"]["readinessGates"] = [{"conditionType": "example.com/a"}]
    status = status_of(asked, report=report(RUNNING))
    found = condition_of(status, "Ready")
    assert (found["status"], found["message"]) == (ready, message)
    assert condition_of(status, "ContainersReady")["status"] == "True"
    assert "example.com/a" not in [one["type"] for one in status["conditions"]], (
        "others' conditions are theirs"
    )


def test_ephemeral_containers_count_for_nothing_but_themselves() -> None:
    asked = pod()
    asked["spec"]["ephemeralContainers"] = [
        {"name": name, "image": "debug:1"} for name in ("ended", "refused", "new")
    ]
    told = report(RUNNING, ephemeral_containers={"ended": ended_container(3)})
    status = status_of(asked, report=told, refused_ephemeral={"refused": ("PodRefused", "no")})
    states = {one["name"]: one["state"] for one in status["ephemeralContainerStatuses"]}
    assert states["ended"]["terminated"]["exitCode"] == 3
    assert states["refused"]["waiting"] == {"reason": "PodRefused", "message": "no"}
    assert states["new"]["waiting"] == {"reason": "ContainerCreating"}
    assert (status["phase"], condition_of(status, "Ready")["status"]) == ("Running", "True")


def test_who_a_container_runs_as() -> None:
    user = {"uid": 1000, "gid": 3000, "groups": [3000, 4000]}
    (one,) = status_of(report=report({**RUNNING, "user": user}))["containerStatuses"]
    assert one["user"] == {"linux": {"uid": 1000, "gid": 3000, "supplementalGroups": [3000, 4000]}}


def test_a_job_that_lost_one_process_to_the_kernel_ends_as_its_runner_says() -> None:
    oom = fate("OUT_OF_MEMORY", code=0)
    assert status_of(report=report(ended_container(), phase="Done"), fate=oom)["phase"] == "Succeeded"
    lost = status_of(report=report(RUNNING), fate=oom)
    assert (lost["phase"], lost["reason"]) == ("Failed", "OutOfMemory")
    assert lost["containerStatuses"][0]["state"]["terminated"]["reason"] == "OOMKilled"


@pytest.mark.parametrize(
    ("state", "disrupted"), [("PREEMPTED", True), ("NODE_FAIL", True), ("TIMEOUT", False)]
)
def test_what_is_not_the_pods_doing_is_a_disruption(state: str, disrupted: bool) -> None:
    status = status_of(report=report(RUNNING), fate=fate(state, code=0))
    assert bool(condition_of(status, "DisruptionTarget")) is disrupted


def test_last_words_of_many_containers_are_cut() -> None:
    told = report(*(ended_container(1, message="x" * 4096) for _ in range(4)), phase="Done")
    status = status_of(pod(4, restart="Never"), report=told)
    assert [len(one["state"]["terminated"]["message"]) for one in status["containerStatuses"]] == [3072] * 4
