"""Label selectors as clients write them in a query: `app=web,tier!=db,env in (a,b),!old`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

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
