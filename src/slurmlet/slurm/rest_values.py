"""slurmrestd's JSON → values, for every data parser from v0.0.38 to v0.0.45. Pure and tolerant: unknown fields cost nothing.

The shapes changed on the way: numbers became `{set, infinite, number}` (39), states became lists with flags among them (40).
Recorded answers of several versions are in tests/unit/slurmrestd/.
"""

from __future__ import annotations

import pwd
from collections.abc import Iterable, Mapping
from typing import Any

from slurmlet.model.ids import JobId
from slurmlet.model.job_states import is_over
from slurmlet.model.slurm_values import EndedJob, Grant, Job, Partition, SlurmNode
from slurmlet.slurm.command_output import is_usable, parse_gres

Obj = Mapping[str, Any]
# As squeue does: a flag tells more than the state it stands beside. The first that is there counts.
_JOB_FLAGS = (
    "COMPLETING", "STAGE_OUT", "CONFIGURING", "RESIZING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT",
    "STOPPED", "REVOKED", "RESV_DEL_HOLD", "SIGNALING", "EXPEDITING",
)  # fmt: skip
# v0.0.38 has plain numbers; these and negative ones stand for "not set" and "no limit".
_SPECIAL = frozenset(2**bits - less for bits in (16, 32, 64) for less in (1, 2))


def number(raw: Any) -> float | None:
    """None where it is not set or has no limit."""
    if isinstance(raw, Mapping):
        return float(raw.get("number") or 0) if raw.get("set") and not raw.get("infinite") else None
    if isinstance(raw, int | float) and raw >= 0 and raw not in _SPECIAL:
        return float(raw)
    return None


def _count(raw: Any) -> int:
    return int(number(raw) or 0)


def moment(raw: Any) -> float | None:
    """0 is no time."""
    return number(raw) or None


def names(raw: Any) -> list[str]:
    """A list, or words with commas between them."""
    if isinstance(raw, str):
        raw = raw.split(",")
    return [str(one) for one in raw or () if one]


def job_state(raw: Any) -> str:
    states = [one.upper() for one in names(raw)]
    flagged = [flag for flag in _JOB_FLAGS if flag in states]
    return (flagged or states or ["UNKNOWN"])[0]


def jobs(answer: Obj, user: str, uid: int, now_s: float) -> list[Job]:
    """The user's own; slurmctld lists everybody's."""
    return [
        _job(raw, now_s)
        for raw in answer.get("jobs") or ()
        if raw.get("user_name") == user or (not raw.get("user_name") and raw.get("user_id") == uid)
    ]


def _job(raw: Obj, now_s: float) -> Job:
    limit_min = number(raw.get("time_limit"))
    limit_s = None if limit_min is None else limit_min * 60
    start_s, end_s = moment(raw.get("start_time")), moment(raw.get("end_time"))
    state = job_state(raw.get("job_state"))
    placed = bool(raw.get("nodes"))
    left_s = limit_s
    if limit_s is not None and placed and start_s is not None:
        left_s = max(0.0, start_s + limit_s - now_s)
    return Job(
        job_id=JobId(str(raw["job_id"])),
        state=state,
        reason=_reason(raw.get("state_reason")),
        nodes=str(raw.get("nodes") or ""),
        partition=str(raw.get("partition") or ""),
        comment=str(raw.get("comment") or ""),
        name=str(raw.get("name") or ""),
        node_count=max(1, _count(raw.get("node_count"))),
        limit_s=limit_s,
        left_s=left_s,
        submitted_at_s=moment(raw.get("submit_time")),
        starts_at_s=start_s,
        # Of a job without a limit slurmctld says that it ends in a year.
        ends_at_s=end_s if limit_s is not None or is_over(state) else None,
    )


def _reason(raw: Any) -> str:
    return "" if raw in (None, "None", "") else str(raw)


def remembered(raw: Obj) -> EndedJob:
    """A job's end as slurmctld has it, which does not know who cancelled."""
    code, signal = exit_code(raw.get("exit_code"))
    return EndedJob(
        JobId(str(raw["job_id"])),
        job_state(raw.get("job_state")),
        code,
        signal,
        None,
        _reason(raw.get("state_reason")),
        moment(raw.get("start_time")),
        moment(raw.get("end_time")),
    )


