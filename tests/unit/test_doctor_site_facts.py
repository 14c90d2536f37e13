"""The collecting side, for real where this machine allows it: probe, beacon, Slurm's words."""

from __future__ import annotations

import ast
import json
import shutil
import socket
import stat
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest

from slurmlet.base.processes import run
from slurmlet.doctor import probe, probe_network, site_facts
from slurmlet.doctor.reachability import beacon
from slurmlet.slurm import configuration, task
from slurmlet.slurm.environment import command_environment

KEYS = {
    "host", "kernel", "machine", "python", "python_path", "user_namespace", "network_namespace", "subuids", "tun", "fuse",
    "fuse_overlayfs", "seccomp", "seccomp_actions", "runtimes", "scratch", "limits", "home", "login",
    "pidfd_getfd", "own_ports", "host_ping", "max_net_namespaces", "compiler",
}  # fmt: skip


def interpreters() -> list[str]:
    """This one and, where the machine has it, the oldest the runner promises."""
    old = shutil.which("python3.9")
    works = old is not None and run([old, "--version"], check=False).ok
    return [sys.executable, *([old] if works and old else [])]


@pytest.mark.parametrize("python", interpreters())
def test_the_probe_runs_from_stdin_and_leaves_nothing(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("SLURM_TMPDIR", raising=False)
    done = run([python, "-"], stdin=site_facts._program({}), check=False)
    facts = site_facts._parse(done.stdout)
    assert facts is not None, done.stderr
    assert set(facts) == KEYS
    assert facts["scratch"]["path"] == str(tmp_path)
    assert facts["scratch"]["problem"] == ""
    assert facts["home"] is None
    assert facts["login"] is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [probe, probe_network])
def test_the_probe_stands_alone_and_reads_in_python_3_6(module: ModuleType) -> None:
    tree = ast.parse(Path(str(module.__file__)).read_text(), feature_version=(3, 6))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
        )
    }
    assert imported <= sys.stdlib_module_names


