"""The contract of an administrator's Slurm on the real thing: its commands, and slurmrestd with root's token.

The suite itself (tests/contract/slurm_admin_contract.py) runs inside the testbed, as root.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slurmlet.testbed.faults import inject
from slurmlet.testbed.hosts import Testbed
from tests.contract import slurm_admin_contract
from tests.e2e.conftest import eventually

pytestmark = pytest.mark.e2e

TOKEN = "/root/slurmrestd-admin.token"
KINDS = {"commands": "commands", "rest": f"rest:http://login:6820,token_file={TOKEN},insecure"}
# What a person may have set for their own commands; none of it may be seen in what slurmlet asks.
DEFAULTS = {
    "SQUEUE_PARTITION": "short",
    "SQUEUE_FORMAT": "%i",
    "SQUEUE_STATES": "RUNNING",
    "SLURM_TIME_FORMAT": "%H",
}


def suite(testbed: Testbed, kind: str, *more: str) -> dict[str, str]:
    """What went wrong with each case."""
    testbed.run(
        ["sh", "-c", f"umask 077; test -s {TOKEN} || scontrol token lifespan=1800 > {TOKEN}"], user="root"
    )
    source = Path(slurm_admin_contract.__file__).read_text()
    argv = ["/opt/slurmlet/venv/bin/python", "-", KINDS[kind], *more]
    done = testbed.run(argv, user="root", stdin=source, env=DEFAULTS, timeout_s=300)
    told = next(line for line in done.stdout.splitlines() if line.startswith("told: "))
    found: dict[str, str] = json.loads(told.removeprefix("told: "))
    return found


@pytest.fixture(scope="module", params=KINDS)
def told(request: pytest.FixtureRequest, testbed: Testbed) -> dict[str, str]:
    return suite(testbed, request.param)


@pytest.mark.parametrize("case", slurm_admin_contract.CASES)
def test_the_contract_is_kept(told: dict[str, str], case: str) -> None:
    assert told[case] == "", told[case]


def test_a_controller_that_is_away_is_told_as_such(testbed: Testbed) -> None:
    testbed.run(["sh", "-c", f"umask 077; scontrol token lifespan=1800 > {TOKEN}"], user="root")
    inject(testbed, "stop-slurmctld")
    try:
        problems = {kind: suite(testbed, kind, "away") for kind in KINDS}
    finally:
        inject(testbed, "start-slurmctld")
        eventually(lambda: testbed.run(["squeue"], check=False).ok, 60)
    assert not any(text for told in problems.values() for text in told.values()), problems
