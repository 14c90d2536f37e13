"""Kubeconfigs: one for the user, one for each component. Certificates are embedded, so the file is all one needs."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from slurmlet.base.files import write_private
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.run_files import run_files

COMPONENT_IDENTITIES = {
    "kube-controller-manager": "controller-manager",
    "kube-scheduler": "scheduler",
    "coredns": "dns",
}


def write_all(files: ClusterFiles, config: ClusterConfig) -> None:
    for component, identity in COMPONENT_IDENTITIES.items():
        text = render(files.pki, identity, config.local_api_url, f"slurmlet-{config.name}")
        write_private(run_files(files).kubeconfig(component), text)
    _write_for_person(files, config)


def _write_for_person(files: ClusterFiles, config: ClusterConfig) -> None:
    text = render(files.pki, "admin", config.api_url, f"slurmlet-{config.name}")
    try:
        present = files.kubeconfig.read_text()
    except FileNotFoundError:
        present = ""
    # People set a namespace or add contexts with `kubectl config`: touch the file only when it would not work.
    needed = [config.api_url, *(_embedded(files.pki / name) for name in ("ca.crt", "admin.crt", "admin.key"))]
    if not all(value in present for value in needed):
        write_private(files.kubeconfig, text)
    files.kubeconfig.chmod(0o600)


def render(pki: Path, identity: str, server: str, name: str) -> str:
    """YAML written by hand: every value is an URL, a checked name or base64, and JSON strings are YAML."""
    return f"""apiVersion: v1
kind: Config
clusters:
- name: {json.dumps(name)}
  cluster:
    server: {json.dumps(server)}
    certificate-authority-data: {_embedded(pki / "ca.crt")}
users:
- name: {json.dumps(name)}
  user:
    client-certificate-data: {_embedded(pki / f"{identity}.crt")}
    client-key-data: {_embedded(pki / f"{identity}.key")}
contexts:
- name: {json.dumps(name)}
  context:
    cluster: {json.dumps(name)}
    user: {json.dumps(name)}
current-context: {json.dumps(name)}
"""


def _embedded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
