"""`slurmlet kubeconfig`."""

from __future__ import annotations

import click

from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import default_cluster, existing_kubeconfig


@click.command()
@click.option(
    "-c",
    "--cluster",
    default=default_cluster,
    help="Which cluster. [default: $SLURMLET_CLUSTER or 'default']",
)
def command(cluster: str) -> None:
    """Print the path of my cluster's kubeconfig: export KUBECONFIG=$(slurmlet kubeconfig)."""
    print(existing_kubeconfig(ClusterFiles.named(cluster)))
