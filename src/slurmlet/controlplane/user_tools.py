"""`slurmlet kubectl`, `kubeconfig`, `shell`: use the cluster with other tools.

Imports little and late: every kubectl call waits for it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from slurmlet.base.errors import UserError
from slurmlet.base.layout import DEFAULT_CLUSTER, ClusterFiles

CLUSTER_VARIABLE = "SLURMLET_CLUSTER"


def default_cluster() -> str:
    return os.environ.get(CLUSTER_VARIABLE) or DEFAULT_CLUSTER


def existing_kubeconfig(files: ClusterFiles) -> Path:
    if not files.kubeconfig.exists():
        chosen = "" if files.name == DEFAULT_CLUSTER else f" -c {files.name}"
        raise UserError(f"cluster {files.name!r} does not exist", hint=f"Create it with: slurmlet up{chosen}")
    return files.kubeconfig


def split_cluster(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Takes `--cluster NAME` off the front; everything else is kubectl's, whose own -c means a container."""
    if arguments and arguments[0] == "--cluster":
        if len(arguments) < 2:
            raise UserError(
                "--cluster needs a name", hint="Example: slurmlet kubectl --cluster NAME get pods"
            )
        return arguments[1], list(arguments[2:])
    if arguments and arguments[0].startswith("--cluster="):
        return arguments[0].partition("=")[2], list(arguments[1:])
    return default_cluster(), list(arguments)


def kubectl_path() -> Path:
    from slurmlet.upstream.binaries import ensure, find

    return find("kubectl") or ensure(["kubectl"]) / "kubectl"


def kubectl_environment(files: ClusterFiles, environment: Mapping[str, str]) -> dict[str, str]:
    """KUBECONFIG set, and the API server reached directly even where the site has a proxy for the outside."""
    from slurmlet.controlplane.cluster_config import load

    changed = {**environment, "KUBECONFIG": str(existing_kubeconfig(files)), CLUSTER_VARIABLE: files.name}
    config = load(files)
    if config is not None and any(name.lower() == "https_proxy" for name in environment):
        for name in ("no_proxy", "NO_PROXY"):
            known = environment.get(name, "")
            changed[name] = f"{known},{config.api_address}" if known else config.api_address
    return changed


def exec_kubectl(arguments: Sequence[str]) -> None:
    name, rest = split_cluster(arguments)
    environment = kubectl_environment(ClusterFiles.named(name), os.environ)
    kubectl = kubectl_path()
    os.execve(kubectl, ["kubectl", *rest], environment)  # noqa: S606


def exec_shell(files: ClusterFiles) -> None:
    environment = kubectl_environment(files, os.environ)
    environment["PATH"] = f"{kubectl_path().parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    shell = environment.get("SHELL") or "/bin/sh"
    os.execve(shell, [shell], environment)  # noqa: S606
