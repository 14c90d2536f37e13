"""The page of the protocol and its types say the same."""

from __future__ import annotations

from tests.unit.protocol_page import PAGE, page


def test_the_page_is_the_types() -> None:
    assert PAGE.read_text() == page(), "run `make protocol`"


def test_the_page_shows_each_kind_of_field() -> None:
    shown = page()
    assert "restarting_all?: bool" in shown  # one that may be absent
    assert "init_containers: [ContainerPlan, …]" in shown
    assert "phase: Phase" in shown
    assert "peers: [[str, [str, …]], …] | null" in shown
