"""The words behind `slurmlet run`, and the srun they become."""

from __future__ import annotations

import pytest

from slurmlet.base.errors import UserError
from slurmlet.jobcluster.allocation import srun_argv, srun_environment, task_here
from slurmlet.jobcluster.arguments import Request, parse

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "c3",
    "SLURM_STEP_NODELIST": "c[1-3]",
    "SLURM_SRUN_COMM_PORT": "4711",
}


class TestParsing:
    def test_ours_sruns_and_the_command_are_told_apart(self) -> None:
        found = parse(
            ["-N3", "-v", "--mem", "2G", "--manifest", "a.yaml", "--image=b.tar", "--", "sh", "-c", "-N9"]
        )
        assert found.srun == ("-N3", "--mem", "2G")
        assert found.command == ("sh", "-c", "-N9")
        assert (found.manifests, found.images, found.verbose) == (("a.yaml",), ("b.tar",), True)

    def test_encryption_is_asked_for_inside_of_the_job_too(self) -> None:
        assert parse(["-N2", "--encrypt", "--", "true"]).encrypt
        inside = parse(parse(["-N2", "--encrypt", "--", "true"]).inner_words())
        assert (inside.encrypt, inside.srun) == (True, ())
        assert not parse(parse(["--", "true"]).inner_words()).encrypt

    def test_values_of_sruns_options_may_stand_alone(self) -> None:
        assert parse(["-N", "3", "-p", "short", "--gres", "gpu:1", "--exclusive"]).srun == (
            "-N", "3", "-p", "short", "--gres", "gpu:1", "--exclusive",
        )  # fmt: skip

    @pytest.mark.parametrize(
        "words",
        [
            ["kubectl", "get", "nodes"],
            ["-N3", "kubectl"],
            ["--exclusive", "x"],
            ["--mem=2G", "x"],
            ["-v", "x"],
        ],
    )
    def test_a_command_without_its_dashes_is_not_given_to_srun(self, words: list[str]) -> None:
        with pytest.raises(UserError, match="neither an option") as caught:
            parse(words)
        assert "Put -- before the command" in caught.value.hint

    @pytest.mark.parametrize(
        "words", [["--wait"], ["--manifest"], ["--timeout=soon"], ["--manifest=a", "--wait", "--", "x"]]
    )
    def test_what_cannot_be_meant(self, words: list[str]) -> None:
        with pytest.raises(UserError):
            parse(words)

    def test_the_inner_words_mean_the_same(self) -> None:
        asked = parse(
            [
                "-N2",
                "--manifest=a b",
                "--image",
                "c",
                "--keep-logs",
                "d",
                "-v",
                "--timeout=9",
                "--",
                "x",
                "--",
                "y",
            ]
        )
        again = parse(asked.inner_words())
        assert again == Request(
            asked.command, (), asked.manifests, asked.wait, asked.images, asked.keep_logs, asked.verbose, 9.0
        )


class TestWhereWeAre:
    def test_a_task_of_a_step(self) -> None:
        task = task_here(STEP)
        assert task is not None
        assert (task.job_id, task.number, task.host, task.hosts) == ("77", 2, "c3", "c[1-3]")
        assert not task.drives

    def test_all_tasks_of_a_step_and_no_others_share_a_key(self) -> None:
        first, third = task_here({**STEP, "SLURM_PROCID": "0", "SLURMD_NODENAME": "c1"}), task_here(STEP)
        later = task_here({**STEP, "SLURM_SRUN_COMM_PORT": "4712"})
        assert first is not None
        assert third is not None
        assert later is not None
        assert first.key == third.key
        assert first.key != later.key

    @pytest.mark.parametrize(
        "environ",
        [
            {},
            {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0"},  # a batch script
            {**STEP, "SLURM_STEP_ID": "4294967290"},  # the interactive step behind salloc
        ],
    )
    def test_outside_a_step(self, environ: dict[str, str]) -> None:
        assert task_here(environ) is None


class TestSrun:
    def test_from_a_login_host(self) -> None:
        argv = srun_argv({}, ["-N3", "-c2"], ["prog", "x"], terminal=False)
        assert argv == [
            "srun", "--kill-on-bad-exit=1", "--disable-status", "--job-name=slurmlet-run",
            "--ntasks=3", "--ntasks-per-node=1", "--input=0", "-N3", "-c2", "prog", "x",
        ]  # fmt: skip

    @pytest.mark.parametrize("spelled", [["-N3"], ["-N", "3"], ["--nodes=3"], ["--nodes", "3"]])
    def test_nodes_in_any_spelling(self, spelled: list[str]) -> None:
        assert "--ntasks=3" in srun_argv({}, spelled, ["prog"], terminal=False)

    def test_a_range_of_nodes_leaves_the_count_to_slurm(self) -> None:
        argv = srun_argv({}, ["-N2-4"], ["prog"], terminal=False)
        assert not [word for word in argv if word.startswith(("--ntasks", "--input"))]

    def test_the_persons_own_words_about_tasks_and_name_stay(self) -> None:
        argv = srun_argv({}, ["-n8", "-J", "mine"], ["prog"], terminal=False)
        assert not [word for word in argv if word.startswith(("--ntasks", "--job-name"))]

    def test_inside_an_allocation_all_of_it_is_used(self) -> None:
        environ = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "8", "HOME": "/h"}
        argv = srun_argv(environ, [], ["prog"], terminal=False)
        assert argv[3:8] == ["--overlap", "--nodes=2", "--mem=0", "--ntasks=2", "--ntasks-per-node=1"]
        assert srun_environment(environ) == {
            "SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "HOME": "/h", "SLURM_CPU_BIND": "none",
        }  # fmt: skip

    def test_a_shell_gets_a_terminal(self) -> None:
        argv = srun_argv({}, [], ["prog"], terminal=True)
        assert "--pty" in argv
        assert not [word for word in argv if word.startswith("--input")]
