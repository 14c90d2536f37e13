"""runc in the cluster's own directory, where runners on compute nodes look for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError
from slurmlet.base.layout import ClusterFiles
from slurmlet.runner.containers.oci_runtime import NoRuntime, find_runtime
from slurmlet.upstream import static_runc
from slurmlet.upstream.binaries import DIRECTORY_VARIABLE


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterFiles:
    """A cluster of a user with an empty cache, on a host with no runtime."""
    monkeypatch.setenv("SLURMLET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    return ClusterFiles(tmp_path / "exp")


def upstream(tmp_path: Path, text: str = "one") -> Path:
    path = tmp_path / "upstream" / "runc"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def test_a_node_without_crun_finds_what_up_provided(
    files: ClusterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(upstream(tmp_path).parent))
    with pytest.raises(NoRuntime):
        find_runtime(str(files.root))
    static_runc.write_for(files)
    # What reaches the login host's processes need not reach jobs.
    monkeypatch.delenv(DIRECTORY_VARIABLE)
    found = Path(find_runtime(str(files.root)))
    assert found == files.root / "bin" / "runc"
    assert found.stat().st_mode & 0o777 == 0o700


def test_it_follows_the_upstream_binary_and_is_copied_only_then(
    files: ClusterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = upstream(tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(source.parent))
    target = files.libraries / "runc"
    static_runc.write_for(files)
    before = target.stat().st_ino
    static_runc.write_for(files)
    assert target.stat().st_ino == before
    source.write_text("two")
    os.utime(source, (1, 1))
    static_runc.write_for(files)
    assert target.read_text() == "two"
    assert target.stat().st_ino != before, "a pod that runs with the old one keeps it"


def test_a_cluster_starts_without_it_and_a_failed_download_is_not_tried_at_each_start(
    files: ClusterFiles, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = []

    def fails(names: list[str]) -> list[object]:
        tries.append(names)
        raise SiteError("github.com cannot be reached")

    monkeypatch.setattr(static_runc, "inventory", fails)
    static_runc.write_for(files)
    assert (
        "will not run on compute nodes without crun: github.com cannot be reached" in capsys.readouterr().err
    )
    static_runc.write_for(files)
    assert tries == [["runc"]]
    assert "slurmlet upstream" in capsys.readouterr().err
    os.utime(files.libraries / "runc.failed", (1, 1))
    static_runc.write_for(files)
    assert len(tries) == 2, "tried again the next day"


def test_in_a_job_whose_host_has_crun_nothing_is_copied(
    files: ClusterFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(upstream(tmp_path).parent))
    crun = tmp_path / "empty" / "crun"
    crun.parent.mkdir()
    crun.touch(mode=0o755)
    static_runc.write_for_this_host(files.libraries)
    assert not (files.libraries / "runc").exists()
    crun.unlink()
    static_runc.write_for_this_host(files.libraries)
    assert (files.libraries / "runc").exists()
