"""The client against small programs that stand in Slurm's place on the PATH and say what Slurm 24.11.5 said."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slurmlet.base.processes import CommandError
from slurmlet.model.ids import JobId
from slurmlet.slurm.client import SlurmClient

AWAY = "Unable to contact slurm controller (connect failure)"


class Site:
    """A directory of programs; each tells how it was called."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "bin").mkdir()

    def program(self, name: str, said: str = "", *, error: str = "", code: int = 0) -> None:
        path = self.root / "bin" / name
        (self.root / f"{name}.out").write_text(said)
        (self.root / f"{name}.err").write_text(error)
        path.write_text(
            f'#!/bin/sh\ncd "{self.root}"\nfor word in "$@"; do printf "%s\\0" "$word" >> {name}.argv; done\n'
            f"cat > {name}.stdin\nenv -0 > {name}.env\ncat {name}.out\ncat {name}.err >&2\nexit {code}\n"
        )
        path.chmod(0o700)

    def argv(self, name: str) -> list[str]:
        return (self.root / f"{name}.argv").read_text().split("\0")[:-1]

    def called(self, name: str) -> bool:
        return (self.root / f"{name}.argv").exists()

    def client(self, **environment: str) -> SlurmClient:
        return SlurmClient({"PATH": f"{self.root}/bin:{os.environ['PATH']}", **environment})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return made


@pytest.mark.parametrize("said", ["123\n", "123;cluster1\n", "Welcome to our site!\n123\n"])
def test_submit_returns_the_job_id(site: Site, said: str) -> None:
    site.program("sbatch", said)
    assert site.client().submit(["--time=5", "--comment=a b"], "#!/bin/sh\ntrue\n") == "123"
    assert site.argv("sbatch") == ["--parsable", "--time=5", "--comment=a b"]
    assert (site.root / "sbatch.stdin").read_text() == "#!/bin/sh\ntrue\n"


@pytest.mark.parametrize("said", ["", "\n", "Submitted batch job\n"])
def test_an_answer_without_a_job_id_may_hide_a_success(site: Site, said: str) -> None:
    site.program("sbatch", said)
    with pytest.raises(CommandError) as error:
        site.client().submit([], "#!/bin/sh\n")
    assert error.value.transient


@pytest.mark.parametrize(
    ("words", "transient"),
    [
        (f"sbatch: error: Batch job submission failed: {AWAY}", True),
        ("sbatch: error: Batch job submission failed: Socket timed out on send/recv operation", True),
        ("sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received", True),
        ("sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying", True),
        ("sbatch: error: If munged is up, restart with --num-threads=10", True),
        ("sbatch: error: Batch job submission failed: Invalid partition name specified", False),
        ("sbatch: error: Batch job submission failed: Requested node configuration is not available", False),
        ("sbatch: error: Invalid --time specification", False),
        ("sbatch: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.", False),
        ("sbatch: error: Batch job submission failed: Job dependency problem", False),
    ],
)
def test_refusals_and_absences_are_told_apart(site: Site, words: str, transient: bool) -> None:
    site.program("sbatch", error=words, code=1)
    with pytest.raises(CommandError) as error:
        site.client().submit([], "#!/bin/sh\n")
    assert error.value.transient is transient
    assert error.value.stderr == words


def test_a_missing_sbatch_is_no_fault_of_the_pod(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(site.root / "bin"))
    with pytest.raises(CommandError) as error:
        site.client().submit([], "#!/bin/sh\n")
    assert error.value.transient


def test_a_killed_sbatch_is_no_fault_of_the_pod(site: Site) -> None:
    site.program("sbatch")
    (site.root / "bin/sbatch").write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(CommandError) as error:
        site.client().submit([], "#!/bin/sh\n")
    assert error.value.transient


def test_the_users_sbatch_variables_change_nothing(site: Site) -> None:
    site.program("sbatch", "1\n")
    environment = {
        "SBATCH_PARTITION": "x",
        "SLURM_JOB_ID": "7",
        "SQUEUE_FORMAT": "%i",
        "AWS_SECRET": "s",
        "HOME": "/home/user1",
    }
    site.client(**environment).submit([], "#!/bin/sh\n")
    names = {one.partition("=")[0] for one in (site.root / "sbatch.env").read_text().split("\0") if one}
    assert "HOME" in names
    assert not names & {"SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT", "AWS_SECRET"}


