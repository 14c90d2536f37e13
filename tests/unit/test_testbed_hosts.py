"""Hosts as the kernel sees them, asked about the one process that is certainly there: this one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from slurmlet.base.errors import SlurmletError, UserError
from slurmlet.cli.testbed import command
from slurmlet.testbed import host_namespaces, hosts, rootfs
from slurmlet.testbed.daemons import PROCESS_NAMES, services_of
from slurmlet.testbed.faults import FAULTS, inject
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import Paths, Plan


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    found = Paths(tmp_path)
    found.hosts.mkdir(parents=True)
    return found


def me() -> host_namespaces.Init:
    found = host_namespaces._identify(os.getpid())
    assert found is not None
    return found


def record(paths: Paths, pid: int, ticks: int) -> None:
    paths.host_record("c1").write_text(json.dumps({"pid": pid, "started_ticks": ticks}))


class TestFindingAHost:
    def test_no_record(self, paths: Paths) -> None:
        assert host_namespaces.find_init(paths, "c1") is None

    def test_a_live_process(self, paths: Paths) -> None:
        record(paths, me().pid, me().started_ticks)
        assert host_namespaces.find_init(paths, "c1") == me()

    def test_a_pid_that_was_given_to_another_process(self, paths: Paths) -> None:
        record(paths, me().pid, me().started_ticks - 1)
        assert host_namespaces.find_init(paths, "c1") is None

    def test_a_zombie_is_not_alive(self, paths: Paths) -> None:
        child = subprocess.Popen(["sleep", "60"])
        found = host_namespaces._identify(child.pid)
        assert found is not None
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
        assert host_namespaces._identify(child.pid) is None
        child.wait()

    def test_a_process_name_with_brackets_and_blanks(self, tmp_path: Path) -> None:
        program = tmp_path / "a) Z b"
        program.symlink_to("/bin/sleep")
        child = subprocess.Popen([str(program), "60"])
        assert host_namespaces._identify(child.pid) is not None
        child.kill()
        child.wait()


def test_ending_never_touches_a_process_that_took_over_the_pid() -> None:
    child = subprocess.Popen(["sleep", "60"])
    real = host_namespaces._identify(child.pid)
    assert real is not None
    host_namespaces.end([host_namespaces.Init(child.pid, real.started_ticks - 1, "pid:[1]")])
    assert child.poll() is None
    child.kill()
    child.wait()


def test_listening_ports_are_seen() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not host_namespaces.listens(me(), port)
        server.listen()
        assert host_namespaces.listens(me(), port)


def test_processes_of_a_namespace_are_seen() -> None:
    assert os.getpid() in host_namespaces.processes_in(me())
    assert host_namespaces.processes_in(host_namespaces.Init(1, 1, "pid:[1]")) == {}


def test_a_mark_alone_does_not_make_a_process_a_host(paths: Paths) -> None:
    """Only the init of a pid namespace below ours is ever ended."""
    child = subprocess.Popen(["sleep", "60"], env={"SLURMLET_TESTBED": str(paths.run), "PATH": os.defpath})
    assert host_namespaces.strays(paths) == []
    child.kill()
    child.wait()


def test_entering_keeps_arguments_apart() -> None:
    argv = host_namespaces.enter_argv(me(), "user1", ["echo", "$(id)", "--help"], directory="/home/user1")
    assert argv[-3:] == ["echo", "$(id)", "--help"]
    assert f"--wd=/proc/{os.getpid()}/root/home/user1" in argv
    assert argv[argv.index("setpriv") :][:6] == [
        "setpriv",
        "--reuid",
        "user1",
        "--regid",
        "user1",
        "--init-groups",
    ]
    assert "setpriv" not in host_namespaces.enter_argv(me(), "root", ["id"])


def test_waiting_ends() -> None:
    with pytest.raises(SlurmletError, match=r"waited 0\.05 s for a miracle"):
        host_namespaces.wait_until(lambda: False, 0.05, "a miracle")


class TestRoot:
    def test_a_root_of_other_packages_is_not_ready(
        self, paths: Paths, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key = paths.root(Plan()) / rootfs.KEY_FILE
        key.parent.mkdir(parents=True)
        assert not rootfs.is_ready(paths, Plan())
        key.write_text(rootfs.root_key(Plan()) + "\n")
        assert rootfs.is_ready(paths, Plan())
        monkeypatch.setattr(rootfs, "PACKAGES", (*rootfs.PACKAGES, "hello"))
        assert not rootfs.is_ready(paths, Plan())

    def test_each_release_has_its_own(self) -> None:
        assert rootfs.root_key(Plan()) != rootfs.root_key(Plan(slurm="22.05"))
        assert rootfs.root_key(Plan()) == rootfs.root_key(Plan(nodes=9, accounting=False))


class TestPlanOnDisk:
    def test_a_testbed_that_broke_on_the_way_up_does_not_count(self, paths: Paths) -> None:
        paths.plan.write_text(json.dumps({"plan": Plan().as_json(), "complete": False}))
        assert hosts.recorded_plan(paths) is None
        paths.plan.write_text(json.dumps({"plan": Plan().as_json(), "complete": True}))
        assert hosts.recorded_plan(paths) == Plan()

    def test_a_damaged_record_does_not_count(self, paths: Paths) -> None:
        paths.plan.write_text('{"plan": {')
        assert hosts.recorded_plan(paths) is None

    def test_status_of_hosts_that_are_off(self, paths: Paths) -> None:
        paths.plan.write_text(json.dumps({"plan": Plan(nodes=1).as_json(), "complete": True}))
        found = hosts.status(paths)
        assert (found.up, found.healthy) == (True, False)
        assert {name: host.on for name, host in found.hosts.items()} == {"login": False, "c1": False}


def test_every_service_has_a_process_to_look_for() -> None:
    named = {service for host in ("login", "c1") for service in services_of(Plan(), host)}
    assert named == set(PROCESS_NAMES)
    assert all(len(name) <= 15 for name in PROCESS_NAMES.values())
    assert services_of(Plan(accounting=False, rest=False), "login") == ("munge", "slurmctld", "registry")


class TestFaults:
    @pytest.mark.parametrize(
        ("verb", "arguments"),
        [
            ("melt", ["c1"]),
            ("take-host", []),
            ("take-host", ["c9"]),
            ("take-host", ["switch"]),
            ("stop-slurmctld", ["c1"]),
        ],
    )
    def test_nonsense_is_refused_before_anything_happens(
        self, paths: Paths, verb: str, arguments: list[str]
    ) -> None:
        with pytest.raises(UserError):
            inject(Testbed(paths, Plan()), verb, *arguments)

    def test_the_help_names_every_verb(self) -> None:
        said = CliRunner().invoke(command, ["fault", "--help"]).output
        assert [verb for verb in FAULTS if verb not in said] == []

    def test_every_harm_has_its_way_back(self) -> None:
        back = {
            "stop": "start",
            "kill": "start",
            "take": "return",
            "cut": "mend",
            "fill": "free",
            "hide": "show",
        }
        harms = {verb for verb in FAULTS if verb.split("-")[0] in back}
        assert {f"{back[verb.split('-')[0]]}-{verb.split('-', 1)[1]}" for verb in harms} == set(
            FAULTS
        ) - harms


@pytest.mark.parametrize(
    "arguments", [["up", "--nodes", "0"], ["up", "--slurm", "1.0"], ["exec"], ["exec", "--"]]
)
def test_wrong_use_is_explained(arguments: list[str]) -> None:
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 2
    assert "Error" in done.output