def test_the_two_probes_share_no_name() -> None:
    def names(module: ModuleType) -> set[str]:
        kinds = (ast.FunctionDef, ast.ClassDef)
        tree = ast.parse(Path(str(module.__file__)).read_text())
        assigned = {
            name.id
            for node in tree.body
            if isinstance(node, ast.Assign)
            for name in ast.walk(node)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        return assigned | {node.name for node in tree.body if isinstance(node, kinds)}

    assert names(probe) & names(probe_network) == set()


@pytest.fixture(autouse=True)
def patient_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has much else to do must not look like one that hangs."""
    monkeypatch.setattr(probe, "TRIAL_TIMEOUT_S", 60)


def test_one_trapped_call_is_answered_and_a_wrong_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    if probe.trial(probe.enter, 0):
        pytest.skip("this machine gives no user namespaces")
    assert probe.trial(probe_network.try_notification, probe.enter) == ""
    assert probe.trial(probe_network.try_borrowing, probe.enter) == ""
    monkeypatch.setattr(probe_network, "ADD_AND_SEND", 64)
    assert "5.14" in probe.trial(probe_network.try_notification, probe.enter)
    monkeypatch.setattr(probe_network, "CALLS", {})
    assert "not known" in probe.trial(probe_network.try_notification, probe.enter)
    monkeypatch.setattr(probe_network, "PIDFD_GETFD", 9999)
    assert "pidfd_getfd: " in probe.trial(probe_network.try_borrowing, probe.enter)


def test_a_trial_tells_success_failure_and_silence_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(1, "no way")

    def hang() -> None:
        import time

        time.sleep(30)

    assert probe.trial(lambda: None) == ""
    assert "no way" in probe.trial(fail)
    monkeypatch.setattr(probe, "TRIAL_TIMEOUT_S", 1)
    assert probe.trial(hang) == "timed out after 1 s"


def test_parameters_reach_the_probe_as_data() -> None:
    nasty = {"home": {"path": "/x'\"\\n$(id)`\u2028\n", "content": "'''"}}
    source = site_facts._program(nasty)
    call = ast.parse(source).body[-1]
    assert isinstance(call, ast.Expr)
    assert isinstance(call.value, ast.Call)
    inner = call.value.args[0]
    assert isinstance(inner, ast.Call)
    assert json.loads(ast.literal_eval(inner.args[0])) == nasty


@pytest.mark.parametrize("output", ["", "hello\n", "slurmlet-probe {broken\n", "slurmlet-probe [1]\n"])
def test_noise_is_not_an_answer(output: str) -> None:
    assert site_facts._parse(output) is None


def test_the_answer_is_found_among_noise() -> None:
    assert site_facts._parse('prolog says hi\n\nslurmlet-probe {"host": "c1"}\nbye\n') == {"host": "c1"}


def test_home_is_seen_and_a_wrong_one_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLET_HOME", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(probe.time, "sleep", lambda _: None)
    with site_facts._home_file() as wanted:
        path = Path(wanted["path"])
        assert path.parent == tmp_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert probe.see_home(wanted) == {"path": str(path), "problem": ""}
        assert probe.see_home({**wanted, "content": "other"})["problem"] == "has other content here"
    assert list(tmp_path.iterdir()) == []
    assert probe.see_home(wanted)["problem"] == "No such file or directory"


def test_the_beacon_answers_only_who_knows_the_word() -> None:
    with beacon() as told:
        here = {**asdict(told), "addresses": ["127.0.0.1"]}
        assert probe.reach(here)["problem"] == ""
        assert "somebody else" in probe.reach({**here, "token": "0" * 32})["problem"]
        with socket.create_connection(("127.0.0.1", told.port)) as silent:
            silent.shutdown(socket.SHUT_WR)
            assert silent.recv(100) == b""
        assert probe.reach(here)["address"] == "127.0.0.1"
    assert "refused" in probe.reach(here)["problem"]


def test_slurms_configuration_is_read() -> None:
    text = (
        "Configuration data as of 2026-11-15T02:00:00\nAccountingStorageType   = accounting_storage/slurmdbd\n"
        "SLURM_VERSION           = 24.11.5\nSchedulerParameters     = a=1,b=2\nX11Parameters           = (null)\n\n"
        "Cgroup Support Configuration:\nSlurmctld(primary) at login is UP\n"
    )
    assert configuration.parse_config(text) == {
        "AccountingStorageType": "accounting_storage/slurmdbd",
        "SLURM_VERSION": "24.11.5",
        "SchedulerParameters": "a=1,b=2",
        "X11Parameters": "(null)",
    }


def test_the_user_s_scratch_reaches_jobs() -> None:
    assert command_environment({"TMPDIR": "/scratch/user1"}) == {"TMPDIR": "/scratch/user1"}


def test_the_environment_of_an_allocation_is_left_behind() -> None:
    kept = command_environment(
        {
            "PATH": "/bin",
            "SLURM_JOB_ID": "7",
            "SRUN_CPUS_PER_TASK": "4",
            "SLURM_CONF": "/c",
            "SLURMLET_HOME": "/h",
        }
    )
    assert kept == {"PATH": "/bin", "SLURM_CONF": "/c", "SLURMLET_HOME": "/h"}


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("cat >/dev/null; echo 'slurmlet-probe {}'", task.ProbeJob(output="slurmlet-probe {}\n")),
        (
            "echo 'srun: error: invalid partition specified: x' >&2; echo 'srun: error: Unable to allocate' >&2; exit 1",
            task.ProbeJob(problem="srun: error: invalid partition specified: x"),
        ),
        ("sleep 20", task.ProbeJob(problem="timed out after 0.5 s", timed_out=True)),
    ],
)
def test_what_srun_says(
    script: str, expected: task.ProbeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert task.run_on_node("pass", partition="p; rm -rf /", wait_s=0.5) == expected
