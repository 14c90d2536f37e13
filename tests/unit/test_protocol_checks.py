"""What peers may say: messages of this and the previous version are understood, nonsense is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from slurmlet.protocol import checks, wire
from slurmlet.protocol.version import refusal, version_of
from slurmlet.protocol.wire import ProtocolError
from tests.unit.recorded_messages import (
    AGENT_HELLO,
    FIRST_HELLO,
    GATEWAY_HELLO,
    OF_RUNNERS,
    POD_ENDED,
    REPORT,
    RUNNER_HELLO,
)


class TestVersions:
    @pytest.mark.parametrize("hello", [RUNNER_HELLO, AGENT_HELLO, GATEWAY_HELLO])
    def test_the_first_version_named_its_major_number_alone(self, hello: dict[str, Any]) -> None:
        assert version_of(hello) == (1, 0)

    def test_what_is_no_number_is_no_version(self) -> None:
        assert version_of({"protocol": "1"}) == (0, 0)
        assert version_of({"protocol": 1, "minor": None}) == (0, 0)

    @pytest.mark.parametrize("version", [(2, 3), (2, 4)])
    def test_a_hub_takes_its_own_version_and_the_one_before(self, version: tuple[int, int]) -> None:
        assert refusal(version, own=(2, 4)) == ""

    @pytest.mark.parametrize("version", [(2, 2), (2, 5), (1, 4), (3, 0), (0, 0)])
    def test_others_are_told_what_is_understood(self, version: tuple[int, int]) -> None:
        told = refusal(version, own=(2, 4))
        assert told == f"it speaks protocol {version[0]}.{version[1]}; this hub understands 2.3 to 2.4"

    def test_after_a_new_major_version_only_that_one_is_understood(self) -> None:
        assert refusal((2, 0), own=(2, 0)) == ""
        assert refusal((1, 9), own=(2, 0)) == "it speaks protocol 1.9; this hub understands 2.0"

    def test_this_hub_takes_the_previous_version_s_runners(self) -> None:
        assert refusal(version_of(RUNNER_HELLO)) == ""
        assert (wire.MAJOR, wire.MINOR) == (1, 1), "record the previous version's messages anew"


class TestRecorded:
    @pytest.mark.parametrize("hello", [RUNNER_HELLO, FIRST_HELLO])
    def test_hellos_of_runners(self, hello: dict[str, Any]) -> None:
        assert checks.runner_hello(hello) is hello  # type: ignore[comparison-overlap]

    def test_hellos_of_agents_and_gateways(self) -> None:
        assert checks.agent_hello(AGENT_HELLO)["ended"] == {"77aa": 0}
        assert checks.gateway_hello(GATEWAY_HELLO)["host_ip"] == "10.77.0.10"

    @pytest.mark.parametrize("message", OF_RUNNERS, ids=lambda message: str(message["type"]))
    def test_messages_of_runners(self, message: dict[str, Any]) -> None:
        assert checks.from_runner(message) == message

    def test_messages_of_agents_and_gateways(self) -> None:
        assert checks.from_agent(POD_ENDED) == POD_ENDED
        assert checks.from_gateway(OF_RUNNERS[-1]) == OF_RUNNERS[-1]


class TestNewer:
    def test_types_that_are_not_known_are_ignored(self) -> None:
        assert checks.from_runner({"type": "thoughts", "deep": True}) is None
        assert checks.from_agent({"type": "thoughts"}) is None

    def test_fields_that_are_not_known_are_ignored(self) -> None:
        message = {"type": "report", "seq": 1, "report": {**REPORT, "mood": "fine"}, "more": [1]}
        assert checks.from_runner(message) == message


class TestNonsense:
    @pytest.mark.parametrize(
        ("message", "told"),
        [
            ({"type": "report", "seq": 1}, "report has no report"),
            ({"type": "report", "seq": "1", "report": REPORT}, "report.seq is '1', not int"),
            ({"type": "report", "seq": True, "report": REPORT}, "report.seq is True, not int"),
            ({"type": "report", "seq": 1, "report": []}, "report.report is [], not an object"),
            (
                {"type": "report", "seq": 1, "report": {**REPORT, "phase": "Dreaming"}},
                "report.report.phase is 'Dreaming', not 'Starting' or 'Running' or 'Stopping' or 'Done'",
            ),
            (
                {"type": "report", "seq": 1, "report": {**REPORT, "containers": {"main": {"state": "running"}}}},
                "report.report.containers.main has no container_id, exit_code, finished_at, image, last, message, ready, "
                "reason, restart_count, signal, started, started_at",
            ),
            ({"type": "event", "kind": "Normal", "reason": "A", "message": 1, "container": ""},
             "event.message is 1, not str"),
            ({"type": "answer", "id": None, "usage": None}, "answer.id is None, not int"),
            ({"type": "listeners", "listeners": {"80": "x" * 90}}, f"listeners.listeners.80 is '{'x' * 56}…, not int"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )  # fmt: skip
    def test_is_refused_by_name(self, message: dict[str, Any], told: str) -> None:
        with pytest.raises(ProtocolError) as refused:
            checks.from_runner(message)
        assert str(refused.value) == told

    def test_a_hello_of_somebody_else_is_refused(self) -> None:
        with pytest.raises(ProtocolError, match="hello has no cpus"):
            checks.agent_hello(RUNNER_HELLO)

    @pytest.mark.parametrize("payload", [b"[]", b"null", b"{}", b'{"type": 1}', b"no json", b"\xff"])
    def test_what_is_no_message_is_refused(self, payload: bytes) -> None:
        with pytest.raises(ProtocolError, match="bad control message"):
            wire.parse(payload)

    def test_a_report_on_disk_may_be_cut_short(self) -> None:
        assert checks.pod_report(REPORT)["phase"] == "Running"
        with pytest.raises(ProtocolError, match="report is None, not an object"):
            checks.pod_report(None)
