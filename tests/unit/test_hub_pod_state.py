"""What is asked of all that a hub knows of a pod."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from slurmlet.hub.pods.pod_state import PodState
from slurmlet.model.job_states import Fate, Stage
from slurmlet.protocol.pod_report import PodReport
from tests.unit.reports import pod_report

POD = {
    "metadata": {"name": "p", "namespace": "n", "uid": "u"},
    "spec": {"nodeName": "batch", "containers": []},
}


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


def reported(*states: str, problem: Any = None) -> dict[str, Any]:
    containers = {str(number): {"state": state} for number, state in enumerate(states)}
    return {"containers": containers, "init_containers": {}, "problem": problem}


class TestNews:
    """Of a pod that is being started the next news are awaited, for a moment, and what is known is not written."""

    @pytest.fixture
    def state(self) -> PodState:
        made = PodState(POD)
        made.expect_news(60)
        return made

    def test_they_are_awaited_until_something_begins(self, state: PodState) -> None:
        assert 59 < state.news_in_s <= 60
        state.report = reported("waiting", "waiting")
        assert state.news_in_s > 0
        state.report = reported("waiting", "running")
        assert state.news_in_s == 0

    def test_only_for_so_long(self, state: PodState) -> None:
        state.expect_news(-1)
        assert state.news_in_s == 0

    def test_without_a_start_there_are_none(self) -> None:
        assert PodState(POD).news_in_s == 0

    def test_what_went_wrong_is_told_at_once(self, state: PodState) -> None:
        state.report = reported("waiting", problem={"reason": "NodeNotUsable", "message": "no crun"})
        assert state.news_in_s == 0

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("waiting", {"": ("SlurmUnavailable", "away")}),
            ("refused", ("SlurmRefused", "no")),
            ("failed", ("DeadlineExceeded", "late")),
            ("fate", Fate(Stage.ENDED)),
        ],
    )
    def test_nor_does_anything_else_wait_that_people_should_know(
        self, state: PodState, name: str, value: Any
    ) -> None:
        setattr(state, name, value)
        assert state.news_in_s == 0


class TestStillborn:
    """Pods that end before anything of them ran slow their controller down."""

    NO_ROOM: ClassVar = {"reason": "CreateContainerError", "message": "no room"}

    @pytest.mark.parametrize(
        ("report", "never_started"),
        [
            (pod_report({"c": {"state": "waiting"}}, phase="Done", problem=NO_ROOM), True),
            (pod_report(phase="Done", problem={"reason": "NodeNotUsable", "message": ""}), True),
            (pod_report({"c": {"container_id": "crun://1"}}, phase="Done", problem=NO_ROOM), False),
            (pod_report({"c": {"state": "waiting"}}, problem=NO_ROOM), False),
            # Deleted, or ended by Slurm, before it began.
            (pod_report({"c": {"state": "waiting"}}, phase="Done"), False),
            (pod_report(phase="Done", problem={"reason": "Terminated", "message": ""}), False),
        ],
        ids=["not created", "node not usable", "it ran", "not over", "deleted", "signalled"],
    )
    def test_by_what_the_runner_told(self, report: PodReport, never_started: bool) -> None:
        state = PodState(POD)
        state.report = report
        assert state.never_started is never_started

    def test_by_a_job_that_ended_without_a_word(self) -> None:
        state = PodState(POD)
        assert not state.never_started
        state.fate = Fate(Stage.ENDED)
        assert state.never_started
