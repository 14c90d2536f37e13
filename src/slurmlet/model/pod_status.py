"""A pod's status from what its runner reports and what Slurm says. Pure: same facts, same status.

The rules for phase and conditions are the kubelet's (getPhase, the status manager); only the reasons a kubelet cannot
know (queued, cancelled, timed out) are Slurm's, through `jobstates.Fate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurmlet.base.clock import parse_rfc3339
from slurmlet.model import pod_resize
from slurmlet.model.container_reports import container_state, containers_of_kind, terminated_state
from slurmlet.model.downward_api import Place
from slurmlet.model.job_states import Fate, Stage
from slurmlet.model.pod_resources import qos_class
from slurmlet.model.volume_plan import mount_status
from slurmlet.protocol.pod_report import ContainerReport, PodReport

Obj = Mapping[str, Any]
# Every job is pending for a moment, with Slurm's first guess of a reason. Until then the kubelet's own words say it, which
# tools may wait for; that also spares a write for each pod that starts at once.
_AT_ONCE_S = 3.0
_MAX_MESSAGES_BYTES = 12 << 10
# Ends that are not the pod's own doing: a Job with a podFailurePolicy need not count them.
_DISRUPTIONS = ("Preempted", "NodeFailure")


@dataclass(frozen=True)
class Facts:
    """All that is known of a pod's run."""

    pod: Obj
    now: str  # RFC 3339
    report: PodReport | None = None
    fate: Fate | None = None
    job_id: str = ""
    # Why nothing runs yet, when it is the hub's doing: per image reference or for every container ("").
    waiting: Mapping[str, tuple[str, str]] | None = None
    refused: tuple[str, str] | None = None
    failed: tuple[str, str] | None = None  # the hub gave the pod up, whatever else is known
    place: Place | None = None
    image_ids: Mapping[str, str] | None = None
    refused_ephemeral: Mapping[str, tuple[str, str]] | None = None  # by the container's name


def pod_status(facts: Facts) -> dict[str, Any]:
    containers = _statuses(facts, "containers")
    init = _statuses(facts, "initContainers")
    ephemeral = _statuses(facts, "ephemeralContainers")
    phase, reason, message = _phase(facts, containers, init)
    old = facts.pod.get("status") or {}
    status: dict[str, Any] = {
        "phase": phase,
        "reason": reason or None,
        "message": message or None,
        "qosClass": old.get("qosClass") or qos_class(facts.pod["spec"]),
        "startTime": old.get("startTime") or facts.now,
        "containerStatuses": containers,
        "conditions": _conditions(facts, phase, containers, init),
        "observedGeneration": facts.pod["metadata"].get("generation"),
    }
    if init:
        status["initContainerStatuses"] = init
    if ephemeral:
        status["ephemeralContainerStatuses"] = ephemeral
    if facts.job_id:
        status.update(pod_resize.pod_amounts(facts.pod))
    _trim_messages(containers + init + ephemeral)
    if facts.place is not None and facts.place.host_ip:
        status["hostIP"] = facts.place.host_ip
        status["hostIPs"] = [{"ip": facts.place.host_ip}]
        if facts.report is not None and facts.place.pod_ip:
            status["podIP"] = facts.place.pod_ip
            status["podIPs"] = [{"ip": facts.place.pod_ip}]
    return status


def is_terminal(status: Obj) -> bool:
    return status.get("phase") in ("Succeeded", "Failed")


def _statuses(facts: Facts, kind: str) -> list[dict[str, Any]]:
    reports = containers_of_kind(facts.report, kind)
    return [
        _container_status(facts, container, reports.get(container["name"]), kind)
        for container in facts.pod["spec"].get(kind) or ()
    ]


def _trim_messages(statuses: list[dict[str, Any]]) -> None:
    """Last words of all containers together stay within the kubelet's bounds."""
    most = _MAX_MESSAGES_BYTES // max(1, len(statuses))
    for status in statuses:
        for state in (status["state"], status["lastState"]):
            ended = state.get("terminated") or {}
            if len(ended.get("message", "").encode()) > most:
                ended["message"] = ended["message"].encode()[:most].decode(errors="ignore")


