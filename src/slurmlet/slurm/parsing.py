"""Slurm's printed lines → values. Tolerant: an unknown field or a foreign job's odd comment costs one line, never the poll.

Pure; fixtures of several Slurm versions are in tests/unit/test_slurm_parsing.py.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable

from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import EndedJob, Job, Partition

# The comment comes last: it is the only field that may hold the separator.
QUEUE_FORMAT = "%A|%T|%r|%N|%P|%k"
# So does the reason why a node is down: somebody wrote it by hand.
PARTITION_FORMAT = "%P|%a|%l|%D|%c|%m|%T|%f|%G|%E"
SACCT_FIELDS = "JobIDRaw,State,ExitCode"

# Node states in which a node may run jobs, now or once it is free.
_USABLE_STATES = {
    "idle", "mixed", "allocated", "completing", "planned", "reserved", "powered_down", "powering_up", "power_down",
    "powering_down", "power_up", "cloud", "alloc", "mix", "comp", "blocked",
}  # fmt: skip
_GPU = re.compile(r"\bgpu(?::[^,:()]+)?:(\d+)")


def parse_queue(text: str) -> list[Job]:
    jobs = []
    # Not splitlines: it would also cut a comment at a form feed or at one of Unicode's separators.
    for line in text.split("\n"):
        fields = line.split("|", 5)
        if len(fields) != 6 or not fields[0].isdecimal():
            continue  # the second line of somebody's comment
        job_id, state, reason, nodes, partition, comment = fields
        jobs.append(
            Job(
                JobId(job_id),
                # Few different words in thousands of lines: kept once.
                sys.intern(base_state(state)),
                sys.intern(_none_is_empty(reason)),
                sys.intern(nodes),
                sys.intern(partition),
                _null_is_empty(comment),
            )
        )
    return jobs


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
        ended.append(
            EndedJob(JobId(fields[0]), base_state(fields[1]), code, signal, int(by.group(1)) if by else None)
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
    )


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
        state = re.sub(r"[*~#!%$@^+-]+$", "", fields[6].lower())
        states[state] = states.get(state, 0) + _int(fields[3])
    return Partition(
        name=name,
        up=lines[0][1] == "up",
        default=any(fields[0].endswith("*") for fields in lines),
        time_limit=lines[0][2],
        nodes=sum(_int(fields[3]) for fields in lines),
        nodes_usable=sum(count for state, count in states.items() if _usable(state)),
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


def _usable(state: str) -> bool:
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
