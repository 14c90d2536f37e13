from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_json
from slurmlet.base.host_addresses import host_name
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.cluster_jobs import end_jobs, jobs_of
from slurmlet.controlplane.cluster_stop import down, remove_tree
from slurmlet.controlplane.heartbeat import Heartbeat
from slurmlet.controlplane.run_files import (
    ProcessIdentity,
    make_dirs,
    run_files,
    start_ticks,
    write_supervisor,
)
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import Job
from slurmlet.slurm.fake import FakeSlurm

ID = "0a1b2c3d"


def job(number: str, comment: str, state: str = "RUNNING") -> Job:
    return Job(JobId(number), state, "", "c1", "batch", comment)


def slurm_with(*jobs: Job) -> FakeSlurm:
    slurm = FakeSlurm()
    slurm.queue = list(jobs)
    return slurm


def test_only_live_jobs_of_this_cluster_are_ours() -> None:
    slurm = slurm_with(
        job("1", f"slurmlet:{ID}:uid-a default/web"),
        job("2", f"slurmlet:{ID}:uid-b", "PENDING"),
        job("3", f"slurmlet:{ID}:uid-c", "COMPLETED"),
        job("4", "slurmlet:ffffffff:uid-d"),
        job("5", f"see slurmlet:{ID}:uid-e"),
        job("6", ""),
    )
    assert [found.job_id for found in asyncio.run(jobs_of(ID, slurm))] == ["1", "2"]
    assert asyncio.run(end_jobs(ID, slurm)) == 2
    assert slurm.cancelled == ["1", "2"]


def test_waits_until_jobs_are_gone_and_catches_late_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmlet.controlplane.cluster_jobs._AGAIN_S", 0.0)
    monkeypatch.setattr("slurmlet.controlplane.cluster_jobs._POLL_S", 0.001)
    slurm = slurm_with(job("1", f"slurmlet:{ID}:a"))
    slurm.cancels_at_once = False

    def pass_time() -> None:
        if slurm.looks == 2:
            slurm.queue.append(job("2", f"slurmlet:{ID}:b"))
        if slurm.looks == 4:
            slurm.cancels_at_once = True

    slurm.hooks["jobs"] = pass_time
    assert asyncio.run(end_jobs(ID, slurm)) == 2
    assert {one.state for one in slurm.queue} == {"CANCELLED"}


def test_jobs_that_never_end_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slurmlet.controlplane.cluster_jobs._POLL_S", 0.001)
    slurm = slurm_with(job("77", f"slurmlet:{ID}:a"))
    slurm.cancels_at_once = False
    with pytest.raises(SlurmletError, match="77"):
        asyncio.run(end_jobs(ID, slurm, limit_s=0.05))


@pytest.fixture
def files(tmp_path: Path) -> ClusterFiles:
    files = ClusterFiles(tmp_path / "home" / "exp")
    make_dirs(files)
    ClusterConfig("exp", ID, "", "v1.36.3", "login1", (), "192.0.2.9", 1, 2, 3, "10.96.0.0/16", None).save(
        files
    )
    return files


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty queue: a real program on the PATH."""
    binaries = private_dir(tmp_path / "bin")
    program = binaries / "squeue"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{binaries}:/usr/bin:/bin")
    return program


def test_leftover_component_of_a_dead_supervisor_is_ended(files: ClusterFiles, squeue: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as left:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as foreign:
            state = {"pid": left.pid, "start_ticks": start_ticks(left.pid), "restarts": 0}
            # This number belongs to somebody else by now.
            reused = {"pid": foreign.pid, "start_ticks": (start_ticks(foreign.pid) or 0) - 1, "restarts": 0}
            write_json(run_files(files).components, {"etcd": state, "hub": reused})
            done = down(files)
            assert left.wait(1) != 0
            assert foreign.poll() is None
            foreign.kill()
    assert not done.was_running
    assert files.config.exists()
    assert not run_files(files).components.exists()


def test_silent_slurm_is_told_and_keeps_the_data(files: ClusterFiles, squeue: Path) -> None:
    squeue.write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Unable to contact slurm controller' >&2\nexit 1\n"
    )
    with pytest.raises(SlurmletError, match="may still run"):
        down(files, purge=True)
    assert files.config.exists()


def test_purge_removes_read_only_trees_too(files: ClusterFiles, squeue: Path) -> None:
    deep = private_dir(files.pods / "uid" / "volume")
    (deep / "file").write_text("x")
    deep.chmod(0o500)
    deep.parent.chmod(0o500)
    assert down(files, purge=True).purged
    assert not files.root.exists()
    assert files.root.parent.exists()


def test_removing_a_tree_leaves_what_its_links_point_to(tmp_path: Path) -> None:
    outside = private_dir(tmp_path / "outside")
    (outside / "precious").write_text("x")
    (private_dir(tmp_path / "tree") / "link").symlink_to(outside)
    remove_tree(tmp_path / "tree")
    assert (outside / "precious").exists()


def test_a_cluster_that_lives_on_another_host_is_not_forgotten_even_by_force(
    files: ClusterFiles, squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_files(files)
    write_supervisor(run, ProcessIdentity(os.getpid(), 1, "boot", "login2"), "2026-01-01T00:00:00Z")
    Heartbeat(run.heartbeat, "login2", 7).claim()
    with pytest.raises(SlurmletError, match="alive on login2") as refused:
        down(files, force=True)
    assert "ssh login2 slurmlet down -c exp" in refused.value.hint
    assert run.supervisor.exists()
    monkeypatch.setattr("slurmlet.controlplane.heartbeat._WATCH_S", 0.5)
    os.utime(run.heartbeat, (1, 1))
    down(files, force=True)
    assert not run.supervisor.exists()
    assert json.loads(run.heartbeat.read_text()) == {"ended_by": host_name()}, "should it live after all"


def test_pids_that_another_host_recorded_are_nobodys_here(files: ClusterFiles, squeue: Path) -> None:
    run = run_files(files)
    write_supervisor(run, ProcessIdentity(1, 1, "boot", "login2"), "2026-01-01T00:00:00Z")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as mine:
        state = {"pid": mine.pid, "start_ticks": start_ticks(mine.pid), "restarts": 0}
        write_json(run.components, {"etcd": state})
        down(files, force=True)
        assert mine.poll() is None
        mine.kill()


def test_another_hosts_cluster_is_forgotten_by_force_only(files: ClusterFiles, squeue: Path) -> None:
    write_supervisor(
        run_files(files), ProcessIdentity(os.getpid(), 1, "boot", "login2"), "2026-01-01T00:00:00Z"
    )
    with pytest.raises(SlurmletError, match="login2"):
        down(files)
    down(files, force=True)
    assert not run_files(files).supervisor.exists()
