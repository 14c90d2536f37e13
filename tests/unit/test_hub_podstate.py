"""What a hub that was started anew takes from the object itself."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.hub.podstate import PodState


@pytest.mark.parametrize(
    ("status", "began"),
    [
        ({}, False),
        ({"containerStatuses": [{"name": "a", "state": {"waiting": {}}}]}, False),
        ({"containerStatuses": [{"name": "a", "containerID": "crun://1"}]}, True),
        (
            {"initContainerStatuses": [{"name": "i", "containerID": "crun://2"}], "containerStatuses": [{}]},
            True,
        ),
    ],
)
def test_an_object_that_names_containers_is_not_written_back_to_waiting(
    status: dict[str, Any], began: bool
) -> None:
    metadata = {"name": "p", "namespace": "n", "uid": "u"}
    state = PodState(
        {"metadata": metadata, "spec": {"nodeName": "batch", "containers": []}, "status": status}
    )
    assert state.began_before is began
