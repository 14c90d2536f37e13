"""The testbed itself: a second one beside that of the other tests, so that its faults harm nobody."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from slurmlet.base.errors import SiteError, UserError
from slurmlet.base.layout import cache_dir
from slurmlet.base.processes import CommandError, run
from slurmlet.testbed import host_namespaces, lifecycle
from slurmlet.testbed.faults import inject
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.limits import association_limits
from slurmlet.testbed.testbed_plan import NAME_VARIABLE, SWITCH, Paths, Plan

pytestmark = pytest.mark.e2e

NAME = "run-selftest"
PLAN = Plan(nodes=2)


def machine_links() -> set[str]:
    return {line.partition(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}


def eventually(holds: Callable[[], bool], limit_s: float = 30) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, "it never came true"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def paths() -> Paths:
    return Paths(cache_dir() / "testbed", NAME)


@pytest.fixture(scope="module")
def bed(paths: Paths) -> Iterator[Testbed]:
    lifecycle.down(paths=paths)
    lifecycle.up(PLAN, paths=paths, quiet=True)
    yield Testbed.running(paths)
    lifecycle.down(paths=paths)


@pytest.fixture(autouse=True)
def _whole(bed: Testbed, paths: Paths) -> None:
    """Whatever the test before did, this one starts with everything running."""
    if not bed.status().healthy:
        lifecycle.up(PLAN, paths=paths, quiet=True)


def cli(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", "from slurmlet.cli.main import main; main()", *arguments],
        input=stdin,
        capture_output=True,
        env={**os.environ, NAME_VARIABLE: NAME},
        timeout=60,
    )


def node_state(bed: Testbed, host: str) -> str:
    return bed.run(["sinfo", "--noheader", "-n", host, "-p", "batch", "-o", "%T"]).stdout.strip()


def test_a_job_runs_on_every_host(bed: Testbed) -> None:
    assert sorted(bed.run(["srun", "-N2", "hostname"]).stdout.split()) == ["c1", "c2"]


def test_partitions_and_limits(bed: Testbed) -> None:
    said = bed.run(["sinfo", "--noheader", "-o", "%P %l %D"]).stdout.split("\n")
    assert [line.split() for line in said if line] == [["batch*", "infinite", "2"], ["short", "10:00", "2"]]


def test_many_small_jobs_fit_at_once(bed: Testbed) -> None:
    bed.run(["sbatch", "--array=1-24", "--mem=50", "--wrap", "sleep 30"])
    running = ["squeue", "--noheader", "-t", "R", "-r"]
    eventually(lambda: len(bed.run(running).stdout.splitlines()) == 24)
    bed.run(["scancel", "--user=user1"])
    eventually(lambda: bed.run(["squeue", "--noheader"]).stdout == "")


def test_accounting_knows_finished_jobs(bed: Testbed) -> None:
    job = bed.run(["sbatch", "--parsable", "--wrap", "exit 3"]).stdout.strip()
    ask = ["sacct", "-X", "--noheader", "--parsable2", "-j", job, "-o", "user,account,state,exitcode"]
    eventually(lambda: bed.run(ask).stdout.strip() == "user1|research|FAILED|3:0")


def test_a_users_limit_of_submitted_jobs_is_enforced_until_it_is_reset(bed: Testbed) -> None:
    submit = ["sbatch", "--parsable", "--hold", "--wrap", "true"]
    with association_limits(bed, "user1", MaxSubmitJobs=2):
        jobs = [bed.run(submit).stdout.strip() for _ in range(2)]
        refused = bed.run(submit, check=False)
        assert not refused.ok
        assert "AssocMaxSubmitJobLimit" in refused.stderr
        assert "violates accounting/QOS policy" in refused.stderr
        others = bed.run(submit, user="user2").stdout.strip()
    jobs.append(bed.run(submit).stdout.strip())
    bed.run(["scancel", *jobs, others], user="root")


def test_rest_answers_a_token_and_nobody_else(bed: Testbed) -> None:
    token = bed.run(["scontrol", "token"]).stdout.strip().removeprefix("SLURM_JWT=")
    curl = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", "http://login:6820/slurm/v0.0.40/ping"]
    assert bed.run(curl, host="c1").stdout == "401"
    headers = f'header = "X-SLURM-USER-NAME: user1"\nheader = "X-SLURM-USER-TOKEN: {token}"\n'
    assert bed.run([*curl, "-K", "-"], host="c1", stdin=headers).stdout == "200"


def test_the_command_passes_input_output_and_exit_code(bed: Testbed) -> None:
    data = bytes(range(256)) * 100
    done = cli("testbed", "exec", "--host", "c1", "--", "sh", "-c", "cat; echo oops >&2; exit 7", stdin=data)
    assert (done.returncode, done.stdout, done.stderr) == (7, data, b"oops\n")


@pytest.mark.parametrize(
    "word", ["$(id)", "`id`", "a;b", "'\"", "--help", "X=1", "two words\nand a line", "*"]
)
def test_arguments_arrive_as_they_are(bed: Testbed, word: str) -> None:
    assert bed.run(["printf", "%s", word]).stdout == word
    assert cli("testbed", "exec", "--", "printf", "%s", word).stdout.decode() == word


def test_the_environment_is_the_users_own(bed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKED", "yes")
    seen = dict(line.split("=", 1) for line in bed.run(["env"], user="user2").stdout.splitlines())
    assert (seen["HOME"], seen["USER"]) == ("/home/user2", "user2")
    assert "LEAKED" not in seen
    assert bed.run(["pwd"], user="user2").stdout == "/home/user2\n"


def test_what_does_not_exist_is_refused(bed: Testbed) -> None:
    with pytest.raises(UserError, match="no host 'c9'"):
        bed.run(["true"], host="c9")
    with pytest.raises(UserError, match="no user 'nobody'"):
        bed.run(["true"], user="nobody")
    with pytest.raises(UserError, match="is not a fault"):
        inject(bed, "set-on-fire", "c1")


def test_homes_are_private_and_shared_by_hosts(bed: Testbed) -> None:
    bed.run(["tee", "note"], stdin="hello")
    assert bed.run(["cat", "note"], host="c2").stdout == "hello"
    assert not bed.run(["cat", "/home/user1/note"], user="user2", check=False).ok


def test_scratch_is_each_hosts_own(bed: Testbed) -> None:
    bed.run(["touch", "/tmp/mine"], host="c1")
    assert not bed.run(["test", "-e", "/tmp/mine"], host="c2", check=False).ok


def test_containers_are_possible_without_root(bed: Testbed) -> None:
    script = (
        "cd $(mktemp -d) && mkdir l u w m && echo low > l/f && "
        "mount -t overlay o -o lowerdir=l,upperdir=u,workdir=w,userxattr m && echo up >> m/f && cat m/f && "
        "test -w /dev/net/tun && test -w /dev/fuse"
    )
    job = ["srun", "-N1", "unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    assert bed.run(job).stdout == "low\nup\n"


def test_one_user_has_subuids_and_one_has_not(bed: Testbed) -> None:
    tried = ["unshare", "--user", "--map-users=auto", "--map-groups=auto", "true"]
    assert not bed.run(tried, user="user1", check=False).ok
    assert bed.run(tried, user="user2").ok


def test_slurmlet_is_installed_and_not_the_checkout(bed: Testbed) -> None:
    where = ["python", "-c", "import slurmlet; print(slurmlet.__file__)"]
    for host in ("login", "c1"):
        assert bed.run(where, host=host).stdout.startswith("/opt/slurmlet/venv/lib/")
    assert bed.run(["slurmlet", "--version"], host="c2").ok
    cli("testbed", "install")  # in case a source file was edited since the testbed came up
    assert cli("testbed", "install").stderr.decode().endswith("already has this slurmlet.\n")


def test_the_registry_serves_the_images(bed: Testbed) -> None:
    for name in ("busybox", "app", "chowner"):
        assert bed.run(["crane", "digest", f"localhost:5000/{name}:1"]).stdout.startswith("sha256:")
        assert (
            bed.run(["tar", "tf", f"/opt/slurmlet/images/{name}.tar"]).stdout.split()[-1] == "manifest.json"
        )
    config = bed.run(["crane", "config", "localhost:5000/app:1"]).stdout
    assert '"User":"app"' in config
    assert '"WorkingDir":"/srv/app"' in config


def test_no_way_out_and_nothing_on_the_machines_network(bed: Testbed) -> None:
    assert bed.run(["ip", "route", "show", "default"]).stdout == ""
    assert not machine_links() & {"slt0", "login", "c1", "c2"}


def test_zombies_are_reaped(bed: Testbed) -> None:
    bed.run(["sh", "-c", "(sh -c 'sleep 0.2' &)"])
    time.sleep(0.6)
    assert "Z" not in bed.run(["ps", "-A", "-o", "stat="], user="root").stdout


def test_a_second_up_changes_nothing(bed: Testbed, paths: Paths) -> None:
    before = bed.init("c1")
    assert lifecycle.up(PLAN, paths=paths, quiet=True).already_up
    assert bed.init("c1") == before


def test_slurmctld_stops_and_starts(bed: Testbed) -> None:
    inject(bed, "stop-slurmctld")
    assert not bed.status().hosts["login"].services["slurmctld"]
    inject(bed, "start-slurmctld")
    assert bed.run(["srun", "true"]).ok


def test_a_job_outlives_its_slurmd(bed: Testbed) -> None:
    job = bed.run(["sbatch", "--parsable", "-w", "c1", "--wrap", "sleep 3; touch survived"]).stdout.strip()
    eventually(lambda: "RUNNING" in bed.run(["squeue", "-h", "-j", job, "-o", "%T"]).stdout)
    inject(bed, "kill-slurmd", "c1")
    assert not bed.status().hosts["c1"].services["slurmd"]
    eventually(lambda: bed.run(["test", "-e", "survived"], check=False).ok)
    inject(bed, "start-slurmd", "c1")
    eventually(lambda: bed.run(["squeue", "-h", "-j", job, "-t", "R"]).stdout == "")
    assert bed.status().hosts["c1"].services["slurmd"]


def test_a_host_is_taken_and_returned(bed: Testbed) -> None:
    process = bed.popen(["sleep", "600"], host="c2")
    inject(bed, "take-host", "c2")
    assert process.wait(timeout=5) != 0
    bed.stop(process)
    with pytest.raises(SiteError, match="c2 is off"):
        bed.run(["true"], host="c2")
    assert not bed.run(["ping", "-c1", "-W1", "c2"], check=False).ok
    inject(bed, "return-host", "c2")
    eventually(lambda: node_state(bed, "c2") == "idle")
    assert bed.run(["srun", "-w", "c2", "hostname"]).stdout == "c2\n"


def test_a_cable_is_cut_and_mended(bed: Testbed) -> None:
    inject(bed, "cut-network", "c1")
    assert not bed.run(["ping", "-c1", "-W1", "c1"], check=False).ok
    inject(bed, "mend-network", "c1")
    eventually(lambda: bed.run(["ping", "-c1", "-W1", "c1"], check=False).ok)


def test_scratch_is_filled_and_freed(bed: Testbed) -> None:
    write = ["dd", "if=/dev/zero", "of=/tmp/more", "bs=64k", "count=4"]
    inject(bed, "fill-scratch", "c1")
    assert "No space left" in bed.run(write, host="c1", check=False).stderr
    assert bed.run(write, host="c2").ok
    inject(bed, "free-scratch", "c1")
    assert bed.run(write, host="c1").ok


@pytest.mark.parametrize("host", ["c1", "login", SWITCH])
def test_up_mends_what_was_killed(bed: Testbed, paths: Paths, host: str) -> None:
    bed.run(["touch", "keep"])
    found = host_namespaces.find_init(paths, host)
    assert found is not None
    os.kill(found.pid, signal.SIGKILL)
    eventually(lambda: host_namespaces.find_init(paths, host) is None)
    assert not lifecycle.up(PLAN, paths=paths, quiet=True).already_up
    assert sorted(bed.run(["srun", "-N2", "hostname"]).stdout.split()) == ["c1", "c2"]
    assert bed.run(["test", "-e", "keep"]).ok


def test_a_dead_daemon_is_restarted(bed: Testbed, paths: Paths) -> None:
    inject(bed, "kill-slurmd", "c2")
    inject(bed, "stop-slurmctld")
    lifecycle.up(PLAN, paths=paths, quiet=True)
    assert bed.status().healthy
    assert bed.run(["srun", "-w", "c2", "hostname"]).stdout == "c2\n"


def test_a_stuck_command_is_ended(bed: Testbed) -> None:
    with pytest.raises(CommandError, match="timed out after 1 s"):
        bed.run(["sleep", "4321"], host="c1", timeout_s=1)
    assert "4321" not in bed.run(["ps", "-A", "-o", "args="], host="c1", user="root").stdout


def test_down_leaves_nothing_even_when_records_are_lost(bed: Testbed, paths: Paths) -> None:
    """The last test: it takes the testbed away."""
    for record in paths.hosts.glob("*.json"):
        record.unlink()
    assert lifecycle.down(paths=paths)
    assert host_namespaces.strays(paths) == []
    assert host_namespaces.leftovers(paths) == []
    assert not paths.run.exists()
    everything = run(["ps", "-A", "-o", "args="]).stdout
    assert str(paths.run) not in everything
    assert not lifecycle.down(paths=paths)
    with pytest.raises(SiteError, match="no testbed is up"):
        Testbed.running(paths)
    lifecycle.up(PLAN, paths=paths, quiet=True)  # for the fixture, and: it comes up again