def test_all_jobs_of_the_user_are_asked_for(site: Site) -> None:
    site.program("squeue", "7|RUNNING|None|c1|batch|x\n")
    (job,) = site.client().jobs()
    assert job.job_id == "7"
    # Jobs in hidden partitions and those that have ended are the user's as well.
    assert {"--all", "--states=all", "--noheader", str(os.getuid())} <= set(site.argv("squeue"))


def test_a_queue_that_cannot_be_read_is_no_empty_queue(site: Site) -> None:
    site.program("squeue", error=f"slurm_load_jobs error: {AWAY}", code=1)
    with pytest.raises(CommandError) as error:
        site.client().jobs()
    assert error.value.transient


def test_ends_come_from_accounting_first(site: Site) -> None:
    site.program("sacct", "7|CANCELLED by 1002|0:0\n8|COMPLETED|0:0\n")
    site.program("scontrol")
    ended = site.client().ended([JobId("7"), JobId("8")])
    assert (ended[JobId("7")].cancelled_by_uid, ended[JobId("8")].state) == (1002, "COMPLETED")
    assert "7,8" in site.argv("sacct")
    assert not site.called("scontrol")


@pytest.mark.parametrize(
    ("said", "error", "code"),
    [
        ("", "", 0),
        ("", "Slurm accounting storage is disabled", 1),
        ("", "sacct: error: Problem talking to the database: Connection refused", 1),
    ],
)
def test_what_accounting_does_not_tell_the_controller_may(
    site: Site, said: str, error: str, code: int
) -> None:
    site.program("sacct", said, error=error, code=code)
    site.program("scontrol", "JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0\n")
    assert site.client().ended([JobId("7")])[JobId("7")].exit_code == 3


def test_a_site_without_sacct(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    for name in ("cat", "env"):
        (site.root / "bin" / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(site.root / "bin"))
    assert site.client(PATH=str(site.root / "bin")).ended([JobId("7")]) == {}


@pytest.mark.parametrize(("error", "code"), [("", 0), ("Slurm accounting storage is disabled", 1)])
def test_a_job_unknown_to_both_is_missing(site: Site, error: str, code: int) -> None:
    site.program("sacct", error=error, code=code)
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert site.client().ended([JobId("7")]) == {}


def test_a_job_is_not_missing_while_the_controller_is_away(site: Site) -> None:
    """Else a pod would be failed because slurmctld was restarted."""
    site.program("sacct")
    site.program("scontrol", error=f"slurm_load_jobs error: {AWAY}", code=1)
    with pytest.raises(CommandError) as error:
        site.client().ended([JobId("7")])
    assert error.value.transient


def test_a_job_is_not_missing_while_the_database_is_away(site: Site) -> None:
    site.program("sacct", error="sacct: error: Problem talking to the database: Connection refused", code=1)
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    with pytest.raises(CommandError) as error:
        site.client().ended([JobId("7")])
    assert error.value.transient


def test_no_jobs_no_commands(site: Site) -> None:
    assert site.client().ended([]) == {}
    site.client().cancel([])


def test_many_jobs_are_cancelled_in_a_few_calls(site: Site) -> None:
    site.program("scancel")
    site.client().cancel([JobId(str(number)) for number in range(1, 402)])
    words = site.argv("scancel")
    assert words.count("--quiet") == 3
    assert [word for word in words if word != "--quiet"] == [str(number) for number in range(1, 402)]


def test_cancelling_a_job_that_is_gone_is_no_error(site: Site) -> None:
    site.program(
        "scancel", error="scancel: error: Kill job error on job id 7: Invalid job id specified", code=1
    )
    site.client().cancel([JobId("7")])
    assert site.argv("scancel")[-1] == "7"


def test_a_cancellation_that_did_not_reach_slurm_is_told(site: Site) -> None:
    site.program("scancel", error=f"scancel: error: Kill job error on job id 7: {AWAY}", code=8)
    with pytest.raises(CommandError) as error:
        site.client().cancel([JobId("7")])
    assert error.value.transient


@pytest.mark.parametrize(
    ("said", "version"), [("slurm-wlm 24.11.5\n", "24.11.5"), ("slurm 22.05.8\n", "22.05.8")]
)
def test_the_version(site: Site, said: str, version: str) -> None:
    site.program("sinfo", said)
    assert site.client().version() == version


def test_partitions_are_asked_for_exactly(site: Site) -> None:
    site.program("sinfo", "batch*|up|infinite|3|16|6000|idle|(null)|(null)\n")
    assert [one.name for one in site.client().partitions()] == ["batch"]
    assert "--exact" in site.argv("sinfo")
