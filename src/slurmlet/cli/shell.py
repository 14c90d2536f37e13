"""`slurmlet shell`."""

from __future__ import annotations

import click

from slurmlet.base.console import say
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import default_cluster, exec_shell


@click.command()
@click.option(
    "-c",
    "--cluster",
    default=default_cluster,
    help="Which cluster. [default: $SLURMLET_CLUSTER or 'default']",
)
def command(cluster: str) -> None:
    """Open a shell with KUBECONFIG set and kubectl on its PATH."""
    files = ClusterFiles.named(cluster)
    say(f"kubectl talks to cluster {cluster!r} here; leave with `exit`.")
    exec_shell(files)
