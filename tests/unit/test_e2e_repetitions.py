"""What counts as a failure when an e2e test passes only the second time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import repetitions

A, B = "tests/e2e/test_pool.py::test_a", "tests/e2e/test_pool.py::test_b[x | y]"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def lists(tmp_path: Path) -> list[str]:
    """Both failed, then only B."""
    (tmp_path / "before").write_text(json.dumps({A: True, B: True}))
    (tmp_path / "after").write_text(json.dumps({B: True}))
    (tmp_path / "known").write_text("# none\n")
    return [str(tmp_path / name) for name in ("before", "after", "known")]


def test_it_fails_in_ci_and_is_told_elsewhere(
    lists: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CI", raising=False)
    assert repetitions.main(lists) == 0
    said = capsys.readouterr().out
    assert A in said
    assert B not in said, "it failed twice; pytest told so"
    monkeypatch.setenv("CI", "true")
    assert repetitions.main(lists) == 1
    assert (
        f"FAILED at first and passed when repeated, which is a failure in CI: {A}" in capsys.readouterr().out
    )


def test_a_listed_one_is_told_with_its_reason(
    lists: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(lists[2]).write_text(f"{A} | slurmctld answers late | 2026-11-16\n")
    monkeypatch.setenv("CI", "true")
    assert repetitions.main(lists) == 0
    assert "since 2026-11-16 (slurmctld answers late)" in capsys.readouterr().out


@pytest.mark.parametrize("line", [A, f"{A} | reason", f"{A} |  | 2026-11-16", f"{A} | reason | soon"])
def test_a_line_without_a_reason_or_a_date_is_refused(lists: list[str], line: str) -> None:
    Path(lists[2]).write_text(f"{line}\n")
    assert repetitions.main(lists) == 2


def test_nothing_failed_the_second_time(
    lists: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytest removes its list then."""
    monkeypatch.setenv("CI", "true")
    assert repetitions.main([lists[0], str(tmp_path / "none"), lists[2]]) == 1
    assert repetitions.main([str(tmp_path / "none"), str(tmp_path / "none"), lists[2]]) == 0


def test_our_own_list_can_be_read_and_names_tests_that_exist() -> None:
    for test in repetitions.read_known((ROOT / "tests/e2e/known-flaky").read_text()):
        path, _, name = test.partition("::")
        assert name.partition("[")[0].rpartition("::")[2] in (ROOT / path).read_text()
