"""What `sbatch --constraint` says: which features the nodes of a job must have. Pure.

    ib&ssd            each node has both
    ib|eth            each node has one of them
    (ib|eth)&ssd      parentheses group
    [rack1|rack2]     all nodes have the same one
    [gpu*2&cpu*4]     two nodes with the first, four with the second

An expression becomes `ways`: alternatives for the whole job, each a tuple of groups of nodes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

_T = TypeVar("_T")
# Any of these sets of features will do.
Choice = tuple[frozenset[str], ...]
_ANYTHING: Choice = (frozenset(),)
_TOKEN = re.compile(r"\s*(?:([A-Za-z0-9_.:-]+)|([&|()\[\]])|\*([0-9]{1,5}))")
# An expression that multiplies out to more than this was not written by a person.
_MOST = 64
_DEEPEST = 20


@dataclass(frozen=True, slots=True)
class Group:
    choice: Choice = _ANYTHING
    count: int | None = None  # of nodes; None: all of the job's

    def accepts(self, features: frozenset[str]) -> bool:
        return any(wanted <= features for wanted in self.choice)


Way = tuple[Group, ...]


@lru_cache(maxsize=4096)
def ways(expression: str) -> tuple[Way, ...]:
    """Raises ValueError for what is no such expression."""
    if not expression.strip():
        return ((Group(),),)
    tokens = _tokens(expression)
    parser = _Parser(tokens)
    found = parser.alternatives(bracketed=False, depth=0)
    if parser.peek() is not None:
        raise ValueError(f"{expression[:80]!r} is not a constraint: {parser.peek()!r} is in its way")
    return found


def _tokens(expression: str) -> list[str]:
    found: list[str] = []
    at = 0
    text = expression.rstrip()
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or len(found) > 256:
            raise ValueError(f"{expression[:80]!r} is not a constraint")
        name, sign, number = match.groups()
        found.append(name or sign or f"*{number}")
        at = match.end()
    return found


class _Parser:
    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def peek(self) -> str | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def alternatives(self, *, bracketed: bool, depth: int) -> tuple[Way, ...]:
        """In brackets, all nodes take the same side of an `|`; outside, each node its own."""
        if depth > _DEEPEST:
            raise ValueError(f"a constraint may be nested {_DEEPEST} deep at most")
        sides = [self._all_of(bracketed=bracketed, depth=depth)]
        while self.peek() == "|":
            self._at += 1
            sides.append(self._all_of(bracketed=bracketed, depth=depth))
        plain = [side[0][0] for side in sides if len(side) == 1 and len(side[0]) == 1]
        if bracketed or len(plain) < len(sides) or any(group.count is not None for group in plain):
            return _few(way for side in sides for way in side)
        return ((Group(_few(wanted for group in plain for wanted in group.choice)),),)

    def _all_of(self, *, bracketed: bool, depth: int) -> tuple[Way, ...]:
        found = self._one(bracketed=bracketed, depth=depth)
        while self.peek() == "&":
            self._at += 1
            other = self._one(bracketed=bracketed, depth=depth)
            found = _few(_both(left, right) for left in found for right in other)
        return found

    def _one(self, *, bracketed: bool, depth: int) -> tuple[Way, ...]:
        sign = self.peek()
        self._at += 1
        if sign in ("(", "["):
            found = self.alternatives(bracketed=bracketed or sign == "[", depth=depth + 1)
            if self.peek() != {"(": ")", "[": "]"}[sign]:
                raise ValueError("brackets of a constraint do not match")
            self._at += 1
        elif sign is None or not re.match(r"[A-Za-z0-9_.:-]", sign):
            raise ValueError(
                f"a feature is missing before {sign!r}" if sign else "a feature is missing at the end"
            )
        else:
            found = ((Group((frozenset({sign}),)),),)
        count = self.peek()
        if count is not None and count.startswith("*"):
            self._at += 1
            found = tuple(tuple(Group(group.choice, int(count[1:])) for group in way) for way in found)
        return found


def _both(left: Way, right: Way) -> Way:
    counted = [group for group in (*left, *right) if group.count is not None]
    plain = [group for group in (*left, *right) if group.count is None]
    common = _ANYTHING
    for group in plain:
        common = _few(one | other for one in common for other in group.choice)
    if not counted:
        return (Group(common),)
    return tuple(
        Group(_few(one | other for one in group.choice for other in common), group.count) for group in counted
    )


def _few(values: Iterable[_T]) -> tuple[_T, ...]:
    found = tuple(dict.fromkeys(values))
    if len(found) > _MOST:
        raise ValueError(f"a constraint with more than {_MOST} alternatives")
    return found
