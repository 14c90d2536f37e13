"""What a running job holds on each of its hosts, from `scontrol show job` in detail; and lists of hosts written out."""

from __future__ import annotations

import re

from slurmlet.base.processes import run
from slurmlet.model.slurm_values import Grant

_TIMEOUT_S = 10.0
_DETAIL = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S*) Mem=(\d+) GRES=(\S*)")
_GRES = re.compile(r"([^,:()]+(?::[^,:()]+)?):(\d+)(?:\([^)]*\))?")


def granted(job_id: str) -> dict[str, Grant]:
    """host → what the job has there. Raises CommandError."""
    shown = run(["scontrol", "--details", "--oneliner", "show", "job", job_id], timeout_s=_TIMEOUT_S).stdout
    return {
        host: grant
        for hosts, grant in parse_details(shown)
        for host in (expand(hosts) if "[" in hosts else hosts.split(","))
    }


def parse_details(text: str) -> list[tuple[str, Grant]]:
    """(list of hosts, grant on each of them) in the order of Slurm's."""
    return [
        (hosts, Grant(_count(cpu_ids), int(memory), _gres(gres)))
        for hosts, cpu_ids, memory, gres in _DETAIL.findall(text)
    ]


def expand(hosts: str) -> list[str]:
    """ "c[1-3],d1" → its names; Slurm itself knows all ways to write such a list."""
    if "[" not in hosts:
        return [host for host in hosts.split(",") if host]
    return run(["scontrol", "show", "hostnames", hosts], timeout_s=_TIMEOUT_S).stdout.split()


def _count(ranges: str) -> int:
    """How many numbers "0-3,8" names."""
    total = 0
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if first.isdigit():
            total += int(last or first) - int(first) + 1
    return total


def _gres(text: str) -> tuple[tuple[str, int], ...]:
    return tuple((kind, int(count)) for kind, count in _GRES.findall(text))
