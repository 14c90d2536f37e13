from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest

from slurmlet.base.files import private_dir, write_private
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.cluster_status import age, clusters, status
from slurmlet.controlplane.run_files import ProcessIdentity, make_dirs, run_files, write_supervisor

NOW = datetime.datetime(2026, 1, 10, tzinfo=datetime.UTC)


def cluster(home: Path, name: str) -> ClusterFiles:
    files = ClusterFiles(home / name)
    make_dirs(files)
    ClusterConfig(
        name,
        "0a1b2c3d",
        "2026-01-01T00:00:00Z",
        "v1.36.3",
        "login1",
        (),
        "192.0.2.9",
        1,
        2,
        3,
        "10.96.0.0/16",
        None,
    ).save(files)
    return files


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("", "-"),
        ("2026-01-09T23:59:15Z", "45s"),
        ("2026-01-09T23:50:00Z", "10m"),
        ("2026-01-09T00:00:00Z", "24h"),
        ("2026-01-01T00:00:00Z", "9d"),
        ("2026-01-10T00:00:09Z", "0s"),
    ],
)
def test_age(since: str, expected: str) -> None:
    assert age(since, NOW) == expected


def test_ls_tells_running_stopped_elsewhere_and_broken_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMLET_HOME", str(tmp_path / "home"))
    assert clusters() == []
    home = private_dir(tmp_path / "home")
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    write_supervisor(run_files(cluster(home, "alive")), me, "2026-01-01T00:00:00Z")
    crashed = ProcessIdentity(me.pid, me.start_ticks + 1, me.boot_id, me.host)
    write_supervisor(run_files(cluster(home, "crashed")), crashed, "2026-01-01T00:00:00Z")
    there = ProcessIdentity(1, 1, "boot", "login2")
    write_supervisor(run_files(cluster(home, "far")), there, "2026-01-01T00:00:00Z")
    cluster(home, "idle")
    write_private(private_dir(home / "torn") / "cluster.json", '{"name": "torn"}')
    private_dir(home / "_store")
    private_dir(home / "stray")
    seen = {line.name: (line.state, line.host) for line in clusters()}
    assert seen == {
        "alive": ("running", me.host),
        "crashed": ("stopped", "login1"),
        "far": ("elsewhere", "login2"),
        "idle": ("stopped", "login1"),
        "torn": ("broken", ""),
    }


def test_status_of_a_stopped_cluster_needs_neither_api_nor_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    state = status(cluster(tmp_path / "home", "idle"))
    assert not state.running
    assert state.jobs is None
    assert json.dumps(state.config.id) == '"0a1b2c3d"'
