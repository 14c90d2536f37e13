"""`slurmlet kubeconfig`."""

from __future__ import annotations

import click

from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option
from slurmlet.controlplane.user_tools import existing_kubeconfig


@click.command()
@cluster_option
def command(cluster: str) -> None:
    """Print the path of the cluster's kubeconfig file.

    \b
    export KUBECONFIG=$(slurmlet kubeconfig)
    """
    print(existing_kubeconfig(ClusterFiles.named(cluster)))