def accounted(answer: Obj) -> dict[JobId, EndedJob]:
    """Of slurmdbd. Of a job that was requeued the last record counts."""
    found: dict[JobId, EndedJob] = {}
    for raw in sorted(answer.get("jobs") or (), key=lambda one: _submitted(one)):
        code, signal = exit_code(raw.get("exit_code"))
        job_id, times = JobId(str(raw["job_id"])), raw.get("time") or {}
        state = job_state((raw.get("state") or {}).get("current"))
        by = _uid(raw.get("kill_request_user")) if state == "CANCELLED" else None
        found[job_id] = EndedJob(
            job_id, state, code, signal, by, "", moment(times.get("start")), moment(times.get("end"))
        )
    return found


def _submitted(raw: Obj) -> float:
    return number((raw.get("time") or {}).get("submission")) or 0.0


def _uid(name: Any) -> int | None:
    if not name:
        return None
    try:
        return pwd.getpwnam(str(name)).pw_uid
    except KeyError:
        return int(name) if str(name).isdecimal() else None


def exit_code(raw: Any) -> tuple[int, int]:
    """(exit code, signal): an object, or a wait status in v0.0.38."""
    if isinstance(raw, Mapping) and "return_code" in raw:
        signal = raw.get("signal") or {}
        told = signal.get("id", signal.get("signal_id")) if isinstance(signal, Mapping) else signal
        return _count(raw.get("return_code")), _count(told)
    status = _count(raw)
    return status >> 8 & 0xFF, status & 0x7F


def grants(answer: Obj) -> dict[str, Grant]:
    """What a running job holds; `gres_detail` has a text per host, or is null where nobody asked for devices."""
    found: dict[str, Grant] = {}
    for raw in answer.get("jobs") or ():
        if job_state(raw.get("job_state")) not in ("RUNNING", "SUSPENDED", "COMPLETING"):
            continue
        devices = list(raw.get("gres_detail") or ())
        for index, (name, cpus, memory_mb) in enumerate(_hosts(raw.get("job_resources") or {})):
            gres = parse_gres(devices[index]) if index < len(devices) else ()
            found[name] = Grant(cpus, memory_mb, gres)
    return found


def _hosts(resources: Obj) -> Iterable[tuple[str, int, int]]:
    nodes = resources.get("nodes")
    allocation = nodes.get("allocation") if isinstance(nodes, Mapping) else None
    # v0.0.38 to 40 have them beside the list.
    for one in allocation or resources.get("allocated_nodes") or ():
        name = str(one.get("name") or one.get("nodename") or "")
        cpus, memory = one.get("cpus"), one.get("memory")
        count = cpus.get("count") if isinstance(cpus, Mapping) else one.get("cpus_used") or cpus
        if count in (None, 0):
            count = _cores(one.get("sockets"))
        held = (
            memory.get("allocated") if isinstance(memory, Mapping) else one.get("memory_allocated") or memory
        )
        yield name, int(count or 0), int(held or 0)


def _cores(sockets: Any) -> int:
    """Where CPUs are told core by core."""
    if isinstance(sockets, Mapping):
        sockets = [{"cores": one.get("cores")} for one in sockets.values() if isinstance(one, Mapping)]
    total = 0
    for socket in sockets or ():
        cores = socket.get("cores")
        states = cores.values() if isinstance(cores, Mapping) else [one.get("status") for one in cores or ()]
        total += sum("ALLOCATED" in names(state) or state in ("allocated", "ALLOCATED") for state in states)
    return total


def nodes(answer: Obj) -> list[SlurmNode]:
    found = []
    for raw in answer.get("nodes") or ():
        state = node_state([*names(raw.get("state")), *names(raw.get("state_flags"))])
        found.append(
            SlurmNode(
                name=str(raw["name"]),
                state=state,
                usable=is_usable(state),
                cpus=_count(raw.get("effective_cpus")) or _count(raw.get("cpus")),
                cpus_allocated=_count(raw.get("alloc_cpus")),
                memory_mb=_count(raw.get("real_memory")),
                partitions=frozenset(names(raw.get("partitions"))),
                features=frozenset(names(raw.get("features"))),
                gres=frozenset(names(raw.get("gres"))),
                reason=str(raw.get("reason") or ""),
            )
        )
    return found


