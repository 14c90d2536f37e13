"""Label selectors, as clients write them in a query (`app=web,tier!=db,env in (a,b),!old`) and as objects hold them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from slurmlet.base.errors import UserError

Labels = Mapping[str, str]
Selector = Callable[[Labels], bool]

_NAME = r"[A-Za-z0-9]([A-Za-z0-9_./-]*[A-Za-z0-9])?"
_SET = re.compile(rf"(?P<key>{_NAME})\s+(?P<how>in|notin)\s*\((?P<values>[^()]*)\)")
_EQUAL = re.compile(rf"(?P<key>{_NAME})\s*(?P<how>==|=|!=)\s*(?P<value>[A-Za-z0-9_.-]*)")
_PRESENCE = re.compile(rf"(?P<how>!?)\s*(?P<key>{_NAME})")


def parse(text: str) -> Selector:
    """A function that tells whether labels match. Raises UserError."""
    wanted = [_requirement(part.strip()) for part in _split(text) if part.strip()]
    return lambda labels: all(one(labels) for one in wanted)


def compiled(selector: Mapping[str, Any]) -> Selector:
    """From a LabelSelector with matchLabels and matchExpressions; an empty one matches everything."""
    # Asked for every pod of a cluster at every change: the usual kind without a loop in Python.
    equal = dict(selector.get("matchLabels") or {}).items()
    wanted = [_expression(each) for each in selector.get("matchExpressions") or ()]
    if not wanted:
        return lambda labels: equal <= labels.items()
    return lambda labels: equal <= labels.items() and all(one(labels) for one in wanted)


def _expression(raw: Mapping[str, Any]) -> Selector:
    key, operator, values = raw["key"], raw["operator"], frozenset(raw.get("values") or ())
    known: dict[str, Selector] = {
        "In": lambda labels: labels.get(key) in values,
        "NotIn": lambda labels: labels.get(key) not in values,
        "Exists": lambda labels: key in labels,
        "DoesNotExist": lambda labels: key not in labels,
    }
    # The API server lets no other through; one of a later version must not match by accident.
    return known.get(operator, lambda _labels: False)


def _split(text: str) -> list[str]:
    # Commas inside parentheses separate values, not requirements.
    return re.split(r",(?![^()]*\))", text)


def _requirement(text: str) -> Selector:
    if found := _SET.fullmatch(text):
        key, values = found["key"], {value.strip() for value in found["values"].split(",")}
        if found["how"] == "in":
            return lambda labels: labels.get(key) in values
        # As in Kubernetes: what does not have the label at all is not in the set either.
        return lambda labels: labels.get(key) not in values
    if found := _EQUAL.fullmatch(text):
        key, value = found["key"], found["value"]
        if found["how"] == "!=":
            return lambda labels: labels.get(key) != value
        return lambda labels: labels.get(key) == value
    if found := _PRESENCE.fullmatch(text):
        key, absent = found["key"], bool(found["how"])
        return lambda labels: (key in labels) != absent
    raise UserError(f"unable to parse requirement: {text!r}", reason="BadRequest")