def _container_status(
    facts: Facts, container: Obj, report: ContainerReport | None, kind: str
) -> dict[str, Any]:
    is_init = kind == "initContainers"
    # Nothing waits for an ephemeral container, so one that never ran is not missing at the end either.
    may_be_missing = kind != "containers"
    image = (report["image"] if report is not None else "") or container[
        "image"
    ]  # what runs, not what is to run
    status: dict[str, Any] = {
        "name": container["name"],
        "image": image,
        "imageID": (facts.image_ids or {}).get(image) or _known_image_id(facts, container, image),
        "ready": False,
        "restartCount": 0,
        "started": False,
        "state": {"waiting": _waiting(facts, container)},
        "lastState": {},
    }
    if container.get("volumeMounts"):
        status["volumeMounts"] = [mount_status(mount) for mount in container["volumeMounts"]]
    if facts.job_id and kind != "ephemeralContainers":
        status.update(pod_resize.container_amounts(facts.pod, container))
    if _is_lost(facts, report, may_be_missing):
        status["state"] = _lost_state(facts, report)
    if report is None:
        return status
    status["restartCount"] = report["restart_count"]
    if not _is_lost(facts, report, may_be_missing):
        status["state"] = container_state(report)
    if "user" in report:
        user = report["user"]
        groups = {"supplementalGroups": user["groups"]} if user["groups"] else {}
        status["user"] = {"linux": {"uid": user["uid"], "gid": user["gid"], **groups}}
    status["lastState"] = (
        {"terminated": terminated_state(report["last"])} if report["last"] is not None else {}
    )
    running = "running" in status["state"]
    status["started"] = report["started"] and running
    finished = status["state"].get("terminated") or {}
    # A finished init container is "ready", as the kubelet has it.
    status["ready"] = (report["ready"] and running) or (
        is_init and not _is_sidecar(container) and finished.get("exitCode") == 0 and bool(finished)
    )
    if report["container_id"]:
        status["containerID"] = report["container_id"]
    return status


def _age_s(facts: Facts) -> float:
    """How long ago the pod was first seen."""
    started = (facts.pod.get("status") or {}).get("startTime") or facts.now
    return (parse_rfc3339(facts.now) - parse_rfc3339(started)).total_seconds()


def seconds_until_queued(pod: Obj, now: str) -> float | None:
    """How long a waiting pod is still called by the kubelet's own words; None once it is called queued."""
    left_s = _AT_ONCE_S - _age_s(Facts(pod=pod, now=now))
    return left_s if left_s > 0 else None


def _waiting(facts: Facts, container: Obj) -> dict[str, str]:
    waiting = facts.waiting or {}
    refused = (facts.refused_ephemeral or {}).get(container["name"])
    if refused:
        return {"reason": refused[0], "message": refused[1]}
    found = waiting.get(container["image"]) or waiting.get("")
    if facts.refused:
        found = facts.refused
    if found:
        return {"reason": found[0], "message": found[1]}
    if facts.fate is not None and facts.fate.pending_reason and _age_s(facts) >= _AT_ONCE_S:
        why = f"Slurm job {facts.job_id} is pending: {facts.fate.pending_reason}"
        return {"reason": "Queued", "message": why}
    # The kubelet's word is the same for init containers.
    return {"reason": "PodInitializing" if facts.pod["spec"].get("initContainers") else "ContainerCreating"}


def _is_lost(facts: Facts, report: ContainerReport | None, may_be_missing: bool) -> bool:
    """Whether the job ended before this container did. What never had its turn keeps waiting, as with a kubelet."""
    over = facts.fate is not None and facts.fate.stage is Stage.ENDED
    state = report["state"] if report is not None else ""
    if not over or _done(facts) or facts.refused or state == "terminated":
        return False
    began = state == "running" or (report is not None and report["last"] is not None)
    return began or (not may_be_missing and _initialised(facts))


def _lost_state(facts: Facts, report: ContainerReport | None) -> dict[str, Any]:
    """The job is over and nobody saw this container end; the kubelet's words for that."""
    assert facts.fate is not None
    oom = facts.fate.reason == "OutOfMemory"
    return {
        "terminated": {
            "exitCode": 137,
            "reason": "OOMKilled" if oom else "ContainerStatusUnknown",
            "message": facts.fate.message,
            "startedAt": report["started_at"] if report is not None else None,
            "finishedAt": facts.now,
        }
    }