def node_state(raw: Iterable[str]) -> str:
    """sinfo's word for a state and its flags."""
    flags = [one.upper() for one in raw]
    base = flags[0] if flags else "UNKNOWN"
    if "DRAIN" in flags:
        # "drained" once nothing runs there any more.
        return "draining" if base in ("ALLOCATED", "MIXED") or "COMPLETING" in flags else "drained"
    if "FAIL" in flags and base != "FAIL":
        return "failing" if base in ("ALLOCATED", "MIXED") else "fail"
    for flag, word in (
        ("MAINTENANCE", "maint"), ("REBOOT_ISSUED", "reboot"), ("REBOOT_REQUESTED", "reboot"),
        ("POWERING_UP", "powering_up"), ("POWERING_DOWN", "powering_down"), ("POWERED_DOWN", "powered_down"),
        ("INVALID_REG", "inval"),
    ):  # fmt: skip
        if flag in flags and base != "DOWN":
            return word
    if "COMPLETING" in flags and base == "IDLE":
        return "completing"
    if base == "IDLE" and ("RESERVED" in flags or "PLANNED" in flags):
        return "planned" if "PLANNED" in flags else "reserved"
    return base.lower()


def partitions(answer: Obj, listed: list[SlurmNode], default: str = "") -> list[Partition]:
    """Each summed over its nodes. `default`: from v0.0.39 to v0.0.42 no answer tells which partition that is."""
    raws = [raw for raw in answer.get("partitions") or () if raw.get("name")]
    if not default:
        told = [str(raw["name"]) for raw in raws if _is_default(raw)]
        default = told[0] if told else str(raws[0]["name"]) if len(raws) == 1 else ""
    return [_partition(raw, listed, default) for raw in raws]


def _is_default(raw: Obj) -> bool:
    inner = raw.get("partition")
    flags = [*names(raw.get("flags")), *names(inner.get("flags") if isinstance(inner, Mapping) else ())]
    return any(flag.upper() == "DEFAULT" for flag in flags)


def _partition(raw: Obj, listed: list[SlurmNode], default: str) -> Partition:
    name, inner = str(raw["name"]), raw.get("partition")
    state = names(inner.get("state") if isinstance(inner, Mapping) else raw.get("state"))
    word = {"UP": "up", "DOWN": "down", "DRAIN": "drain", "INACTIVE": "inact"}.get(
        state[0].upper() if state else "", "up"
    )
    mine = [node for node in listed if name in node.partitions]
    states: dict[str, int] = {}
    for node in mine:
        states[node.state] = states.get(node.state, 0) + 1
    maximums = raw.get("maximums") or {}
    return Partition(
        name=name,
        up=word == "up",
        default=name == default,
        time_limit=duration(number(maximums.get("time", raw.get("max_time_limit")))),
        nodes=len(mine),
        nodes_usable=sum(node.usable for node in mine),
        cpus=sum(node.cpus for node in mine),
        cpus_per_node=max((node.cpus for node in mine), default=0),
        memory_mb=sum(node.memory_mb for node in mine),
        memory_mb_per_node=max((node.memory_mb for node in mine), default=0),
        gpus=sum(
            count for node in mine for one in node.gres for kind, count in parse_gres(one) if _is_gpu(kind)
        ),
        features=frozenset(word for node in mine for word in node.features),
        gres=frozenset(word for node in mine for word in node.gres),
        node_states=states,
        state=word,
        reasons=tuple(sorted({node.reason for node in mine if node.reason})),
    )


def _is_gpu(kind: str) -> bool:
    return kind.partition(":")[0] == "gpu"


def duration(minutes: float | None) -> str:
    """As sinfo writes a limit: "10:00", "1-00:00:00", "infinite"."""
    if minutes is None:
        return "infinite"
    days, rest = divmod(int(minutes), 1440)
    hours, mins = divmod(rest, 60)
    if days:
        return f"{days}-{hours:02}:{mins:02}:00"
    return f"{hours}:{mins:02}:00" if hours else f"{mins}:00"


def release(answer: Obj) -> str:
    """Slurm's version; the key was written "Slurm" at first."""
    meta = answer.get("meta") or {}
    about = meta.get("slurm") or meta.get("Slurm") or {}
    return str(about.get("release") or "unknown")
