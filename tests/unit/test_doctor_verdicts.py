from __future__ import annotations

import copy
from typing import Any

import pytest

from slurmlet.doctor.findings import Line
from slurmlet.doctor.site_facts import Findings
from slurmlet.doctor.verdicts import judge

BINARIES = {"kube-apiserver": "/b/kube-apiserver", "etcd": "/b/etcd", "runc": "/b/runc"}
CONFIG = {
    "SLURM_VERSION": "24.11.5",
    "SelectType": "select/cons_tres",
    "ProctrackType": "proctrack/cgroup",
    "AuthType": "auth/munge",
    "AccountingStorageType": "accounting_storage/slurmdbd",
}
GOOD: dict[str, Any] = {
    "host": "c1",
    "kernel": "6.1",
    "machine": "x86_64",
    "python": [3, 9, 2],
    "python_path": "/usr/bin/python3",
    "compiler": "/usr/bin/cc",
    "user_namespace": "",
    "network_namespace": "",
    "subuids": {"count": 65536, "problem": ""},
    "tun": "",
    "fuse": "",
    "fuse_overlayfs": "/usr/bin/fuse-overlayfs",
    "seccomp": "",
    "seccomp_actions": ["allow", "user_notif"],
    "pidfd_getfd": "",
    "own_ports": "",
    "host_ping": "",
    "max_net_namespaces": 1000,
    "runtimes": {"crun": "1.21"},
    "scratch": {"path": "/tmp", "free_bytes": 50 << 30, "problem": "", "overlay": ""},
    "limits": {"nofile": [1024, 262144], "nproc": [-1, -1]},
    "home": {"path": "/home/user1/x", "problem": ""},
    "login": {"address": "10.0.0.1", "milliseconds": 0.4, "problem": ""},
}


def findings(node: dict[str, Any] | None = None, **more: Any) -> Findings:
    base: dict[str, Any] = {
        "here": GOOD,
        "node": {**copy.deepcopy(GOOD), **(node or {})},
        "slurm_config": CONFIG,
    }
    return Findings(**{**base, "binaries": BINARIES, **more})


def line_of(found: Findings, what: str, where: str = "node") -> Line:
    (line,) = [line for line in judge(found).lines if (line.what, line.where) == (what, where)]
    return line


def test_a_good_site_is_ok_throughout() -> None:
    verdict = judge(findings())
    assert verdict.usable
    assert {line.status for line in verdict.lines} == {"ok"}
    assert all(line.what and line.found and line.uses and line.without for line in verdict.lines)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("Python", {"python": [3, 8, 19]}),
        ("Python", {"python": [3, 6, 8]}),
        ("user namespaces", {"user_namespace": "unshare: Operation not permitted"}),
        ("shared home", {"home": {"path": "x", "problem": "No such file or directory"}}),
        ("connection to the login host", {"login": {"address": "", "problem": "10.0.0.1: timed out"}}),
    ],
)
def test_what_slurmlet_cannot_do_without(what: str, change: dict[str, Any]) -> None:
    verdict = judge(findings(change))
    line = line_of(findings(change), what)
    assert not verdict.usable
    assert line.status == "missing"
    assert line.remedy
    assert verdict.remedies == [f"{what}: {line.remedy}"]


@pytest.mark.parametrize(
    ("runtimes", "own", "uses"),
    [
        ({"crun": "1.21", "runc": "1.1"}, True, "crun"),
        ({"crun": "does not start"}, True, "slurmlet's own runc"),
        ({}, True, "slurmlet's own runc"),
        ({"runc": "1.1"}, False, "runc"),
        ({"crun": "does not start"}, False, None),
        ({"apptainer": "1.3", "podman": "5.4"}, False, None),
        ({}, False, None),
    ],
)
def test_the_runtime_is_the_one_the_runner_would_choose(
    runtimes: dict[str, str], own: bool, uses: str | None
) -> None:
    found = findings({"runtimes": runtimes}, binaries={"runc": "/b/runc" if own else ""})
    line = line_of(found, "container runtime")
    assert judge(found).usable is (uses is not None)
    assert line.uses == (uses or "-")
    assert line.fatal is (uses is None)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("network namespaces", {"network_namespace": "unshare: No space left on device"}),
        ("TUN", {"tun": "No such file or directory"}),
        ("seccomp notification", {"seccomp": "seccomp listener: Invalid argument"}),
        ("seccomp notification", {"seccomp_actions": ["allow", "errno"]}),
        ("pidfd_getfd", {"pidfd_getfd": "pidfd_getfd: Operation not permitted"}),
        ("low ports and ping", {"own_ports": "Read-only file system"}),
        ("ping of hosts", {"host_ping": "Permission denied"}),
        ("subordinate uids", {"subuids": {"count": 0, "problem": ""}}),
        ("subordinate uids", {"subuids": {"count": 65536, "problem": "newuidmap is not installed"}}),
        ("overlay", {"scratch": {**GOOD["scratch"], "overlay": "mount overlay: Operation not permitted"}}),
        ("scratch", {"scratch": {**GOOD["scratch"], "free_bytes": 1 << 20}}),
        ("scratch", {"scratch": {**GOOD["scratch"], "problem": "Permission denied"}}),
        ("limits", {"limits": {"nofile": [1024, 1024], "nproc": [-1, -1]}}),
        ("limits", {"limits": {"nofile": [4096, 4096], "nproc": [100, 100]}}),
    ],
)
def test_what_only_makes_things_worse(what: str, change: dict[str, Any]) -> None:
    found = findings(change)
    line = line_of(found, what)
    assert judge(found).usable
    assert line.status == "degraded"
    assert line.without


