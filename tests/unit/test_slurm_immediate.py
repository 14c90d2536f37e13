"""An srun that is told from what it says, and let go of without its job. The programs here only speak like srun."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.slurm import immediate
from slurmlet.slurm.immediate import Launch, LaunchFailed, NotNow, libraries, parse_status, parse_steps

GRANTED = 'echo "srun: jobid 123: nodes(1):\\`c1\', cpu counts: 1(x1)" >&2'
STARTED = 'echo "srun: Node c1, 1 tasks started" >&2'


@pytest.fixture
def speaking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return {"PATH": os.environ["PATH"]}


def srun(tmp_path: Path, *lines: str) -> None:
    program = tmp_path / "srun"
    program.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    program.chmod(0o700)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_a_started_job_is_let_go_of_watcher_first(tmp_path: Path, speaking: dict[str, str]) -> None:
    """The watcher here would tell on srun's death: it must not live to see it."""
    watcher = (
        "sh -c 'echo $$ > watcher; while kill -0 $0 2>/dev/null; do sleep 0.01; done; touch saw-it' $$ &"
    )
    srun(tmp_path, f"cd {tmp_path}", "echo $$ > srun-pid", watcher, GRANTED, "sleep 0.1", STARTED, "sleep 60")
    launch = Launch(["--mem=1M"], ["/bin/true"], speaking)
    job_id = launch.granted()
    assert job_id == "123"
    launch.started(job_id)
    pids = [int((tmp_path / name).read_text()) for name in ("watcher", "srun-pid")]
    time.sleep(0.1)
    assert not any(alive(pid) for pid in pids)
    assert not (tmp_path / "saw-it").exists()


def test_a_refusal_is_told_in_srun_s_words(tmp_path: Path, speaking: dict[str, str]) -> None:
    said = "srun: error: Unable to allocate resources: Requested nodes are busy"
    srun(tmp_path, f"echo '{said}' >&2", "exit 1")
    with pytest.raises(NotNow, match=r"^Unable to allocate resources: Requested nodes are busy$"):
        Launch([], ["/bin/true"], speaking).granted()


def test_a_task_that_does_not_start_names_its_job(tmp_path: Path, speaking: dict[str, str]) -> None:
    srun(tmp_path, GRANTED, "echo 'srun: error: Task launch failed' >&2", "exit 1")
    launch = Launch([], ["/bin/true"], speaking)
    with pytest.raises(LaunchFailed, match="Task launch failed") as failed:
        launch.started(launch.granted())
    assert failed.value.job_id == "123"


def test_an_srun_that_says_nothing_is_ended(
    tmp_path: Path, speaking: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(immediate, "_GRANT_S", 0.2)
    srun(tmp_path, f"echo $$ > {tmp_path}/pid", "exec sleep 60")
    with pytest.raises(SlurmError) as error:
        Launch([], ["/bin/true"], speaking).granted()
    assert error.value.transient, "it may have succeeded: Slurm is asked before another try"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_no_srun_at_all(tmp_path: Path) -> None:
    with pytest.raises(NotNow):
        Launch([], ["/bin/true"], {"PATH": str(tmp_path)})


def test_steps_of_slurm_s_own_do_not_count() -> None:
    assert parse_steps("12.0\n13.extern\n14.batch\n\n15.extern\n15.3\n") == {"12", "14", "15"}


def test_the_status_of_a_step_is_a_wait_status() -> None:
    said = "12|0:0\n12.extern|0:0\n12.0|7:0\n"
    assert parse_status(JobId("12"), said) == 7 << 8
    assert parse_status(JobId("12"), "12.0|0:9\n") == 9
    assert parse_status(JobId("13"), said) is None


def test_the_library_is_looked_for_beside_the_plugins(tmp_path: Path) -> None:
    (tmp_path / "libslurmfull.so").touch()
    assert list(libraries(f"/nowhere:{tmp_path}")) == [f"{tmp_path}/libslurmfull.so", "libslurm.so"]
