"""Which containers of a running pod are to become others."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.hub.pods.container_updates import changed_containers
from slurmlet.protocol.pod_report import PodReport
from tests.unit.reports import pod_report

POD = {
    "spec": {
        "initContainers": [{"name": "init", "image": "i:2"}],
        "containers": [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:2"}],
    }
}


def report(**images: str) -> PodReport:
    told = {name: {"image": image} for name, image in images.items()}
    return pod_report(
        {name: one for name, one in told.items() if name != "init"},
        {name: one for name, one in told.items() if name == "init"},
    )


@pytest.mark.parametrize(
    ("told", "sent", "changed"),
    [
        (report(init="i:2", a="a:1", b="b:2"), {}, []),
        (report(init="i:1", a="a:1", b="b:1"), {}, ["init", "b"]),
        (report(init="i:2", a="a:1", b="b:1"), {"b": "b:2"}, []),
        # Handed over, and changed once more since.
        (report(init="i:2", a="a:1", b="b:0"), {"b": "b:1"}, ["b"]),
        # A container that the runner does not know, a runner that has no pod yet.
        (report(a="a:1"), {}, []),
        (None, {}, []),
    ],
)
def test_what_the_runner_has_counts(told: Any, sent: dict[str, str], changed: list[str]) -> None:
    assert [one["name"] for one in changed_containers(POD, told, sent)] == changed
