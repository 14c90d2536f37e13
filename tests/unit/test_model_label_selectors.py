"""Label selectors in their query form."""

from __future__ import annotations

import pytest

from slurmlet.base.errors import UserError
from slurmlet.model.label_selectors import compiled, parse

LABELS = {"app": "web", "tier": "front", "example.com/x": ""}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("", True), ("app=web", True), ("app==web", True), ("app=db", False), ("app!=db", True), ("app!=web", False),
        ("new!=x", True), ("app=web,tier=front", True), ("app=web,tier=back", False), ("app", True), ("nope", False),
        ("!nope", True), ("!app", False), ("app in (web,db)", True), ("app in ( db , web )", True), ("app in (db)", False),
        ("app notin (db)", True), ("app notin (web)", False), ("nope notin (a)", True), ("example.com/x=", True),
        ("app in (a,web),tier in (front)", True), ("example.com/x in ()", True), ("app = web , tier", True),
    ],
)  # fmt: skip
def test_what_matches(text: str, matches: bool) -> None:
    assert parse(text)(LABELS) is matches


@pytest.mark.parametrize("text", ["=x", "app in web", "a b", "app>3x", "app in (a"])
def test_what_is_none(text: str) -> None:
    with pytest.raises(UserError):
        parse(text)


def some(key: str, operator: str, *values: str) -> dict[str, object]:
    return {"matchExpressions": [{"key": key, "operator": operator, "values": list(values)}]}


@pytest.mark.parametrize(
    ("selector", "matches"),
    [
        ({}, True), ({"matchLabels": {"app": "web"}}, True), ({"matchLabels": {"app": "web", "tier": "back"}}, False),
        (some("app", "In", "web", "db"), True), (some("nope", "In", "web"), False), (some("app", "NotIn", "web"), False),
        (some("nope", "NotIn", "web"), True), (some("app", "Exists"), True), (some("nope", "Exists"), False),
        (some("app", "DoesNotExist"), False), (some("nope", "DoesNotExist"), True), (some("app", "Gt", "1"), False),
        ({"matchLabels": {"app": "web"}, **some("tier", "In", "back")}, False),
    ],
)  # fmt: skip
def test_what_an_object_s_selector_matches(selector: dict[str, object], matches: bool) -> None:
    assert compiled(selector)(LABELS) is matches