def _known_image_id(facts: Facts, container: Obj, image: str) -> str:
    """What the object says already: a hub that was started anew has not looked at the images of running pods."""
    old = facts.pod.get("status") or {}
    kinds = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
    every = [one for kind in kinds for one in old.get(kind) or ()]
    mine = (one for one in every if one["name"] == container["name"] and one.get("image") in (None, image))
    return next((str(one.get("imageID") or "") for one in mine), "")


def _initialised(facts: Facts) -> bool:
    """Whether nothing before the containers proper was left to do."""
    reports = containers_of_kind(facts.report, "initContainers")
    return all(
        one["name"] in reports
        and reports[one["name"]]["state"] == ("running" if _is_sidecar(one) else "terminated")
        for one in facts.pod["spec"].get("initContainers", ())
    )


def _is_sidecar(container: Obj) -> bool:
    return bool(container.get("restartPolicy") == "Always")


def _done(facts: Facts) -> bool:
    return facts.report is not None and facts.report["phase"] == "Done"


def _phase(
    facts: Facts, containers: list[dict[str, Any]], init: list[dict[str, Any]]
) -> tuple[str, str, str]:
    """(phase, reason, message)."""
    if facts.refused:
        # A pod that its controller would recreate at once stays Pending, so that a bad manifest makes no flood of pods.
        retried = facts.pod["spec"].get("restartPolicy", "Always") == "Always"
        return ("Pending" if retried else "Failed", "" if retried else facts.refused[0], facts.refused[1])
    if facts.failed:
        return ("Failed", *facts.failed)
    fate = facts.fate
    over = fate is not None and fate.stage is Stage.ENDED
    if over and fate is not None and not (_done(facts) and fate.by_itself):
        return "Failed", fate.reason, fate.message
    if _done(facts):
        return _finished(facts, containers, init)
    if facts.report is None:
        return "Pending", "", ""
    # As the kubelet has it: one container that never ran keeps the pod Pending.
    started = all("waiting" not in one["state"] or one["lastState"] for one in containers)
    return ("Running" if started else "Pending"), "", ""


def _finished(
    facts: Facts, containers: list[dict[str, Any]], init: list[dict[str, Any]]
) -> tuple[str, str, str]:
    assert facts.report is not None
    problem = facts.report["problem"]
    codes = [((one["state"].get("terminated") or {}).get("exitCode")) for one in containers]
    # A sidecar is stopped at the end; how it took that says nothing about the pod.
    sidecars = {one["name"] for one in facts.pod["spec"].get("initContainers", ()) if _is_sidecar(one)}
    failed_init = any(
        (one["state"].get("terminated") or {}).get("exitCode") for one in init if one["name"] not in sidecars
    )
    if problem:
        return "Failed", problem["reason"], problem["message"]
    if not failed_init and all(code == 0 for code in codes):
        return "Succeeded", "", ""
    return "Failed", "", ""


