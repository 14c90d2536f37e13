"""What a run's command finds in its environment: kubectl, KUBECONFIG, and the variables that KSI's workloads read."""

from __future__ import annotations

import os
from collections.abc import Mapping

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.cluster_config import ClusterConfig
from slurmlet.controlplane.user_tools import kubectl_environment, kubectl_path


def command_environment(
    files: ClusterFiles, config: ClusterConfig | None, environment: Mapping[str, str]
) -> dict[str, str]:
    changed = kubectl_environment(files, environment)
    changed["PATH"] = f"{kubectl_path().parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    if config is not None:
        # Readable by the user alone, as their processes' environments are; nothing of it is ever printed.
        changed |= {
            "K8S_CLUSTER_NAME": config.name,
            "K8S_CLUSTER_API": config.api_url,
            "K8S_CLUSTER_API_TOKEN": files.token.read_text().strip(),
            "K8S_CLUSTER_CA": str(files.pki / "ca.crt"),
            "K8S_PORT": str(config.api_port),
        }
    return changed
