"""`slurmlet up` on a cluster that runs: left alone, or started anew where another slurmlet is installed by now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import cluster_start, installed_code
from slurmlet.controlplane.cluster_config import ClusterConfig, now
from slurmlet.controlplane.run_files import (
    ProcessIdentity,
    make_dirs,
    run_files,
    supervisor_code,
    write_supervisor,
)

RECORD = """\
slurmlet/__init__.py,sha256=AAA,10
slurmlet/hub/hub.py,sha256=BBB,10
slurmlet/__pycache__/__init__.cpython-311.pyc,,
slurmlet-0.1.0.dist-info/INSTALLER,sha256=CCC,4
"""


def installed(monkeypatch: pytest.MonkeyPatch, record: str | None) -> str:
    class Distribution:
        version = "0.1.0"

        def read_text(self, name: str) -> str | None:
            assert name == "RECORD"
            return record

    monkeypatch.setattr("importlib.metadata.distribution", lambda _name: Distribution())
    return installed_code.installed_code()


class TestInstalledCode:
    def test_changes_with_any_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = installed(monkeypatch, RECORD)
        assert one.startswith("0.1.0 ")
        assert installed(monkeypatch, RECORD.replace("BBB", "DDD")) != one

    def test_does_not_change_with_what_pip_and_python_add(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one = installed(monkeypatch, RECORD)
        lines = [
            *reversed(RECORD.splitlines()),
            "slurmlet/hub/__pycache__/hub.cpython-311.pyc,,",
            "../../bin/slurmlet,,",
        ]
        assert installed(monkeypatch, "\n".join(lines)) == one

    @pytest.mark.parametrize("record", [None, "__editable__.slurmlet.pth,sha256=AAA,20\n"])
    def test_of_a_checkout_is_the_version(self, monkeypatch: pytest.MonkeyPatch, record: str | None) -> None:
        assert installed(monkeypatch, record) == "0.1.0"


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `up` does, without a cluster."""
    done: list[Any] = []
    monkeypatch.setattr(cluster_start, "installed_code", lambda: "2 bbb")
    monkeypatch.setattr(cluster_start, "stop_supervisor", lambda who: done.append(("stopped", who.pid)))
    monkeypatch.setattr(
        cluster_start,
        "_prepare_and_spawn",
        lambda _files, asked, _steps: done.append(("started", asked.address)),
    )
    monkeypatch.setattr(cluster_start, "_wait_until_usable", lambda *_: ["batch"])
    return done


def running(tmp_path: Path, code: str) -> ClusterFiles:
    files = ClusterFiles(tmp_path / "default")
    make_dirs(files)
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    write_supervisor(run_files(files), me, now(), code)
    ClusterConfig(
        name="default", id="0", created_at=now(), kubernetes="v1", host="login", addresses=("192.0.2.1",),
        api_address="192.0.2.1", api_port=1, etcd_port=2, etcd_peer_port=3, service_range="10.96.0.0/16",
        pod_range="10.244.0.0/16", partitions=None, dns_port=4,
    ).save(files)  # fmt: skip
    return files


def test_a_running_cluster_of_this_version_is_left_alone(tmp_path: Path, acts: list[Any]) -> None:
    files = running(tmp_path, "2 bbb")
    assert cluster_start.up(files).already_running
    assert acts == []


# "": one that was started before supervisors said what they are of
@pytest.mark.parametrize("code", ["1 aaa", "2 aaa", ""])
def test_a_running_cluster_of_another_version_is_started_anew(
    tmp_path: Path, acts: list[Any], code: str
) -> None:
    files = running(tmp_path, code)
    assert supervisor_code(run_files(files)) == code
    assert not cluster_start.up(files).already_running
    # At the address that compute nodes know.
    assert acts == [("stopped", os.getpid()), ("started", "192.0.2.1")]


def test_what_a_running_cluster_is_not_is_said_before_it_is_stopped(tmp_path: Path, acts: list[Any]) -> None:
    files = running(tmp_path, "1 aaa")
    with pytest.raises(Exception, match="other partitions"):
        cluster_start.up(files, partitions=("gpu",))
    assert acts == []
