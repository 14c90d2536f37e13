"""The subcommands of runner.pyz as processes, with a library that stands in for Slurm's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slurmlet.entrypoint import job_completion
from slurmlet.entrypoint.main import USAGE

# Notes each end of a job that it is told of; answers with the errors that `fail` lists, one by one, and then well.
LIBSLURM = """
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
static int number;
void slurm_init(const char *configuration) { (void)configuration; }
long slurm_api_version(void) { return API << 16; }
int slurm_get_errno(void) { return number; }
#if API >= 44
typedef struct { uint64_t sluid; uint32_t job, component, step; } job_t;
int slurm_complete_job(job_t *id, uint32_t status) { uint32_t job = id->job;
#else
int slurm_complete_job(uint32_t job, uint32_t status) {
#endif
    static int calls;
    const char *fail = getenv("FAIL");
    FILE *told = fopen(getenv("TOLD"), "a");
    fprintf(told, "%u %u\\n", job, status);
    fclose(told);
    for (int i = 0; fail && i < calls; i++) { while (*fail && *fail != ',') fail++; if (*fail) fail++; }
    calls++;
    number = fail ? atoi(fail) : 0;
    return number ? -1 : 0;
}
"""
NO_ANSWER, ALREADY_DONE = 1001, 2021


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """API number → library."""
    made = tmp_path_factory.mktemp("slurm")
    (made / "slurm.c").write_text(LIBSLURM)
    found = {}
    for api in (35, 43, 44):
        found[api] = made / f"libslurm-{api}.so"
        argv = ["gcc", "-shared", "-fPIC", f"-DAPI={api}L", "-o", str(found[api]), str(made / "slurm.c")]
        subprocess.run(argv, check=True, timeout=60, capture_output=True)
    return found


class Job:
    def __init__(self, directory: Path) -> None:
        self._told = directory / "told"
        self.fail = ""
        self.pod = directory / "cluster" / "pods" / "u-1"
        self.pod.mkdir(parents=True)

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "slurmlet.entrypoint", *map(str, arguments)]
        environ = {**os.environ, "TOLD": str(self._told), "FAIL": self.fail, "SLURM_JOB_ID": "17"}
        return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)

    @property
    def told(self) -> list[str]:
        return self._told.read_text().splitlines() if self._told.exists() else []


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "usage"),
    [([], USAGE), (["a", "b"], USAGE), (["agent"], "runner agent"), (["step", "library"], "runner step")],
)
def test_a_wrong_command_line_shows_the_right_one(job: Job, arguments: list[str], usage: str) -> None:
    done = job.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert usage in done.stderr


def test_a_pod_that_another_job_has_is_left_alone(job: Job) -> None:
    (job.pod / "claim").write_text("16\n")
    done = job.run(job.pod)
    assert done.returncode == 0
    assert "belongs to Slurm job 16; this job (17) leaves" in done.stderr


def test_the_api_of_a_library_is_told(job: Job, libraries: dict[int, Path]) -> None:
    done = job.run("complete", libraries[43])
    assert (done.returncode, done.stdout) == (0, "43\n")


@pytest.mark.parametrize("api", [43, 44])
def test_a_job_is_ended_with_its_status(job: Job, libraries: dict[int, Path], api: int) -> None:
    assert job.run("complete", libraries[api], 23, 3 << 8).returncode == 0
    assert job.told == [f"23 {3 << 8}"]


def test_a_library_that_is_too_old_or_none_is_refused(
    job: Job, libraries: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = job.run("complete", libraries[35], 23, 0)
    assert (done.returncode, job.told) == (1, [])
    assert "too old (API 35)" in done.stderr
    monkeypatch.setattr(job_completion, "_ELSEWHERE", ())
    with pytest.raises(OSError, match="no library of Slurm's at"):
        job_completion.load("/nowhere/libslurm.so")
    with pytest.raises(OSError, match="no library of Slurm's at"):
        # A library, but not Slurm's.
        job_completion.load("libc.so.6")


def test_an_end_that_slurmctld_does_not_take_is_an_error(job: Job, libraries: dict[int, Path]) -> None:
    job.fail = str(ALREADY_DONE)
    done = job.run("complete", libraries[44], 23, 0)
    assert done.returncode == 1
    assert f"slurmctld did not take the end of job 23 ({ALREADY_DONE})" in done.stderr


def test_a_step_ends_its_job_when_slurmctld_is_back(job: Job, libraries: dict[int, Path]) -> None:
    (job.pod / "claim").write_text("16\n")
    job.fail = f"{NO_ANSWER},"
    assert job.run("step", libraries[44], job.pod).returncode == 0
    assert job.told == ["17 0", "17 0"]


def test_a_step_leaves_a_job_alone_that_slurm_has_ended(job: Job, libraries: dict[int, Path]) -> None:
    (job.pod / "claim").write_text("16\n")
    job.fail = f"{ALREADY_DONE},"
    assert job.run("step", libraries[44], job.pod).returncode == 0
    assert job.told == ["17 0"]


def test_a_step_whose_runner_breaks_ends_the_job_as_failed(job: Job, libraries: dict[int, Path]) -> None:
    done = job.run("step", libraries[43], job.pod / "not" / "there")
    assert done.returncode == 1
    assert "FileNotFoundError" in done.stderr
    assert job.told == [f"17 {1 << 8}"]


def test_a_signal_before_the_pod_is_there_does_not_cost_the_job_its_end(
    job: Job, libraries: dict[int, Path], tmp_path: Path
) -> None:
    """Blocked until somebody hears it: who died of it would leave a job that nobody ends."""
    (job.pod / "claim").write_text("16\n")
    begin = (
        "import os, sys; from slurmlet.entrypoint import job_step; from slurmlet.runner.pod import pod_main\n"
    )
    run = f"pod_main.run = lambda _: os.kill(os.getpid(), {int(signal.SIGTERM)}) or 5\n"
    script = begin + run + "sys.exit(job_step.main(sys.argv[1:]))"
    environ = {**os.environ, "TOLD": str(tmp_path / "told"), "SLURM_JOB_ID": "17"}
    argv = [sys.executable, "-c", script, str(libraries[44]), str(job.pod)]
    assert subprocess.run(argv, env=environ, timeout=60, check=False).returncode == 5
    assert job.told == [f"17 {5 << 8}"]
