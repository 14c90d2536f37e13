from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

import pytest
import yaml

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane import kubeconfigs, pki
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.run_files import make_dirs, run_files

CONFIG = ClusterConfig(
    "exp", "0a1b2c3d", "2026-01-01T00:00:00Z", "v1.36.3", "login1", ("192.0.2.9",), "192.0.2.9", 40001, 40002,
    40003, "10.96.0.0/16", None,
)  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> ClusterFiles:
    files = ClusterFiles(tmp_path / "home" / "exp")
    make_dirs(files)
    pki.ensure(files.pki, pki.leaves("login1", CONFIG.addresses, CONFIG.service_range))
    return files


def test_person_gets_a_complete_file(files: ClusterFiles) -> None:
    kubeconfigs.write_all(files, CONFIG)
    parsed = yaml.safe_load(files.kubeconfig.read_text())
    assert parsed["clusters"][0]["cluster"]["server"] == "https://192.0.2.9:40001"
    key = base64.b64decode(parsed["users"][0]["user"]["client-key-data"])
    assert key == (files.pki / "admin.key").read_bytes()
    names = {parsed["contexts"][0]["name"], parsed["current-context"], parsed["clusters"][0]["name"]}
    assert names == {"slurmlet-exp"}
    assert files.kubeconfig.stat().st_mode & 0o777 == 0o600


def test_components_stay_on_this_host(files: ClusterFiles) -> None:
    kubeconfigs.write_all(files, CONFIG)
    for component in ("kube-controller-manager", "kube-scheduler"):
        path = run_files(files).kubeconfig(component)
        parsed = yaml.safe_load(path.read_text())
        assert parsed["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:40001"
        assert path.stat().st_mode & 0o777 == 0o600


def test_edits_of_the_person_survive_until_the_file_would_not_work(files: ClusterFiles) -> None:
    kubeconfigs.write_all(files, CONFIG)
    edited = files.kubeconfig.read_text().replace("  context:\n", "  context:\n    namespace: mine\n")
    files.kubeconfig.write_text(edited)
    kubeconfigs.write_all(files, CONFIG)
    assert files.kubeconfig.read_text() == edited
    kubeconfigs.write_all(files, dataclasses.replace(CONFIG, api_port=40999))
    parsed = yaml.safe_load(files.kubeconfig.read_text())
    assert parsed["clusters"][0]["cluster"]["server"] == "https://192.0.2.9:40999"
