"""The contract of Slurm's interface on the real thing: its commands, slurmrestd by TCP with a token, and by a Unix socket.

The suite itself (tests/contract/slurm_contract.py) runs inside the testbed, as user2: user1 has the cluster of other tests.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.testbed.faults import inject
from slurmlet.testbed.hosts import Testbed
from tests.contract import slurm_contract
from tests.e2e.conftest import Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

USER = "user2"
SOCKET = "/home/user2/slurmrestd-contract.sock"
TOKEN = "/home/user2/slurmrestd-contract.token"
KINDS = {
    "commands": "commands",
    "tcp": f"rest:http://login:6820,insecure,token_file={TOKEN},default_partition=batch",
    "socket": f"rest:unix:{SOCKET},default_partition=batch",
}
# What a person may have set for their own commands; none of it may be seen in what slurmlet asks.
DEFAULTS = {
    "SQUEUE_PARTITION": "short", "SBATCH_PARTITION": "short", "SBATCH_TIMELIMIT": "1", "SINFO_PARTITION": "short",
    "SQUEUE_FORMAT": "%i", "SACCT_FORMAT": "jobid",
}  # fmt: skip


def suite(testbed: Testbed, kind: str, *more: str) -> dict[str, str]:
    """What went wrong with each case."""
    source = Path(slurm_contract.__file__).read_text()
    done = testbed.run(
        ["/opt/slurmlet/venv/bin/python", "-", KINDS[kind], *more],
        user=USER, stdin=source, env=DEFAULTS, timeout_s=400,
    )  # fmt: skip
    told = next(line for line in done.stdout.splitlines() if line.startswith("told: "))
    found: dict[str, str] = json.loads(told.removeprefix("told: "))
    return found


@pytest.fixture(scope="module")
def own_slurmrestd(testbed: Testbed) -> Iterator[None]:
    """As any user may run one for themselves: it serves them alone, by what the kernel says of who connects."""
    testbed.run(["sh", "-c", f"umask 077; scontrol token lifespan=1800 > {TOKEN}"], user=USER)
    # It logs every request, and would stop for good once a pipe that nobody reads is full.
    process = testbed.popen(
        ["slurmrestd", "-a", "rest_auth/local", f"unix:{SOCKET}"],
        user=USER, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    eventually(lambda: testbed.run(["test", "-S", SOCKET], user=USER, check=False).ok, 20)
    yield
    testbed.stop(process)
    testbed.run(["rm", "-f", SOCKET, TOKEN], user=USER)


@pytest.fixture(scope="module", params=KINDS)
def told(request: pytest.FixtureRequest, testbed: Testbed, own_slurmrestd: Any) -> dict[str, str]:
    return suite(testbed, request.param)


@pytest.mark.parametrize("case", slurm_contract.CASES)
def test_the_contract_is_kept(told: dict[str, str], case: str) -> None:
    assert told[case] == "", told[case]


def test_a_cluster_over_slurmrestd_runs_pods(testbed: Testbed, own_slurmrestd: Any) -> None:
    cluster = "overrest"
    try:
        argv = ["slurmlet", "up", "-c", cluster, "--slurm", KINDS["socket"]]
        testbed.run(argv, user=USER, timeout_s=180)
        kubectl = Kubectl(testbed, "default", USER, cluster)
        eventually(lambda: kubectl("get", "serviceaccount", "default", check=False).ok, 30)
        at_once = {"annotations": {"slurmlet.io/launch": "immediate"}}
        kubectl.apply(pod("bad", "echo here; exit 3"), pod("going"), pod("eager", "true", metadata=at_once))
        kubectl.wait_phase("bad", "Failed")
        assert kubectl("logs", "bad").stdout == "here\n"
        (status,) = kubectl.pod("bad")["status"]["containerStatuses"]
        assert status["state"]["terminated"]["exitCode"] == 3
        kubectl.wait_phase("going", "Running")
        testbed.run(["scancel", kubectl.job_id("going")], user=USER)
        assert kubectl.wait_phase("going", "Failed")["status"]["reason"] == "JobCancelled"
        kubectl.wait_phase("eager", "Succeeded")
        kubectl.tells("eager", "Submitted", words="slurmrestd")
    finally:
        testbed.run(["slurmlet", "down", "-c", cluster, "--purge"], user=USER, timeout_s=120)


def test_a_controller_that_is_away_is_told_as_such(testbed: Testbed, own_slurmrestd: Any) -> None:
    inject(testbed, "stop-slurmctld")
    try:
        problems = {kind: suite(testbed, kind, "away") for kind in KINDS}
    finally:
        inject(testbed, "start-slurmctld")
        eventually(lambda: testbed.run(["squeue"], check=False).ok, 60)
    assert not any(text for told in problems.values() for text in told.values()), problems
