"""The commands against small programs that stand in Slurm's place on the PATH and say what Slurm 24.11.5 said."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import JobSpec
from slurmlet.slurm.command_output import SEPARATOR
from slurmlet.slurm.commands import CommandSlurm

_T = TypeVar("_T")
SPEC = JobSpec("a name", "#!/bin/sh\ntrue\n")
AWAY = "Unable to contact slurm controller (connect failure)"


def do(work: Coroutine[Any, Any, _T]) -> _T:
    return asyncio.run(work)


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

    def client(self, **environment: str) -> CommandSlurm:
        return CommandSlurm({"PATH": f"{self.root}/bin:{os.environ['PATH']}", **environment})


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    made = Site(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    return made


@pytest.mark.parametrize("said", ["123\n", "123;cluster1\n", "Welcome to our site!\n123\n"])
def test_submit_returns_the_job_id(site: Site, said: str) -> None:
    site.program("sbatch", said)
    spec = JobSpec("n", "#!/bin/sh\ntrue\n", comment="a b", time_limit_min=5)
    assert do(site.client().submit(spec)) == "123"
    assert site.argv("sbatch") == [
        "--parsable", "--no-requeue", "--job-name=n", "--comment=a b", "--export=ALL", "--time=5",
    ]  # fmt: skip
    assert (site.root / "sbatch.stdin").read_text() == "#!/bin/sh\ntrue\n"


@pytest.mark.parametrize("said", ["", "\n", "Submitted batch job\n"])
def test_an_answer_without_a_job_id_may_hide_a_success(site: Site, said: str) -> None:
    site.program("sbatch", said)
    with pytest.raises(SlurmError) as error:
        do(site.client().submit(SPEC))
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
    with pytest.raises(SlurmError) as error:
        do(site.client().submit(SPEC))
    assert error.value.transient is transient
    assert error.value.said == words.partition(": ")[2].partition(": ")[2]


def test_a_missing_sbatch_is_no_fault_of_the_pod(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(site.root / "bin"))
    with pytest.raises(SlurmError) as error:
        do(site.client().submit(SPEC))
    assert error.value.transient


def test_a_killed_sbatch_is_no_fault_of_the_pod(site: Site) -> None:
    site.program("sbatch")
    (site.root / "bin/sbatch").write_text("#!/bin/sh\nkill -9 $$\n")
    with pytest.raises(SlurmError) as error:
        do(site.client().submit(SPEC))
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
    do(site.client(**environment).submit(SPEC))
    names = {one.partition("=")[0] for one in (site.root / "sbatch.env").read_text().split("\0") if one}
    assert "HOME" in names
    assert not names & {"SBATCH_PARTITION", "SLURM_JOB_ID", "SQUEUE_FORMAT", "AWS_SECRET"}


def test_all_jobs_of_the_user_are_asked_for(site: Site) -> None:
    site.program("squeue", SEPARATOR.join(("7", "RUNNING", *"abcdefghijk")) + "\n")
    (job,) = do(site.client().jobs())
    assert job.job_id == "7"
    # Jobs in hidden partitions and those that have ended are the user's as well.
    assert {"--all", "--states=all", "--noheader", str(os.getuid())} <= set(site.argv("squeue"))


def test_a_queue_that_cannot_be_read_is_no_empty_queue(site: Site) -> None:
    site.program("squeue", error=f"slurm_load_jobs error: {AWAY}", code=1)
    with pytest.raises(SlurmError) as error:
        do(site.client().jobs())
    assert error.value.transient


def test_ends_come_from_accounting_first(site: Site) -> None:
    site.program("sacct", "7|CANCELLED by 1002|0:0\n8|COMPLETED|0:0\n")
    site.program("scontrol")
    ended = do(site.client().ended([JobId("7"), JobId("8")]))
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
    assert do(site.client().ended([JobId("7")]))[JobId("7")].exit_code == 3


def test_the_controller_knows_an_end_before_accounting_does(site: Site) -> None:
    site.program("sacct", "7|RUNNING|0:0\n")
    site.program("scontrol", "JobId=7 JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0\n")
    ended = do(site.client().ended([JobId("7")]))[JobId("7")]
    assert (ended.state, ended.exit_code) == ("FAILED", 3)


def test_accounting_is_believed_about_a_job_that_the_controller_forgot(site: Site) -> None:
    site.program("sacct", "7|RUNNING|0:0\n")
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert do(site.client().ended([JobId("7")]))[JobId("7")].state == "RUNNING"


def test_a_site_without_sacct(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    for name in ("cat", "env"):
        (site.root / "bin" / name).symlink_to(f"/usr/bin/{name}")
    monkeypatch.setenv("PATH", str(site.root / "bin"))
    assert do(site.client(PATH=str(site.root / "bin")).ended([JobId("7")])) == {}


@pytest.mark.parametrize(("error", "code"), [("", 0), ("Slurm accounting storage is disabled", 1)])
def test_a_job_unknown_to_both_is_missing(site: Site, error: str, code: int) -> None:
    site.program("sacct", error=error, code=code)
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    assert do(site.client().ended([JobId("7")])) == {}


def test_a_job_is_not_missing_while_the_controller_is_away(site: Site) -> None:
    """Else a pod would be failed because slurmctld was restarted."""
    site.program("sacct")
    site.program("scontrol", error=f"slurm_load_jobs error: {AWAY}", code=1)
    with pytest.raises(SlurmError) as error:
        do(site.client().ended([JobId("7")]))
    assert error.value.transient


def test_a_job_is_not_missing_while_the_database_is_away(site: Site) -> None:
    site.program("sacct", error="sacct: error: Problem talking to the database: Connection refused", code=1)
    site.program("scontrol", error="slurm_load_jobs error: Invalid job id specified", code=1)
    with pytest.raises(SlurmError) as error:
        do(site.client().ended([JobId("7")]))
    assert error.value.transient


def test_no_jobs_no_commands(site: Site) -> None:
    assert do(site.client().ended([])) == {}
    do(site.client().cancel([]))


def test_many_jobs_are_cancelled_in_a_few_calls(site: Site) -> None:
    site.program("scancel")
    do(site.client().cancel([JobId(str(number)) for number in range(1, 402)]))
    words = site.argv("scancel")
    assert words.count("--quiet") == 3
    assert [word for word in words if word != "--quiet"] == [str(number) for number in range(1, 402)]


def test_cancelling_a_job_that_is_gone_is_no_error(site: Site) -> None:
    site.program(
        "scancel", error="scancel: error: Kill job error on job id 7: Invalid job id specified", code=1
    )
    do(site.client().cancel([JobId("7")]))
    assert site.argv("scancel")[-1] == "7"


def test_a_cancellation_that_did_not_reach_slurm_is_told(site: Site) -> None:
    site.program("scancel", error=f"scancel: error: Kill job error on job id 7: {AWAY}", code=8)
    with pytest.raises(SlurmError) as error:
        do(site.client().cancel([JobId("7")]))
    assert error.value.transient


CONFIG = """\
Configuration data as of 1763272800
AccountingStorageType   = accounting_storage/slurmdbd
InactiveLimit           = {limit} sec
KillWait                = 7 sec
PluginDir               = /usr/lib/slurm
SLURM_VERSION           = 24.11.5
"""


def test_capabilities_are_asked_for_once(site: Site) -> None:
    site.program("scontrol", CONFIG.format(limit=0))

    async def twice() -> None:
        client = site.client()
        known = await client.capabilities()
        assert (known.version, known.release, known.accounting) == ("24.11.5", (24, 11), True)
        assert (known.kill_wait_s, known.immediate_problem, known.plugin_dirs) == (7.0, "", "/usr/lib/slurm")
        assert await client.capabilities() is known

    do(twice())
    assert site.argv("scontrol") == ["show", "config"]


def test_where_slurm_ends_jobs_without_their_srun_none_starts_at_once(site: Site) -> None:
    site.program("scontrol", CONFIG.format(limit=60))
    assert "InactiveLimit is 60" in do(site.client().capabilities()).immediate_problem


@pytest.mark.parametrize(
    ("method", "program", "argument"),
    [
        ("jobs", "squeue", None), ("partitions", "sinfo", None), ("nodes", "sinfo", None), ("grants", "scontrol", "7"),
        ("capabilities", "scontrol", None), ("ended", "sacct", ["7"]), ("cancel", "scancel", ["7"]),
    ],
)  # fmt: skip
def test_the_users_defaults_never_reach_a_command(
    site: Site, monkeypatch: pytest.MonkeyPatch, method: str, program: str, argument: Any
) -> None:
    """With SQUEUE_PARTITION a pool saw none of its jobs, and asked for a new one every 2 s for ever."""
    for name in ("squeue", "sinfo", "scontrol", "sacct", "scancel"):
        site.program(name)
    for variable in (
        "SQUEUE_PARTITION",
        "SINFO_PARTITION",
        "SACCT_FORMAT",
        "SCANCEL_STATE",
        "SLURM_CLUSTERS",
    ):
        monkeypatch.setenv(variable, "short")
    work = getattr(CommandSlurm(), method)
    do(work() if argument is None else work(argument))
    given = {one.partition("=")[0] for one in (site.root / f"{program}.env").read_text().split("\0") if one}
    assert "PATH" in given
    assert not {name for name in given if name.startswith(("SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_"))}
    assert {name for name in given if name.startswith("SLURM_")} <= {"SLURM_CONF", "SLURM_TIME_FORMAT"}


def test_a_signal_goes_to_the_whole_job(site: Site) -> None:
    site.program(
        "scancel",
        error="scancel: error: Kill job error on job id 7: Job/step already completing or completed",
        code=1,
    )
    do(site.client().signal(JobId("7"), "USR1"))
    assert site.argv("scancel") == ["--full", "--signal=USR1", "7"]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: "
         "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "SlurmLimited"),
        ("sbatch: error: slurm_submit: RPC rate limited, backing off", "SlurmBusy"),
        (f"sbatch: error: Batch job submission failed: {AWAY}", "SlurmUnavailable"),
        ("sbatch: error: Batch job submission failed: Invalid qos specification", "SlurmRefused"),
    ],
)  # fmt: skip
def test_reasons_of_refusals(site: Site, words: str, reason: str) -> None:
    site.program("sbatch", error=words, code=1)
    with pytest.raises(SlurmError) as error:
        do(site.client().submit(SPEC))
    assert (error.value.reason, error.value.transient) == (reason, reason != "SlurmRefused")


def test_partitions_are_asked_for_exactly(site: Site) -> None:
    site.program("sinfo", "batch*|up|infinite|3|16|6000|idle|(null)|(null)\n")
    assert [one.name for one in do(site.client().partitions())] == ["batch"]
    assert "--exact" in site.argv("sinfo")
