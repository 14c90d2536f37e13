"""Slurm's way to write many hosts in few words, and back: "c[1-3,07],d1" names c1, c2, c3, c07 and d1. Pure."""

from __future__ import annotations

import itertools
import re

_MOST = 65536
_TOKEN = re.compile(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand(hosts: str) -> list[str]:
    """The names, in the order in which they are written. Raises ValueError for what is no such list."""
    found: list[str] = []
    for token in filter(None, _tokens(hosts.strip())):
        parts = _BRACKETS.split(token)
        # Of one token every second part was in brackets; those between are literal.
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        found += ["".join(words) for words in itertools.islice(itertools.product(*choices), _MOST + 1)]
        if len(found) > _MOST:
            raise ValueError(f"more than {_MOST} hosts in {hosts[:80]!r}")
    return found


def _tokens(hosts: str) -> list[str]:
    if hosts.count("[") != hosts.count("]"):
        raise ValueError(f"brackets do not match in {hosts[:80]!r}")
    return _TOKEN.findall(hosts)


def _numbers(ranges: str) -> list[str]:
    found: list[str] = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ValueError(f"{part!r} is not a range of numbers")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= _MOST:
            raise ValueError(f"{part!r} is not a range of at most {_MOST} numbers")
        # "07" keeps its width, as "07-12" keeps that of its first number.
        found += [str(number).zfill(len(first)) for number in range(int(first), int(first) + count)]
    return found
