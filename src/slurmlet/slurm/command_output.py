"""Slurm's printed lines → values. Tolerant: an unknown field or a foreign job's odd comment costs one line, never the poll.

Pure; fixtures of several Slurm versions are in tests/unit/test_slurm_command_output.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import EndedJob, Grant, Job, Partition, SlurmNode

# A character that nobody types: names and comments may hold any other, line feeds included.
SEPARATOR = "\x1f"
# The comment comes last, so that even this character there costs nothing.
QUEUE_FORMAT = SEPARATOR.join(("%A", "%T", "%r", "%N", "%P", "%D", "%l", "%L", "%V", "%S", "%e", "%j", "%k"))
_QUEUE_FIELDS = 13
NODE_FORMAT = "%N|%R|%T|%c|%C|%m|%f|%G|%E"
# The reason why a node is down comes last: somebody wrote it by hand.
PARTITION_FORMAT = "%P|%a|%l|%D|%c|%m|%T|%f|%G|%E"
SACCT_FIELDS = "JobIDRaw,State,ExitCode,Start,End"

# Node states in which a node may run jobs, now or once it is free.
_USABLE_STATES = {
    "idle", "mixed", "allocated", "completing", "planned", "reserved", "powered_down", "powering_up", "power_down",
    "powering_down", "power_up", "cloud", "alloc", "mix", "comp", "blocked",
}  # fmt: skip
_DETAIL = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)")
_GRES = re.compile(r"([^,:()]+(?::[^,:()]+)?):(\d+)(?:\([^)]*\))?")
_GPU = re.compile(r"\bgpu(?::[^,:()]+)?:(\d+)")


def parse_queue(text: str) -> list[Job]:
    jobs = []
    # Not splitlines: it would also cut a comment at a form feed or at one of Unicode's separators.
    for line in text.split("\n"):
        fields = line.split(SEPARATOR, _QUEUE_FIELDS - 1)
        if len(fields) != _QUEUE_FIELDS or not fields[0].isdecimal():
            continue  # the second line of somebody's comment
        (
            job_id,
            state,
            reason,
            nodes,
            partition,
            count,
            limit,
            left,
            submitted,
            starts,
            ends,
            name,
            comment,
        ) = fields
        jobs.append(
            Job(
                JobId(job_id),
                # Few different words in thousands of lines: kept once.
                sys.intern(base_state(state)),
                sys.intern(_none_is_empty(reason)),
                sys.intern(nodes),
                sys.intern(partition),
                _null_is_empty(comment),
                name,
                int(count) if count.isdecimal() else 1,
                seconds(limit),
                seconds(left),
                moment(submitted),
                moment(starts),
                moment(ends),
            )
        )
    return jobs


def seconds(text: str) -> float | None:
    """Slurm's "1-02:03:04", "10:00"; None for UNLIMITED and what is not set."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, secs = (int(part or 0) for part in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + secs)


def moment(text: str) -> float | None:
    """Seconds since the epoch; None for N/A, Unknown, None."""
    return float(text) if text.isdecimal() else None


def base_state(state: str) -> str:
    """'CANCELLED by 1000' and 'CANCELLED+' are CANCELLED."""
    words = state.split()
    return words[0].rstrip("+").upper() if words else "UNKNOWN"


def parse_sacct(text: str) -> list[EndedJob]:
    ended = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) < 3 or not fields[0].isdecimal():
            continue
        by = re.search(r"by (\d+)", fields[1])
        code, signal = _exit_code(fields[2])
        start, end = (moment(field) for field in fields[3:5]) if len(fields) >= 5 else (None, None)
        ended.append(
            EndedJob(
                JobId(fields[0]),
                base_state(fields[1]),
                code,
                signal,
                int(by.group(1)) if by else None,
                started_at_s=start,
                ended_at_s=end,
            )
        )
    return ended


def parse_show_job(text: str) -> EndedJob | None:
    """One line of `scontrol -o show job`. Keys are taken by name; their order changes between versions."""

    def value(key: str) -> str:
        found = re.search(rf"(?:^|\s){key}=(\S*)", text)
        return found.group(1) if found else ""

    if not value("JobId").isdecimal():
        return None
    code, signal = _exit_code(value("ExitCode"))
    return EndedJob(
        JobId(value("JobId")),
        base_state(value("JobState")),
        code,
        signal,
        None,
        _none_is_empty(value("Reason")),
        moment(value("StartTime")),
        moment(value("EndTime")),
    )