NO_SPACE = {"network_namespace": "unshare: No space left on device", "max_net_namespaces": 0}
NO_TUN = {"tun": "No such file or directory"}
NO_NOTICE = {"seccomp": "SECCOMP_ADDFD_FLAG_SEND, of Linux 5.14: Invalid argument"}


@pytest.mark.parametrize(
    ("change", "mode", "status"),
    [
        ({}, "fast", "ok"),
        (NO_SPACE, "no-netns", "degraded"),
        (NO_TUN, "no-netns", "degraded"),
        (NO_NOTICE, "packets", "degraded"),
        ({"pidfd_getfd": "Operation not permitted"}, "packets", "degraded"),
        ({"seccomp_actions": ["allow"]}, "packets", "degraded"),
        ({**NO_SPACE, **NO_NOTICE}, "none", "missing"),
        ({"host_ping": "Permission denied"}, "fast", "ok"),
    ],
)
def test_the_network_is_the_one_the_runner_would_make(change: dict[str, Any], mode: str, status: str) -> None:
    found = findings(change)
    line = line_of(found, "pod network")
    assert (line.found, line.status) == (mode, status)
    assert judge(found).usable
    assert bool(line.remedy) is (status != "ok")


def test_advice_names_the_setting_and_its_value() -> None:
    (advice, *_) = judge(findings(NO_SPACE)).advice
    assert advice.startswith("network namespaces: ")
    assert "user.max_net_namespaces > 0 (it is 0)" in advice
    assert judge(findings()).advice == []


@pytest.mark.parametrize(
    ("fuse", "program", "uses"),
    [
        ("", "/usr/bin/fuse-overlayfs", "fuse-overlayfs"),
        ("", "", "a copy"),
        ("Permission denied", "/x", "a copy"),
    ],
)
def test_without_overlay_the_next_way_is_named(fuse: str, program: str, uses: str) -> None:
    scratch = {**GOOD["scratch"], "overlay": "Invalid argument"}
    line = line_of(findings({"scratch": scratch, "fuse": fuse, "fuse_overlayfs": program}), "overlay")
    assert line.uses.startswith(uses)


@pytest.mark.parametrize(
    ("what", "key", "value"),
    [
        ("select plugin", "SelectType", "select/linear"),
        ("proctrack plugin", "ProctrackType", "proctrack/linuxproc"),
        ("accounting", "AccountingStorageType", "(null)"),
        ("accounting", "AccountingStorageType", "accounting_storage/none"),
    ],
)
def test_plugins_that_cost_something(what: str, key: str, value: str) -> None:
    line = line_of(findings(slurm_config={**CONFIG, key: value}), what, "login")
    assert (line.status, line.found, line.fatal) == ("degraded", value, False)


def test_no_slurm_commands() -> None:
    verdict = judge(Findings(here=GOOD, missing_commands=("sbatch", "srun"), binaries=BINARIES))
    assert not verdict.usable
    assert "no sbatch, srun in PATH" in verdict.lines[0].found
    assert all(line.where == "login" for line in verdict.lines)


def test_a_controller_that_does_not_answer() -> None:
    verdict = judge(
        Findings(here=GOOD, slurm_problem="Unable to contact slurm controller", binaries=BINARIES)
    )
    assert not verdict.usable
    assert len(verdict.remedies) == 1


def test_a_full_queue_is_no_verdict_on_the_site() -> None:
    found = Findings(
        here=GOOD, slurm_config=CONFIG, binaries=BINARIES, node_problem="late", node_timed_out=True
    )
    verdict = judge(found)
    assert verdict.usable
    assert line_of(found, "compute node").found.startswith("not checked")


def test_a_refused_job_is() -> None:
    problem = "srun: error: Unable to allocate resources: Invalid account"
    found = Findings(here=GOOD, slurm_config=CONFIG, binaries=BINARIES, node_problem=problem)
    assert not judge(found).usable
    assert problem in line_of(found, "compute node").found


def test_a_node_without_python() -> None:
    problem = "slurmstepd: error: execve(): python3: No such file or directory"
    found = Findings(here=GOOD, slurm_config=CONFIG, binaries=BINARIES, node_problem=problem)
    assert line_of(found, "Python").fatal


def test_missing_binaries_are_no_disaster() -> None:
    line = line_of(findings(binaries={**BINARIES, "etcd": ""}), "Kubernetes binaries", "login")
    assert (line.status, line.found) == ("degraded", "2 of 3 (missing: etcd)")
    assert judge(findings(binaries={**BINARIES, "etcd": ""})).usable


def test_node_alone_says_nothing_of_login_host_and_slurm() -> None:
    alone = Findings(node={**GOOD, "home": None, "login": None}, binaries=BINARIES, only_here=True)
    verdict = judge(alone)
    assert verdict.usable
    assert {line.where for line in verdict.lines} == {"node"}
    assert not {"shared home", "connection to the login host"} & {line.what for line in verdict.lines}


def test_a_probe_that_left_things_out_is_not_taken_for_good() -> None:
    verdict = judge(Findings(here={}, node={}, slurm_config={}, binaries={}))
    assert not verdict.usable
    assert {line.what for line in verdict.lines if line.fatal} == {
        "Python",
        "user namespaces",
        "container runtime",
    }


def test_a_login_host_without_a_compiler_only_loses_speed() -> None:
    found = findings(here={**GOOD, "compiler": ""})
    line = line_of(found, "C compiler", "login")
    assert (line.status, line.fatal) == ("degraded", False)
    assert "cc" in line.remedy
    assert judge(found).usable


@pytest.mark.parametrize(("problem", "status"), [("", "ok"), ("no library of Slurm's", "degraded")])
def test_a_site_without_a_way_to_start_at_once_is_told(problem: str, status: str) -> None:
    found = findings(at_once_problem=problem)
    assert line_of(found, "immediate start", "login").status == status
    assert judge(found).usable
