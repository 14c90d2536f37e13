"""Logs larger than one file, and followers when a container ends or starts again."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

MI = 1 << 20
WIDE = 1000
# Numbered lines of a thousand bytes, as fast as they are taken.
TALK = """awk 'BEGIN { p = sprintf("%%0992d", 0); for (i = 1; i <= %d; i++) printf "%%06d %%s\\n", i, p }'"""


def log_files(kubectl: Kubectl, name: str) -> dict[str, int]:
    uid = kubectl.pod(name)["metadata"]["uid"]
    directory = f"/home/user1/.slurmlet/{kubectl.cluster}/pods/{uid}/logs/main"
    listed = kubectl.testbed.run(["find", directory, "-type", "f", "-printf", "%f %s %m\\n"]).stdout
    rows = [line.split() for line in listed.splitlines()]
    assert {mode for _, _, mode in rows} == {"600"}
    return {file: int(size) for file, size, _ in rows}


def numbers(out: bytes) -> list[int]:
    lines = out.splitlines()
    assert all(len(line) == WIDE - 1 for line in lines)
    return [int(line[:6]) for line in lines]


def test_a_large_log_is_rotated_and_reads_as_one(kubectl: Kubectl) -> None:
    kubectl.apply(
        pod("some", TALK % 25_000 + "; sleep 3600"),
        pod("much", TALK % 70_000),
    )
    kubectl.wait_phase("some", "Running")
    # A follower sees every line once, whatever is renamed under it.
    assert numbers(followed(kubectl, "some", 25_000)) == list(range(1, 25_001))
    files = log_files(kubectl, "some")
    assert len(files) == 3
    assert all(10 * MI <= size < 11 * MI for file, size in files.items() if file != "0.log")
    assert numbers(kubectl.raw("logs", "some")[1]) == list(range(1, 25_001))
    # More than the newest file has.
    assert numbers(kubectl.raw("logs", "some", "--tail=12000")[1]) == list(range(13_001, 25_001))
    assert len(kubectl.raw("logs", "some", "--limit-bytes=11000000")[1]) == 11_000_000
    kubectl.wait_phase("much", "Succeeded")
    assert len(log_files(kubectl, "much")) == 5
    left = numbers(kubectl.raw("logs", "much")[1])
    assert left == list(range(left[0], 70_001))
    assert 40_000 < len(left) < 60_000


def followed(kubectl: Kubectl, name: str, lines: int) -> bytes:
    """So many lines of a log that is followed from its beginning."""
    follower = kubectl.start("logs", "-f", name)
    try:
        assert follower.stdout is not None
        return b"".join(follower.stdout.readline() for _ in range(lines))
    finally:
        kubectl.testbed.stop(follower)


def test_following_ends_with_the_run_and_the_next_run_has_its_own_log(kubectl: Kubectl) -> None:
    """As a kubelet: the end of the process is the end of the stream, also where the container starts again."""
    again = "if [ -e /keep/seen ]; then echo second; sleep 3600; fi; touch /keep/seen; echo first; sleep 2; exit 3"
    kubectl.apply(
        pod(
            "again",
            again,
            restartPolicy="Always",
            container={"volumeMounts": [{"name": "keep", "mountPath": "/keep"}]},
            volumes=[{"name": "keep", "emptyDir": {}}],
        )
    )
    kubectl.wait_phase("again", "Running")
    code, out, _ = kubectl.raw("logs", "-f", "again", timeout_s=20)
    assert (code, out) == (0, b"first\n")

    def restarted() -> Any:
        return kubectl.pod("again")["status"]["containerStatuses"][0]["restartCount"] == 1

    eventually(restarted, 30)
    eventually(lambda: kubectl("logs", "again", check=False).stdout == "second\n", 15)
    assert kubectl("logs", "again", "--previous").stdout == "first\n"
