"""Signs of life between hosts that share a home: who may start a supervisor, who may forget one, who must end."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import heartbeat
from slurmlet.controlplane.heartbeat import Heartbeat, TakenError
from slurmlet.controlplane.run_files import ElsewhereError, make_dirs, run_files, running_supervisor


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat.json"


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beats come when a test asks for them."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.0)
    monkeypatch.setattr(heartbeat, "_POLL_S", 0.01)
    monkeypatch.setattr(heartbeat, "_WATCH_S", 0.02)


def claimed(path: Path, host: str) -> Heartbeat:
    made = Heartbeat(path, host, 7)
    made.claim()
    return made


def make_old(path: Path) -> None:
    os.utime(path, (1, 1))


def alive(path: Path) -> bool:
    return heartbeat.is_alive(path)


def test_a_fresh_sign_is_a_life_and_an_old_one_that_stays_old_is_not(path: Path) -> None:
    assert not alive(path)
    claimed(path, "login1")
    assert alive(path)
    make_old(path)
    assert not alive(path)


def test_an_old_sign_that_changes_is_a_life_whatever_its_clock_says(path: Path) -> None:
    one = claimed(path, "login1")
    make_old(path)

    def sleep(_: float) -> None:
        one.beat()
        make_old(path)

    assert heartbeat.is_alive(path, sleep)


def test_a_broken_file_is_no_sign(path: Path) -> None:
    path.write_text("{")
    assert heartbeat.read(path) is None
    assert not alive(path)


def test_no_second_supervisor_while_another_host_has_one(path: Path) -> None:
    one = claimed(path, "login1")
    with pytest.raises(TakenError, match=r"this cluster is running on login1, not on this host \(login2\)"):
        claimed(path, "login2")
    one.beat()
    sign = heartbeat.read(path)
    assert sign is not None
    assert (sign.host, sign.number) == ("login1", 1)


def test_the_same_host_claims_at_once_because_its_lock_tells_that_the_last_one_is_dead(path: Path) -> None:
    dead = claimed(path, "login1")
    again = claimed(path, "login1")
    again.beat()
    sign = heartbeat.read(path)
    assert sign is not None
    assert sign.number == 1, "it beats as the one that has the cluster"
    with pytest.raises(TakenError):
        dead.beat()


def test_of_two_hosts_that_start_at_once_one_gets_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both looked before either wrote."""
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: claim_of_the_other())

    def claim_of_the_other() -> None:
        monkeypatch.undo()
        claimed(path, "login1")

    with pytest.raises(TakenError, match="login1"):
        claimed(path, "login2")
    sign = heartbeat.read(path)
    assert sign is not None
    assert sign.host == "login1"


def test_one_that_was_taken_over_learns_it_at_its_next_beat_and_leaves_the_other_alone(path: Path) -> None:
    old = claimed(path, "login1")
    make_old(path)
    new = claimed(path, "login2")
    with pytest.raises(TakenError, match="login2"):
        old.beat()
    assert not old.release()
    new.beat()
    assert new.release()
    assert not path.exists()


def test_one_that_was_given_up_by_force_ends_if_it_lives_after_all(path: Path) -> None:
    old = claimed(path, "login1")
    heartbeat.give_up(path, "login2")
    assert heartbeat.read(path) is None
    with pytest.raises(TakenError, match="login2"):
        old.beat()


def test_a_home_that_is_away_ends_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    one = claimed(folder / "heartbeat.json", "login1")
    folder.rename(tmp_path / "away")
    one.beat()
    (tmp_path / "away").rename(folder)
    one.beat()
    assert json.loads((folder / "heartbeat.json").read_text())["number"] == 2


def test_a_lost_record_does_not_hide_a_supervisor_on_another_host(tmp_path: Path) -> None:
    files = ClusterFiles(tmp_path / "home" / "exp")
    make_dirs(files)
    claimed(run_files(files).heartbeat, "login2")
    with pytest.raises(ElsewhereError, match="login2"):
        running_supervisor(files, "up")
    make_old(run_files(files).heartbeat)
    assert running_supervisor(files, "up") is None
