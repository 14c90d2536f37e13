"""Conditions: time moves with the status only; a status that says all already is not written."""

from __future__ import annotations

from typing import Any

from slurmlet.kube.conditions import Condition, is_true, merged, status_patch

READY = Condition("Ready", True, "AllGood", "fine")


def obj(*conditions: dict[str, Any], **status: Any) -> dict[str, Any]:
    metadata = {"name": "a", "generation": 3, "resourceVersion": "77"}
    return {"metadata": metadata, "status": {"conditions": list(conditions), **status}}


def test_a_new_condition_has_all_that_the_api_asks_for() -> None:
    assert merged([], [READY], 3, "T1") == [
        {
            "type": "Ready", "status": "True", "reason": "AllGood", "message": "fine", "observedGeneration": 3,
            "lastTransitionTime": "T1",
        }
    ]  # fmt: skip


def test_the_transition_time_moves_only_with_the_status() -> None:
    first = merged([], [READY], 1, "T1")
    same = merged(first, [Condition("Ready", True, "StillGood", "other words")], 2, "T2")
    assert (same[0]["lastTransitionTime"], same[0]["reason"], same[0]["observedGeneration"]) == (
        "T1",
        "StillGood",
        2,
    )
    unknown = merged(same, [Condition("Ready", None, "Lost")], 2, "T3")
    assert (unknown[0]["status"], unknown[0]["lastTransitionTime"]) == ("Unknown", "T3")


def test_conditions_of_others_stay_in_their_places() -> None:
    theirs = {"type": "Theirs", "status": "False", "reason": "X", "lastTransitionTime": "T0", "extra": 1}
    found = merged([theirs, *merged([], [READY], 1, "T1")], [Condition("Ready", False, "Bad")], 2, "T2")
    assert found[0] == theirs
    assert (found[1]["type"], found[1]["status"]) == ("Ready", "False")


def test_only_a_difference_is_written_and_only_on_the_version_it_was_made_for() -> None:
    change = status_patch(obj(), READY, replicas=2)
    assert change is not None
    assert change["metadata"] == {"resourceVersion": "77"}
    written = {**obj(), "status": change["status"]}
    assert status_patch(written, READY, replicas=2) is None
    assert status_patch(written, READY, replicas=3) is not None
    newer = {**written, "metadata": {**written["metadata"], "generation": 4}}
    again = status_patch(newer, READY, replicas=2)
    assert again is not None
    assert again["status"]["conditions"][0]["observedGeneration"] == 4
    assert is_true(written, "Ready")
    assert not is_true(written, "Other")
