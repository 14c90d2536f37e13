from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from slurmlet.base.errors import UserError
from slurmlet.base.files import private_dir
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import kubectl_environment, split_cluster


@pytest.mark.parametrize(
    ("arguments", "cluster", "rest"),
    [
        ([], "default", []),
        (["logs", "-c", "web", "pod"], "default", ["logs", "-c", "web", "pod"]),
        (["--cluster", "exp", "get", "pods"], "exp", ["get", "pods"]),
        (["--cluster=exp", "get"], "exp", ["get"]),
        (["get", "--cluster", "theirs"], "default", ["get", "--cluster", "theirs"]),
        (["--help"], "default", ["--help"]),
    ],
)
def test_only_a_leading_cluster_option_is_ours(
    arguments: list[str], cluster: str, rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURMLET_CLUSTER", raising=False)
    assert split_cluster(arguments) == (cluster, rest)


def test_cluster_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMLET_CLUSTER", "exp")
    assert split_cluster(["get", "pods"]) == ("exp", ["get", "pods"])
    assert split_cluster(["--cluster", "other", "get"]) == ("other", ["get"])


def test_a_cluster_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        kubectl_environment(ClusterFiles(tmp_path / "exp"), {})
    assert "slurmlet up -c exp" in caught.value.hint


def test_the_sites_proxy_is_not_asked_for_our_api(tmp_path: Path) -> None:
    files = ClusterFiles(private_dir(tmp_path / "exp"))
    files.kubeconfig.write_text("")
    files.config.write_text(
        '{"name": "exp", "id": "0a1b2c3d", "created_at": "", "kubernetes": "", "api_address": "192.0.2.9",'
        ' "api_port": 1, "etcd_port": 2, "etcd_peer_port": 3, "service_range": "", "partitions": null}'
    )
    assert "NO_PROXY" not in kubectl_environment(files, {"PATH": "/bin"})
    changed = kubectl_environment(files, {"https_proxy": "http://proxy", "NO_PROXY": "example.org"})
    assert changed["NO_PROXY"] == "example.org,192.0.2.9"
    assert changed["KUBECONFIG"] == str(files.kubeconfig)


def test_every_argument_reaches_kubectl_and_its_exit_status_comes_back(tmp_path: Path) -> None:
    binaries = private_dir(tmp_path / "bin")
    kubectl = binaries / "kubectl"
    kubectl.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(sys.argv[1:], os.environ['KUBECONFIG'])\nsys.exit(5)\n"
    )
    kubectl.chmod(0o700)
    root = private_dir(tmp_path / "home" / "default")
    (root / "kubeconfig").write_text("")
    words = [
        "exec",
        "-it",
        "pod",
        "-c",
        "web",
        "--",
        "sh",
        "-c",
        "echo $(id) 'x'",
        "--help",
        "-h",
        "--version",
    ]
    done = subprocess.run(
        [sys.executable, "-c", "from slurmlet.cli.main import main; main()", "kubectl", *words],
        env={
            "SLURMLET_HOME": str(root.parent),
            "SLURMLET_UPSTREAM_DIR": str(binaries),
            "HOME": str(tmp_path),
        },
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 5, done.stderr
    assert done.stdout == f"{words} {root / 'kubeconfig'}\n"
