"""Shared texts change nothing but memory."""

from __future__ import annotations

import json

from slurmlet.kube.string_pool import Sharer

POD = {
    "metadata": {"name": "a", "labels": {"app": "hello"}},
    "spec": {"containers": [{"name": "main", "n": 1}]},
}


def test_the_value_stays_the_same_and_equal_words_become_one() -> None:
    sharer = Sharer()
    first, second = (sharer.shared(json.loads(json.dumps(POD))) for _ in range(2))
    assert first == second == POD
    assert first["metadata"]["labels"]["app"] is second["metadata"]["labels"]["app"]


def test_long_texts_are_not_remembered() -> None:
    sharer = Sharer()
    first, second = (sharer.shared({"data": "x" * 1000 + str(0)})["data"] for _ in range(2))
    assert first == second
    assert first is not second
