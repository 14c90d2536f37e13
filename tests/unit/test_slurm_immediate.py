"""An srun that is told from what it says, and let go of without its job. The programs here only speak like srun."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm import immediate
from slurmlet.slurm.configuration import capabilities_of
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


@pytest.mark.parametrize(
    "words",
    ["Node c1, 1 tasks started", "launch/slurm: _task_start: Node c1, 1 tasks started"],
    ids=["24.11", "22.05"],
)
def test_the_start_is_heard_in_the_words_of_each_version(
    tmp_path: Path, speaking: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    """22.05 puts the name of a plugin before them: no pod ever started at once there."""
    monkeypatch.setattr(immediate, "_START_S", 2.0)
    srun(tmp_path, GRANTED, f"echo 'srun: {words}' >&2", "exec sleep 60")
    launch = Launch([], ["/bin/true"], speaking)
    launch.started(launch.granted())


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


SPEC = JobSpec("p.ns.c", "", comment="slurmlet:0:u", directory="/tmp", cpus_per_task=2, memory_mb=50)


def said(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / f"{name}.argv").read_text().split("\n")[:-1]


def program(tmp_path: Path, name: str, *lines: str) -> None:
    path = tmp_path / name
    told = f"printf '%s\\n' \"$@\" > {tmp_path}/{name}.argv"
    path.write_text("\n".join(["#!/bin/sh", told, *lines, ""]))
    path.chmod(0o700)


def test_where_slurm_looks_after_steps_itself_nobody_is_killed(
    tmp_path: Path, speaking: dict[str, str]
) -> None:
    """26.05: salloc asks, srun hands the task in (srun(1), salloc(1) of 26.05); no such Slurm has been tried."""
    program(tmp_path, "salloc", "echo 'salloc: Granted job allocation 123' >&2")
    program(tmp_path, "srun", "echo 123.0")
    assert immediate.start(SPEC, ["/bin/true", "x"], speaking, async_steps=True) == "123"
    asked, handed = said(tmp_path, "salloc"), said(tmp_path, "srun")
    assert asked[:3] == ["--immediate", "--no-shell", "--stepmgr"]
    assert {"--comment=slurmlet:0:u", "--mem=50M", "--cpus-per-task=2"} <= set(asked)
    assert "--export=ALL" not in asked, "salloc does not know it"
    assert handed[:3] == ["--jobid=123", "--async", "--parsable"]
    assert handed[-2:] == ["/bin/true", "x"]
    assert "--immediate" not in handed, "Slurm refuses the two together"


def test_a_refused_allocation_is_for_the_queue(tmp_path: Path, speaking: dict[str, str]) -> None:
    program(
        tmp_path, "salloc", "echo 'salloc: error: Job submit/allocate failed: Nodes are busy' >&2", "exit 1"
    )
    with pytest.raises(NotNow, match="Nodes are busy"):
        immediate.start(SPEC, ["/bin/true"], speaking, async_steps=True)


def test_an_allocation_whose_step_is_refused_is_ended(tmp_path: Path, speaking: dict[str, str]) -> None:
    program(tmp_path, "salloc", "echo 'salloc: Granted job allocation 123' >&2")
    program(tmp_path, "srun", "echo 'srun: error: stepmgr is not enabled' >&2", "exit 1")
    program(tmp_path, "scancel")
    with pytest.raises(LaunchFailed, match="stepmgr is not enabled") as failed:
        immediate.start(SPEC, ["/bin/true"], speaking, async_steps=True)
    assert failed.value.job_id == "123"
    assert said(tmp_path, "scancel") == ["123"]


@pytest.mark.parametrize(
    ("version", "more", "has"),
    [
        ("26.05.3", {"SlurmctldParameters": "a,enable_stepmgr"}, True),
        ("26.05.3", {"PrologFlags": "Alloc,Contain"}, True),
        ("26.05.3", {}, False),
        ("25.11.0", {"PrologFlags": "Contain"}, False),
        ("unknown", {"PrologFlags": "Contain"}, False),
    ],
)
def test_who_has_steps_that_nobody_waits_for(version: str, more: dict[str, str], has: bool) -> None:
    assert capabilities_of({"SLURM_VERSION": version, **more}).async_steps is has