def _conditions(
    facts: Facts, phase: str, containers: list[dict[str, Any]], init: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    ended = phase in ("Succeeded", "Failed")
    # Whether an init container has to run again is the runner's business; done once is initialised for good.
    init_done = all(_init_done(facts, one) for one in init) or any(
        "waiting" not in one["state"] or one["lastState"] for one in containers
    )
    sidecars = {one["name"] for one in facts.pod["spec"].get("initContainers", ()) if _is_sidecar(one)}
    must_be_ready = [*(one for one in init if one["name"] in sidecars), *containers]
    unready = [one["name"] for one in must_be_ready if not one["ready"]]
    ready = not unready and not ended
    why = _unready_why(phase, unready)
    gates_why = _closed_gates(facts.pod) if ready else why
    incomplete = [one["name"] for one in init if not _init_done(facts, one)]
    init_why = ("ContainersNotInitialized", f"containers with incomplete status: [{' '.join(incomplete)}]")
    sandbox = facts.report is not None and not ended
    return [
        _condition(facts, "PodReadyToStartContainers", sandbox, ("", "")),
        _condition(facts, "Initialized", True, ("PodCompleted", ""))
        if phase == "Succeeded"
        else _condition(facts, "Initialized", init_done, ("", "") if init_done else init_why),
        _condition(facts, "Ready", ready and not gates_why[0], gates_why),
        _condition(facts, "ContainersReady", ready, why),
        _condition(facts, "PodScheduled", True, ("", "")),
        *_restarting_all(facts, phase),
        *_resize(facts, ended),
        *_disruption(facts, phase),
    ]


def _closed_gates(pod: Obj) -> tuple[str, str]:
    """Why a pod whose containers are ready is not: conditions that others have yet to write."""
    known = {one["type"]: one["status"] for one in (pod.get("status") or {}).get("conditions") or ()}
    told = []
    for gate in pod["spec"].get("readinessGates") or ():
        type_ = gate["conditionType"]
        if type_ not in known:
            told.append(f'corresponding condition of pod readiness gate "{type_}" does not exist.')
        elif known[type_] != "True":
            told.append(f'the status of pod readiness gate "{type_}" is not "True", but {known[type_]}')
    return ("ReadinessGatesNotReady", ", ".join(told)) if told else ("", "")


def _restarting_all(facts: Facts, phase: str) -> list[dict[str, Any]]:
    """Only pods that have such a rule have this condition."""
    spec = facts.pod["spec"]
    every = (*(spec.get("initContainers") or ()), *spec["containers"])
    rules = [rule for one in every for rule in one.get("restartPolicyRules") or ()]
    if not any(rule.get("action") == "RestartAllContainers" for rule in rules):
        return []
    if phase in ("Succeeded", "Failed"):
        why = ("PodCompleted" if phase == "Succeeded" else "PodFailed"), ""
        return [_condition(facts, "AllContainersRestarting", False, why)]
    under_way = facts.report is not None and facts.report.get("restarting_all", False)
    why = (
        ("RestartAllContainersStarted", "container exited with restart policy rule")
        if under_way
        else ("", "")
    )
    return [_condition(facts, "AllContainersRestarting", under_way, why)]


def _resize(facts: Facts, ended: bool) -> list[dict[str, Any]]:
    wanted = pod_resize.resize_condition(facts.pod) if facts.job_id and not ended else None
    if wanted is not None:
        return [_condition(facts, pod_resize.PENDING, True, (wanted["reason"], wanted["message"]))]
    known = (facts.pod.get("status") or {}).get("conditions") or ()
    if any(one["type"] == pod_resize.PENDING for one in known):
        return [{"$patch": "delete", "type": pod_resize.PENDING}]
    return []


def _disruption(facts: Facts, phase: str) -> list[dict[str, Any]]:
    fate = facts.fate
    if phase != "Failed" or fate is None or fate.stage is not Stage.ENDED or fate.reason not in _DISRUPTIONS:
        return []
    return [_condition(facts, "DisruptionTarget", True, ("TerminationByKubelet", fate.message))]


def _init_done(facts: Facts, status: Obj) -> bool:
    spec = next(one for one in facts.pod["spec"]["initContainers"] if one["name"] == status["name"])
    if _is_sidecar(spec):
        return bool(status["started"])
    return (status["state"].get("terminated") or {}).get("exitCode") == 0


def _unready_why(phase: str, unready: list[str]) -> tuple[str, str]:
    if phase in ("Succeeded", "Failed"):
        return ("PodCompleted" if phase == "Succeeded" else "PodFailed"), ""
    return (
        ("ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]")
        if unready
        else ("", "")
    )


def _condition(facts: Facts, type_: str, true: bool, why: tuple[str, str]) -> dict[str, Any]:
    value = "True" if true else "False"
    old: Obj = next(
        (one for one in (facts.pod.get("status") or {}).get("conditions") or () if one["type"] == type_), {}
    )
    unchanged = old.get("status") == value and old.get("lastTransitionTime")
    return {
        "type": type_,
        "status": value,
        "lastProbeTime": None,
        "lastTransitionTime": old["lastTransitionTime"] if unchanged else facts.now,
        "reason": why[0] or None,
        "message": why[1] or None,
        "observedGeneration": facts.pod["metadata"].get("generation"),
    }
