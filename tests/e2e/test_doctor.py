"""The doctor on a real Slurm: one user with a single uid, one with subordinate uids."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytestmark = pytest.mark.e2e


def lines_of(
    testbed: Any, user: str, *arguments: str
) -> tuple[dict[str, Any], dict[tuple[str, str], dict[str, Any]]]:
    done = testbed.run(["slurmlet", "doctor", "-o", "json", *arguments], user=user)
    answer = json.loads(done.stdout)
    return answer, {(line["where"], line["what"]): line for line in answer["lines"]}


@pytest.mark.parametrize(("user", "subuids"), [("user1", "degraded"), ("user2", "ok")])
def test_the_testbed_is_fit(testbed: Any, user: str, subuids: str) -> None:
    began_s = time.monotonic()
    answer, lines = lines_of(testbed, user)
    took_s = time.monotonic() - began_s
    assert answer["usable"]
    assert took_s < 5
    assert lines["node", "subordinate uids"]["status"] == subuids
    for what in (
        "user namespaces",
        "overlay",
        "TUN",
        "network namespaces",
        "seccomp notification",
        "pidfd_getfd",
        "low ports and ping",
        "ping of hosts",
        "pod network",
        "shared home",
        "connection to the login host",
        "Python",
        "container runtime",
    ):
        assert lines["node", what]["status"] == "ok", lines["node", what]
    assert lines["node", "host"]["found"].startswith("c")
    assert lines["login", "Slurm"]["found"].startswith(("24.11", "22.05"))
    assert testbed.run(["squeue", "-h", "-n", "slurmlet-doctor"], user=user).stdout == ""
    assert testbed.run(["sh", "-c", "ls -a ~ | grep doctor || true"], user=user).stdout == ""


def test_a_node_without_network_namespaces(testbed: Any) -> None:
    """The limit is the user's own to lower, in a user namespace: below it, a node is as such sites are."""
    script = "echo 0 > /proc/sys/user/max_net_namespaces; exec slurmlet doctor --node -o json"
    done = testbed.run(["unshare", "--user", "--map-root-user", "sh", "-c", script], host="c1")
    lines = {line["what"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["pod network"]["found"] == "no-netns"
    assert lines["network namespaces"]["status"] == "degraded"
    assert "user.max_net_namespaces > 0 (it is 0)" in done.stderr


def test_table_and_partition(testbed: Any) -> None:
    done = testbed.run(["slurmlet", "doctor", "--partition", "short"])
    assert done.stdout.splitlines()[0].split() == [
        "WHERE",
        "WHAT",
        "STATUS",
        "FOUND",
        "SLURMLET",
        "USES",
        "WITHOUT",
        "IT",
    ]
    assert "slurmlet works here" in done.stderr


def test_a_partition_that_does_not_exist(testbed: Any) -> None:
    done = testbed.run(["slurmlet", "doctor", "--partition", "no-such"], check=False)
    assert done.code == 1
    assert "invalid partition" in done.stdout
    assert "slurmlet cannot run here" in done.stderr


def test_on_a_node_without_a_job(testbed: Any) -> None:
    done = testbed.run(["slurmlet", "doctor", "--node"], host="c1")
    assert "user namespaces" in done.stdout
    assert "login" not in done.stdout


def test_without_slurm(testbed: Any) -> None:
    slurmlet = testbed.run(["sh", "-c", "command -v slurmlet"]).stdout.strip()
    done = testbed.run(["env", "PATH=/nowhere", slurmlet, "doctor"], check=False)
    assert done.code == 1
    assert "in PATH" in done.stdout
    assert "login node" in done.stderr
