"""An upgrade in place, `pip install -U slurmlet` and `slurmlet up`, keeps the pods that run.

From the wheel of the commit before this one (SLURMLET_UPGRADE_FROM names another), or, where there is no history, of this
tree, each under another version number, to the wheel of this tree. In a venv of its own: nobody else's slurmlet changes.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slurmlet.testbed import wheel
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.testbed_plan import OPT
from tests.e2e.conftest import IMAGE, Kubectl, eventually, pod
from tests.e2e.streaming import Forward

pytestmark = pytest.mark.e2e

ROOT = Path(__file__).parents[2]
NAME, VENV = "upgrade", "/home/user1/upgrade-venv"
COUNTING = "i=0; while true; do i=$((i+1)); echo line $i; sleep 0.1; done"
SERVING = "mkdir /www; echo served >/www/index.html; exec httpd -f -p 8080 -h /www"


def history_holds(revision: str) -> bool:
    argv = ["git", "rev-parse", "--quiet", "--verify", f"{revision}^{{commit}}"]
    try:
        return subprocess.run(argv, cwd=ROOT, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def earlier_sources(target: Path) -> Path:
    revision = os.environ.get("SLURMLET_UPGRADE_FROM", "HEAD^")
    if history_holds(revision):
        packed = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
        ).stdout
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(target, filter="data")
    else:
        for name in ("src", "upstream"):
            shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copyfile(ROOT / name, target / name)
    # Another version also where the last commit changed nothing that is installed.
    project = (target / "pyproject.toml").read_text()
    (target / "pyproject.toml").write_text(project.replace('\nversion = "', '\nversion = "0.0.', 1))
    return target


class Installation:
    """slurmlet of user1's own, apart from the one that all tests use."""

    def __init__(self, testbed: Testbed) -> None:
        self._testbed = testbed

    def __call__(self, *words: str, timeout_s: float = 180) -> str:
        return self._testbed.run([f"{VENV}/bin/slurmlet", *words, "-c", NAME], timeout_s=timeout_s).stderr

    def install(self, built: Path) -> None:
        there = f"/home/user1/{built.name}"
        self._testbed.run(["sh", "-c", f"cat > {there}"], stdin=built.read_bytes())
        self._testbed.run(["sh", "-c", f"[ -x {VENV}/bin/pip ] || python3 -m venv {VENV}"], timeout_s=120)
        pip = [f"{VENV}/bin/pip", "--quiet", "--disable-pip-version-check", "install", "--no-index"]
        known = f"--find-links={OPT}/wheels"
        self._testbed.run([*pip, known, "--force-reinstall", "--no-deps", there], timeout_s=120)
        self._testbed.run([*pip, known, "slurmlet"], timeout_s=240)


@pytest.fixture
def old(testbed: Testbed, tmp_path: Path) -> Iterator[Installation]:
    """A cluster of the earlier slurmlet."""
    made = Installation(testbed)
    made.install(wheel.build_wheel(tmp_path / "old", earlier_sources(tmp_path / "sources")))
    try:
        made("up")
        yield made
    finally:
        made("down", "--purge")
        testbed.run(["rm", "-rf", VENV])


def statuses(kubectl: Kubectl) -> dict[str, tuple[str, int, str]]:
    """Of the pods that are to live on: phase, restarts, job."""
    found: dict[str, Any] = {name: kubectl.pod(name) for name in ("count-1", "count-2", "serve")}
    return {
        name: (
            one["status"]["phase"],
            one["status"]["containerStatuses"][0]["restartCount"],
            one["metadata"]["annotations"]["slurmlet.io/job-id"],
        )
        for name, one in found.items()
    }


def fetched(testbed: Testbed, forward: Forward) -> str:
    url = f"http://127.0.0.1:{forward.local[8080]}/"
    argv = ["python3", "-c", f"import urllib.request as u; print(u.urlopen('{url}').read().decode(), end='')"]
    return testbed.run(argv).stdout


def numbers(kubectl: Kubectl, name: str) -> list[int]:
    said = kubectl("logs", name).stdout.splitlines()
    return [int(line.split()[1]) for line in said]


def queued_job() -> dict[str, Any]:
    """A Job whose pod Slurm starts only after the upgrade."""
    template = pod("later", "echo done later")
    annotations = {"slurmlet.io/sbatch": "--begin=now+60"}
    template = {"metadata": {"annotations": annotations}, "spec": template["spec"]}
    return {
        "apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "later"},
        "spec": {"template": template, "backoffLimit": 0},
    }  # fmt: skip


def test_pods_go_on_over_an_upgrade(testbed: Testbed, old: Installation, tmp_path: Path) -> None:
    new = wheel.build_wheel(tmp_path / "new")
    kubectl = Kubectl(testbed, "default", cluster=NAME)
    eventually(lambda: kubectl("get", "serviceaccount", "default", check=False).code == 0)
    kubectl.apply(pod("count-1", COUNTING), pod("count-2", COUNTING), pod("serve", SERVING), queued_job())
    for name in ("count-1", "count-2", "serve"):
        kubectl.wait_phase(name, "Running", timeout_s=90)
    before = statuses(kubectl)
    watching = kubectl.start("exec", "serve", "--", "sleep", "600")
    forward = Forward(kubectl, "serve", 8080)
    assert fetched(testbed, forward) == "served\n"
    try:
        old.install(new)
        assert "is up after" in old("up")
    finally:
        testbed.stop(watching)
        forward.stop()

    # The same pods in the same jobs, and their runners found the new hub.
    assert statuses(kubectl) == before
    assert kubectl("exec", "serve", "--", "echo", "in the old pod").stdout == "in the old pod\n"
    forward = Forward(kubectl, "serve", 8080)
    try:
        assert fetched(testbed, forward) == "served\n"
    finally:
        forward.stop()
    for name in ("count-1", "count-2"):
        seen = numbers(kubectl, name)
        assert seen == list(range(1, len(seen) + 1))
        last = seen[-1]
        eventually(lambda name=name, last=last: numbers(kubectl, name)[-1] > last + 5, 10)  # type: ignore[misc]

    # What is new, and what waited.
    kubectl("run", "fresh", f"--image={IMAGE}", "--restart=Never", "--", "echo", "new")
    kubectl.wait_phase("fresh", "Succeeded", timeout_s=60)
    kubectl("wait", "--for=condition=complete", "job/later", "--timeout=120s", timeout_s=150)
    assert {restarts for _, restarts, _ in statuses(kubectl).values()} == {0}
    # A second `up` finds nothing to do.
    assert "is already running" in old("up")
    time.sleep(1)
    assert statuses(kubectl) == before
