"""What squeue and scontrol print about everybody's jobs and all nodes → values. Pure and tolerant, as command_output.py is.

`squeue -O` with a separator instead of a width behind each field: that prints a field whole, unpadded, from 22.05 to 26.05,
and has the sum of what a job asks for (tres-alloc, which of a waiting job is what it wants), whichever option asked for it.
No field holds text that a user may choose freely.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from slurmlet.model.host_lists import expand
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_admin_values import Gres, QueuedJob, WorkerNode
from slurmlet.slurm.command_output import SEPARATOR, base_state, moment, parse_gres, seconds

_FIELDS = (
    "JobID", "ArrayJobID", "ArrayTaskID", "UserName", "State", "Reason", "Partition", "NumNodes", "MaxNodes", "NumCPUs",
    "MinCPUs", "MinMemory", "tres-alloc", "tres-per-node", "Feature", "OverSubscribe", "ReqSwitch", "ReqNodes", "ExcNodes",
    "Reservation", "Dependency", "PriorityLong", "TimeLimit", "SubmitTime", "EligibleTime", "StartTime", "Account",
    "QOS", "NodeList",
)  # fmt: skip
QUEUE_FORMAT = ",".join(f"{name}:{SEPARATOR}" for name in _FIELDS)

_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_NOTHING = ("", "(null)", "N/A", "None", "n/a")
_PER_NODE = re.compile(r"(?:gres[:/])?([^,:=/]+(?::[^,:=/]+)?)[:=](\d+)")
_KEY = re.compile(r"(?:^|\s)([A-Za-z_/]+)=")
_WHO = re.compile(r"\s*\[[^\]]*@[^\]]*\]\s*$")


def parse_queue(text: str) -> list[QueuedJob]:
    jobs = []
    for line in text.split("\n"):
        fields = [field.strip() for field in line.split(SEPARATOR)]
        if len(fields) == len(_FIELDS) + 1 and fields[0].isdecimal():
            jobs.append(_job(dict(zip(_FIELDS, fields, strict=False))))
    return jobs


def _job(raw: dict[str, str]) -> QueuedJob:
    state = base_state(raw["State"])
    reason = _plain(raw["Reason"])
    tres = parse_tres(raw["tres-alloc"])
    # Of a job that waits, 22.05 prints the most that it takes there; what it needs is in the sum.
    nodes = max(1, tres.get("node") or _int(raw["NumNodes"]))
    tasks, at_once = array_tasks(raw["ArrayTaskID"])
    memory_mb, each_mb = tres.get("mem", 0), megabytes(raw["MinMemory"])
    priority = _int(raw["PriorityLong"])
    started = state != "PENDING"
    return QueuedJob(
        job_id=JobId(raw["JobID"]),
        user=raw["UserName"],
        state=state,
        reason=reason,
        partitions=tuple(filter(None, raw["Partition"].split(","))),
        nodes_min=nodes,
        nodes_max=_int(raw["MaxNodes"]) or None,
        cpus=tres.get("cpu") or max(1, _int(raw["NumCPUs"])),
        memory_mb=memory_mb,
        gres=gres_of(tres),
        cpus_per_node=_int(raw["MinCPUs"]),
        # The same column is printed for --mem-per-cpu: then it does not add up by nodes.
        memory_mb_per_node=each_mb if each_mb and abs(each_mb * nodes - memory_mb) <= nodes else 0,
        gres_per_node=per_node(raw["tres-per-node"]),
        features=_plain(raw["Feature"]),
        exclusive=raw["OverSubscribe"] in ("NO", "EXCLUSIVE"),
        switches=_int(raw["ReqSwitch"]),
        required_nodes=_plain(raw["ReqNodes"]),
        excluded_nodes=_plain(raw["ExcNodes"]),
        reservation=_plain(raw["Reservation"]),
        dependency=_plain(raw["Dependency"]),
        held=is_held(priority, reason, started),
        array_id=raw["ArrayJobID"] if _plain(raw["ArrayTaskID"]) else "",
        tasks_pending=tasks,
        tasks_at_once=at_once,
        limit_s=seconds(raw["TimeLimit"]),
        submitted_at_s=moment(raw["SubmitTime"]),
        eligible_at_s=moment(raw["EligibleTime"]),
        started_at_s=moment(raw["StartTime"]) if started else None,
        priority=priority,
        account=_plain(raw["Account"]),
        qos=_plain(raw["QOS"]),
        nodes=hosts(raw["NodeList"]),
    )


def is_held(priority: int, reason: str, started: bool) -> bool:
    return not started and (reason.startswith("JobHeld") or (priority == 0 and reason != "Dependency"))


def parse_tres(text: str) -> dict[str, int]:
    """ "cpu=4,mem=8G,node=2,gres/gpu:a100=4" by name; memory in MiB."""
    found: dict[str, int] = {}
    for word in text.split(","):
        name, _, value = word.partition("=")
        if name == "mem":
            found[name] = megabytes(value)
        elif value:
            found[name] = _int(value)
    return found


def gres_of(tres: dict[str, int]) -> Gres:
    """Devices of a TRES string. Where a type is told, the sum over types, which stands beside it, is left out."""
    named = {name.removeprefix("gres/"): count for name, count in tres.items() if name.startswith("gres/")}
    typed = {name.partition(":")[0] for name in named if ":" in name}
    return tuple((name, count) for name, count in named.items() if count and name not in typed)


def per_node(text: str) -> Gres:
    """ "gres:gpu:a100:2", "gres/gpu:2", "gres/gpu:a100=2": the spelling changed over the years."""
    if text in _NOTHING:
        return ()
    found = []
    for word in text.split(","):
        told = re.sub(r"^gres[:/]", "", word.strip())
        match = _PER_NODE.fullmatch(told)
        found.append((match.group(1), int(match.group(2))) if match else (told, 1))
    return tuple(found)


def array_tasks(text: str) -> tuple[int, int | None]:
    """Of "1-9:2,12%3": how many wait, how many may run at once; one task, or no array, counts as one."""
    ranges, _, at_once = text.partition("%")
    total = 0
    for part in ranges.split(","):
        found = re.fullmatch(r"(\d+)-(\d+)(?::(\d+))?", part)
        if found is not None:
            total += (int(found[2]) - int(found[1])) // max(1, int(found[3] or 1)) + 1
        elif part.isdecimal():
            total += 1
    return max(1, total), int(at_once) if at_once.isdecimal() else None


def megabytes(text: str) -> int:
    """ "8G", "1000M", "0.50T", "4000": a bare number is MiB."""
    found = re.match(r"(\d+(?:\.\d+)?)([KMGTP]?)", text.strip())
    return round(float(found[1]) * _UNITS[found[2] or "M"]) if found else 0


def hosts(text: str) -> tuple[str, ...]:
    if text in _NOTHING:
        return ()
    try:
        return tuple(expand(text))
    except ValueError:
        return (text,)


def parse_workers(text: str) -> list[WorkerNode]:
    """Lines of `scontrol -o show node`."""
    return [_worker(words) for words in map(_words, text.splitlines()) if words.get("NodeName")]


def parse_partition_limits(text: str) -> dict[str, int]:
    """MaxNodes in lines of `scontrol -o show partition`; one without a limit says UNLIMITED."""
    lines = map(_words, text.splitlines())
    return {
        words["PartitionName"]: int(words["MaxNodes"])
        for words in lines
        if words.get("PartitionName") and words.get("MaxNodes", "").isdecimal()
    }


def _words(line: str) -> dict[str, str]:
    """Keys and values, which may have spaces. The first of a key counts: what people wrote in comments comes last."""
    keys = list(_KEY.finditer(line))
    found: dict[str, str] = {}
    for index, key in enumerate(keys):
        end = keys[index + 1].start() if index + 1 < len(keys) else len(line)
        found.setdefault(key[1], line[key.end() : end].strip())
    return found


def _worker(raw: dict[str, str]) -> WorkerNode:
    state, flags = node_states(re.split(r"\+", raw.get("State", "UNKNOWN")))
    return WorkerNode(
        name=raw["NodeName"],
        state=state,
        flags=flags,
        address=_plain(raw.get("NodeAddr", "")),
        hostname=_plain(raw.get("NodeHostName", "")),
        reason=_WHO.sub("", _plain(raw.get("Reason", ""))),
        partitions=frozenset(_split(raw.get("Partitions", ""))),
        features=frozenset(_split(raw.get("ActiveFeatures") or raw.get("AvailableFeatures", ""))),
        cpus=_int(raw.get("CPUEfctv", "")) or _int(raw.get("CPUTot", "")) or 1,
        memory_mb=_int(raw.get("RealMemory", "")),
        gres=parse_gres(_plain(raw.get("Gres", ""))),
        cpus_allocated=_int(raw.get("CPUAlloc", "")),
        memory_allocated_mb=_int(raw.get("AllocMem", "")),
        booted_at_s=moment(raw.get("BootTime", "")),
        slurmd_started_at_s=moment(raw.get("SlurmdStartTime", "")),
        last_busy_at_s=moment(raw.get("LastBusyTime", "")),
        topology=_plain(raw.get("Topology", "")),
        comment=_plain(raw.get("Comment", "")),
        extra=_plain(raw.get("Extra", "")),
        instance_id=_plain(raw.get("InstanceId", "")),
        version=_plain(raw.get("Version", "")),
    )


def node_states(words: Iterable[str]) -> tuple[str, frozenset[str]]:
    """(base state, flags), from "IDLE+DRAIN*" or from a list. A mark behind the state stands for a flag."""
    marks: set[str] = set()
    plain: list[str] = []
    for word in words:
        found = re.fullmatch(r"([A-Z_]+)([^A-Z_]*)", word.strip().upper())
        if found is None:
            continue
        plain.append(_LONG_WORDS.get(found[1], found[1]))
        marks.update(flag for mark, flag in _MARKS.items() if mark in found[2])
    return (plain[0] if plain else "UNKNOWN"), frozenset({*plain[1:], *marks})


_MARKS = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "%": "POWERING_DOWN",
    "!": "POWER_DOWN",
}
# scontrol's own words beside those of the REST API.
_LONG_WORDS = {
    "MAINT": "MAINTENANCE",
    "REBOOT": "REBOOT_REQUESTED",
    "NO_RESPOND": "NOT_RESPONDING",
    "ALLOC": "ALLOCATED",
}


def _split(text: str) -> list[str]:
    return [] if text in _NOTHING else [word for word in text.split(",") if word]


def _plain(text: str) -> str:
    return "" if text in _NOTHING else text


def _int(text: str) -> int:
    digits = re.match(r"\d+", text.strip())
    return int(digits.group()) if digits else 0