def parse_details(text: str) -> list[tuple[str, Grant]]:
    """(list of hosts, what the job holds on each of them), from `scontrol --details show job`."""
    return [
        (hosts, Grant(_count(cpu_ids), int(memory), parse_gres(gres)))
        for hosts, cpu_ids, memory, gres in _DETAIL.findall(text)
    ]


def parse_gres(text: str) -> tuple[tuple[str, int], ...]:
    """ "gpu:a100:2(IDX:0-1),shard:4" as (("gpu:a100", 2), ("shard", 4))."""
    return tuple((kind, int(count)) for kind, count in _GRES.findall(text))


def _count(ranges: str) -> int:
    """How many numbers "0-3,8" names."""
    total = 0
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            total += int(last or first) - int(first) + 1
    return total


def parse_nodes(text: str) -> list[SlurmNode]:
    """Lines of sinfo, one per node and partition."""
    groups: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.split("|", 8)
        if len(fields) == 9:
            groups.setdefault(fields[0], []).append(fields)
    return [_node(name, lines) for name, lines in groups.items()]


def _node(name: str, lines: list[list[str]]) -> SlurmNode:
    _, _, state, cpus, allocated, memory, features, gres, reason = lines[0]
    state = node_state(state)
    return SlurmNode(
        name=name,
        state=state,
        usable=is_usable(state),
        cpus=_int(cpus),
        cpus_allocated=_int(allocated),
        memory_mb=_int(memory),
        partitions=frozenset(fields[1] for fields in lines),
        features=frozenset(_words([features])),
        gres=frozenset(_words([gres])),
        reason="" if reason == "none" else reason,
    )


def node_state(text: str) -> str:
    """sinfo's word without the marks behind it: "idle*" does not answer, "mixed-" is planned for another job."""
    return re.sub(r"[*~#!%$@^+-]+$", "", text.lower())


def parse_partitions(text: str) -> list[Partition]:
    """Lines of sinfo, one per partition and kind of node, summed to one value per partition."""
    groups: dict[str, list[list[str]]] = {}
    for line in text.splitlines():
        fields = line.split("|", 9)
        if len(fields) >= 9:
            groups.setdefault(fields[0].rstrip("*"), []).append(fields)
    return [_partition(name, lines) for name, lines in groups.items()]


def _partition(name: str, lines: list[list[str]]) -> Partition:
    states: dict[str, int] = {}
    for fields in lines:
        state = node_state(fields[6])
        states[state] = states.get(state, 0) + _int(fields[3])
    return Partition(
        name=name,
        up=lines[0][1] == "up",
        default=any(fields[0].endswith("*") for fields in lines),
        time_limit=lines[0][2],
        nodes=sum(_int(fields[3]) for fields in lines),
        nodes_usable=sum(count for state, count in states.items() if is_usable(state)),
        cpus=sum(_int(fields[3]) * _int(fields[4]) for fields in lines),
        cpus_per_node=max(_int(fields[4]) for fields in lines),
        memory_mb=sum(_int(fields[3]) * _int(fields[5]) for fields in lines),
        memory_mb_per_node=max(_int(fields[5]) for fields in lines),
        gpus=sum(_int(fields[3]) * _gpus(fields[8]) for fields in lines),
        features=frozenset(_words(fields[7] for fields in lines)),
        gres=frozenset(_words(fields[8] for fields in lines)),
        node_states=states,
        state=lines[0][1],
        reasons=tuple(
            sorted({fields[9] for fields in lines if len(fields) > 9 and fields[9] not in ("none", "")})
        ),
    )


def is_usable(state: str) -> bool:
    return state in _USABLE_STATES


def _gpus(gres: str) -> int:
    return sum(int(count) for count in _GPU.findall(gres))


def _words(texts: Iterable[str]) -> set[str]:
    return {word for text in texts for word in text.split(",") if word and word != "(null)"}


def _int(text: str) -> int:
    digits = re.match(r"\d+", text.strip())
    return int(digits.group()) if digits else 0


def _exit_code(text: str) -> tuple[int, int]:
    code, _, signal = text.partition(":")
    return _int(code), _int(signal)


def _none_is_empty(text: str) -> str:
    return "" if text in ("None", "(null)") else text


def _null_is_empty(text: str) -> str:
    return "" if text == "(null)" else text
