from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.run_files import (
    ElsewhereError,
    ProcessIdentity,
    lifecycle_lock,
    make_dirs,
    read_supervisor,
    run_files,
    running_supervisor,
    write_supervisor,
)


@pytest.fixture
def files(tmp_path: Path) -> ClusterFiles:
    files = ClusterFiles(tmp_path / "home" / "exp")
    make_dirs(files)
    return files


def test_a_process_is_itself_and_no_other() -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    assert me.alive()
    assert not dataclasses.replace(me, start_ticks=me.start_ticks + 1).alive()
    assert not dataclasses.replace(me, boot_id="another boot").alive()
    assert not dataclasses.replace(me, host="another-host").alive()


def test_a_zombie_is_not_alive() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        who = ProcessIdentity.of(child.pid)
        assert who is not None
        assert who.alive()
        who.send(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert Path(f"/proc/{child.pid}").exists()
        assert not who.alive()


def test_no_signal_reaches_a_process_that_took_over_the_number() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        who = ProcessIdentity.of(child.pid)
        assert who is not None
        dataclasses.replace(who, start_ticks=who.start_ticks - 1).send(signal.SIGKILL)
        time.sleep(0.05)
        assert child.poll() is None
        child.kill()


def test_record_is_read_back(files: ClusterFiles) -> None:
    me = ProcessIdentity.of(os.getpid())
    assert me is not None
    assert running_supervisor(files, "status") is None
    write_supervisor(run_files(files), me, "2026-01-01T00:00:00Z")
    assert read_supervisor(run_files(files)) == (me, "2026-01-01T00:00:00Z")
    assert running_supervisor(files, "status") == (me, "2026-01-01T00:00:00Z")


def test_a_cluster_on_another_host_is_named_with_the_way_there(files: ClusterFiles) -> None:
    there = ProcessIdentity(1, 1, "boot", "login2")
    write_supervisor(run_files(files), there, "2026-01-01T00:00:00Z")
    with pytest.raises(ElsewhereError) as caught:
        running_supervisor(files, "down")
    assert "ssh login2 slurmlet down -c exp" in caught.value.hint


def test_second_lifecycle_command_waits(files: ClusterFiles, capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []

    def second() -> None:
        with lifecycle_lock(files):
            order.append("second")

    with lifecycle_lock(files):
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(5)
    assert order == ["first", "second"]
    assert "is running; waiting" in capsys.readouterr().err
