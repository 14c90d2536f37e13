"""Scratch of compute nodes: TMPDIR of the cluster's user says where it is, and a full one is told with its remedy."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from slurmlet.testbed.hosts import Testbed
from tests.e2e.conftest import Kubectl, eventually, pod

pytestmark = pytest.mark.e2e

NAME, PLACE = "scratch", "/mnt"
SIZES = {"c1": "200m", "c2": "8m"}


@pytest.fixture
def kubectl(testbed: Testbed) -> Iterator[Kubectl]:
    """A cluster whose TMPDIR is roomy on one host and tiny on another."""
    for host, size in SIZES.items():
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=1777", "tmpfs", PLACE]
        testbed.run(mounting, host=host, user="root")
    testbed.run(["slurmlet", "up", "-c", NAME], env={"TMPDIR": PLACE}, timeout_s=180)
    try:
        here = Kubectl(testbed, "default", cluster=NAME)
        eventually(lambda: here("get", "serviceaccount", "default", check=False).code == 0)
        yield here
    finally:
        testbed.run(["slurmlet", "down", "--purge", "-c", NAME], timeout_s=120)
        for host in SIZES:
            testbed.run(["umount", "-l", PLACE], host=host, user="root")


def test_tmpdir_is_where_images_are_unpacked_and_a_full_one_is_told(
    testbed: Testbed, kubectl: Kubectl
) -> None:
    def on(host: str, name: str, command: str) -> None:
        metadata = {"annotations": {"slurmlet.io/sbatch": f"--nodelist={host}"}}
        kubectl.apply(pod(name, command, metadata=metadata))

    on("c1", "roomy", "sleep 600")
    kubectl.wait_phase("roomy", "Running", timeout_s=90)
    found = testbed.run(["sh", "-c", f"ls {PLACE}/slurmlet-*/images"], host="c1", user="root").stdout
    assert "sha256-" in found

    began_s = time.monotonic()
    on("c2", "full", "true")
    status = kubectl.wait_phase("full", "Failed", timeout_s=60)["status"]
    # The job is given back at once: nothing on this node changes by waiting.
    assert time.monotonic() - began_s < 45
    assert status["reason"] == "CreateContainerError"
    told = status["message"]
    assert f"no room on the node's scratch: {PLACE}/slurmlet-" in told
    assert "8 MiB free" in told
    assert "Set TMPDIR" in told
    kubectl.tells("full", "Failed", words="no room on the node's scratch")
