"""`slurmlet shell`."""

from __future__ import annotations

import click

from slurmlet.base.console import say
from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option
from slurmlet.controlplane.user_tools import exec_shell


@click.command()
@cluster_option
def command(cluster: str) -> None:
    """Open a shell with KUBECONFIG set and kubectl in PATH."""
    files = ClusterFiles.named(cluster)
    say(f"kubectl uses cluster {cluster!r} in this shell. Leave it with: exit")
    exec_shell(files)
