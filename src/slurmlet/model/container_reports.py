"""The containers in a runner's report: by name, and each one's state in the API's form. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.protocol.pod_report import ContainerReport, EndedRun, PodReport


def containers_of(report: PodReport | None) -> dict[str, ContainerReport]:
    """Of every kind: no two containers of a pod have the same name."""
    if report is None:
        return {}
    return {**report["init_containers"], **report["containers"], **report.get("ephemeral_containers", {})}


def containers_of_kind(report: PodReport | None, kind: str) -> Mapping[str, ContainerReport]:
    """`kind`: as in a pod's spec."""
    if report is None:
        return {}
    if kind == "ephemeralContainers":
        return report.get("ephemeral_containers", {})
    return report["init_containers"] if kind == "initContainers" else report["containers"]


def container_state(report: ContainerReport) -> dict[str, Any]:
    if report["state"] == "running":
        return {"running": {"startedAt": report["started_at"]}}
    if report["state"] == "terminated":
        return {"terminated": terminated_state(report)}
    waiting = {key: text for key in ("reason", "message") if (text := report[key])}
    return {"waiting": waiting or {"reason": "ContainerCreating"}}


def terminated_state(run: ContainerReport | EndedRun) -> dict[str, Any]:
    code = run["exit_code"]
    terminated = {
        "exitCode": code if code is not None else 137,
        "reason": run["reason"] or ("Completed" if code == 0 else "Error"),
        "startedAt": run["started_at"],
        "finishedAt": run["finished_at"],
    }
    more = {"signal": run["signal"], "message": run["message"], "containerID": run["container_id"]}
    return {**terminated, **{key: value for key, value in more.items() if value}}
