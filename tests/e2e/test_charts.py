"""podinfo's own Helm chart, exactly as it is published, through the life of a release."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from slurmlet.testbed.hosts import Testbed
from tests.e2e import charting
from tests.e2e.conftest import CLUSTER, Kubectl, eventually, jobs_of
from tests.e2e.streaming import Forward

pytestmark = pytest.mark.e2e
PORT = 9898
READ = "import sys, urllib.request; print(urllib.request.urlopen('http://127.0.0.1:' + sys.argv[1]).read().decode())"


class Helm:
    """Helm of user1 in a test's namespace, with the release `web` of the chart."""

    def __init__(self, kubectl: Kubectl, folder: str) -> None:
        self._kubectl = kubectl
        self._folder = folder

    def __call__(self, verb: str, *options: str) -> str:
        kubectl = self._kubectl
        home = kubectl.testbed.environment(kubectl.user)["HOME"]
        config = f"--kubeconfig={home}/.slurmlet/{kubectl.cluster}/kubeconfig"
        patience = ["--timeout=150s"] if "--wait" in options else []
        argv = [f"{self._folder}/helm", verb, "web", config, "-n", kubectl.namespace, *patience, *options]
        return kubectl.testbed.run(argv, user=kubectl.user, timeout_s=180).stdout

    def put(self, verb: str, *values: str) -> None:
        """Install or upgrade to the chart with these values, and wait until all of it is ready."""
        self(verb, f"{self._folder}/chart", "--wait", *(f"--set={value}" for value in values))


@pytest.fixture
def helm(testbed: Testbed, kubectl: Kubectl) -> Iterator[Helm]:
    built = charting.build()
    here = testbed.paths.home / "user1" / f"charts-{CLUSTER}"
    shutil.rmtree(here, ignore_errors=True)
    shutil.copytree(built.root, here, ignore=shutil.ignore_patterns(".lock", "*.log"))
    here.chmod(0o755)
    folder = f"{testbed.environment()['HOME']}/{here.name}"
    testbed.run(["slurmlet", "image", "load", f"{folder}/image.tar", "--name", built.image])
    yield Helm(kubectl, folder)
    shutil.rmtree(here)


def pages(kubectl: Kubectl) -> list[dict[str, Any]]:
    """What each ready pod of the release answers to a browser."""
    found = []
    for one in kubectl.get("pods", None, "-l", "app.kubernetes.io/name=web-podinfo")["items"]:
        if one["metadata"].get("deletionTimestamp"):
            continue
        forward = Forward(kubectl, one["metadata"]["name"], PORT)
        try:
            found.append(
                json.loads(kubectl.testbed.run(["python3", "-c", READ, str(forward.local[PORT])]).stdout)
            )
        finally:
            forward.stop()
    return found


def test_a_published_chart_as_it_is(helm: Helm, kubectl: Kubectl) -> None:
    helm.put("install", "replicaCount=2")
    ready = kubectl.get("deployment", "web-podinfo")["status"]
    assert (ready["readyReplicas"], ready["availableReplicas"]) == (2, 2)
    first = pages(kubectl)
    assert len({page["hostname"] for page in first}) == 2
    greeting = first[0]["message"]

    helm.put("upgrade", "replicaCount=2", "ui.message=second revision")
    assert [page["message"] for page in pages(kubectl)] == ["second revision"] * 2

    helm("rollback", "1", "--wait")
    assert [page["message"] for page in pages(kubectl)] == [greeting] * 2
    history = json.loads(helm("history", "-o", "json"))
    assert [one["status"] for one in history] == ["superseded", "superseded", "deployed"]

    helm("uninstall", "--wait")
    eventually(lambda: not kubectl.get("pods")["items"])
    assert not [line for line in jobs_of(kubectl.testbed) if kubectl.namespace in line]


def test_the_plain_manifests_of_slurmlet_provision_are_what_its_chart_renders(tmp_path: Path) -> None:
    helm, here = charting.build().root / "helm", tmp_path / "provision"
    ours = Path(__file__).parents[2] / "packaging" / "provision"
    shutil.copytree(ours, here)
    subprocess.run([helm, "lint", "--strict", here / "chart"], check=True, timeout=60)
    subprocess.run([here / "render", helm], check=True, timeout=60)
    for file in (ours / "manifests").iterdir():
        assert (here / "manifests" / file.name).read_text() == file.read_text(), (
            "run packaging/provision/render"
        )
    every = "scaling.enabled=true,metrics.serviceMonitor=true,metrics.dashboard=true,certificates.mode="
    for mode in ("self", "cert-manager"):
        argv = [helm, "template", here / "chart", "--kube-version=1.30.0", f"--set={every}{mode}"]
        ran = subprocess.run(argv, check=True, timeout=60, capture_output=True, text=True)
        kinds = [one["kind"] for one in yaml.safe_load_all(ran.stdout) if one]
        assert ("Certificate" in kinds) == (mode == "cert-manager")
