"""slurmrestd's JSON → an administrator's values, for every data parser from v0.0.38 to v0.0.45. Pure and tolerant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurmlet.model.ids import JobId
from slurmlet.model.job_states import is_over
from slurmlet.model.slurm_admin_values import QueuedJob, WorkerNode
from slurmlet.slurm.admin_output import (
    array_tasks,
    gres_of,
    hosts,
    is_held,
    node_states,
    parse_tres,
    per_node,
)
from slurmlet.slurm.command_output import parse_gres
from slurmlet.slurm.rest_values import job_state, moment, names, number

Obj = Mapping[str, Any]


def queue(answer: Obj) -> list[QueuedJob]:
    """Everybody's jobs that have not ended."""
    raws = [raw for raw in answer.get("jobs") or () if not is_over(job_state(raw.get("job_state")))]
    return [_job(raw) for raw in raws]


def _job(raw: Obj) -> QueuedJob:
    state = job_state(raw.get("job_state"))
    reason = "" if raw.get("state_reason") in (None, "None") else str(raw["state_reason"])
    started = state != "PENDING"
    tres = parse_tres(str(raw.get("tres_alloc_str") or raw.get("tres_req_str") or ""))
    tasks_text = str(raw.get("array_task_string") or "")
    tasks, at_once = array_tasks(tasks_text)
    limit_min, array_id = number(raw.get("time_limit")), _count(raw.get("array_job_id"))
    priority = _count(raw.get("priority"))
    return QueuedJob(
        job_id=JobId(str(raw["job_id"])),
        user=str(raw.get("user_name") or raw.get("user_id") or ""),
        state=state,
        reason=reason,
        partitions=tuple(names(raw.get("partition"))),
        nodes_min=max(1, _count(raw.get("node_count"))),
        nodes_max=_count(raw.get("max_nodes")) or None,
        cpus=tres.get("cpu") or max(1, _count(raw.get("cpus"))),
        memory_mb=tres.get("mem", 0),
        gres=gres_of(tres),
        cpus_per_node=_count(raw.get("minimum_cpus_per_node")),
        memory_mb_per_node=_count(raw.get("memory_per_node")),
        gres_per_node=per_node(str(raw.get("tres_per_node") or "")),
        features=str(raw.get("features") or ""),
        exclusive=_is_exclusive(raw),
        # Its name changed with v0.0.42.
        switches=_count(raw.get("required_switches", raw.get("minimum_switches"))),
        required_nodes=str(raw.get("required_nodes") or ""),
        excluded_nodes=str(raw.get("excluded_nodes") or ""),
        reservation=str(raw.get("resv_name") or ""),
        dependency=str(raw.get("dependency") or ""),
        held=bool(raw.get("hold"))
        or (raw.get("priority") is not None and is_held(priority, reason, started)),
        array_id=str(array_id) if array_id else "",
        tasks_pending=tasks,
        tasks_at_once=at_once or _count(raw.get("array_max_tasks")) or None,
        limit_s=None if limit_min is None else limit_min * 60,
        submitted_at_s=moment(raw.get("submit_time")),
        eligible_at_s=moment(raw.get("eligible_time")),
        started_at_s=moment(raw.get("start_time")) if started else None,
        priority=priority,
        account=str(raw.get("account") or ""),
        qos=str(raw.get("qos") or ""),
        nodes=hosts(str(raw.get("nodes") or "")),
    )


def _is_exclusive(raw: Obj) -> bool:
    """`shared` is a list with "none" in it; v0.0.39 and 40 also have `exclusive`; a text in v0.0.38."""
    return any(str(one).lower() in ("none", "exclusive", "true") for one in names(raw.get("shared"))) or any(
        str(one).lower() == "true" for one in names(raw.get("exclusive"))
    )


def workers(answer: Obj) -> list[WorkerNode]:
    return [_worker(raw) for raw in answer.get("nodes") or () if raw.get("name")]


def _worker(raw: Obj) -> WorkerNode:
    state, flags = node_states([*names(raw.get("state")), *names(raw.get("state_flags"))])
    return WorkerNode(
        name=str(raw["name"]),
        state=state,
        flags=flags,
        address=str(raw.get("address") or ""),
        hostname=str(raw.get("hostname") or ""),
        reason=str(raw.get("reason") or ""),
        partitions=frozenset(names(raw.get("partitions"))),
        features=frozenset(names(raw.get("active_features")) or names(raw.get("features"))),
        cpus=_count(raw.get("effective_cpus")) or _count(raw.get("cpus")) or 1,
        memory_mb=_count(raw.get("real_memory")),
        gres=parse_gres(str(raw.get("gres") or "")),
        cpus_allocated=_count(raw.get("alloc_cpus")),
        memory_allocated_mb=_count(raw.get("alloc_memory")),
        booted_at_s=moment(raw.get("boot_time")),
        slurmd_started_at_s=moment(raw.get("slurmd_start_time")),
        last_busy_at_s=moment(raw.get("last_busy")),
        topology=str(raw.get("topology") or ""),
        comment=str(raw.get("comment") or ""),
        extra=str(raw.get("extra") or ""),
        instance_id=str(raw.get("instance_id") or ""),
        version=str(raw.get("version") or ""),
    )


def partition_limits(answer: Obj) -> dict[str, int]:
    found = {
        str(raw.get("name")): number(
            (raw.get("maximums") or {}).get("nodes", raw.get("maximum_nodes_per_job"))
        )
        for raw in answer.get("partitions") or ()
    }
    return {name: int(limit) for name, limit in found.items() if limit is not None}


def _count(raw: Any) -> int:
    return int(number(raw) or 0)
