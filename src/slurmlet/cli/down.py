"""`slurmlet down`."""

from __future__ import annotations

import sys

import click

from slurmlet.base.console import say
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import default_cluster


@click.command()
@click.option(
    "-c",
    "--cluster",
    default=default_cluster,
    help="Which cluster. [default: $SLURMLET_CLUSTER or 'default']",
)
@click.option("--purge", is_flag=True, help="Forget its data too: objects, logs, keys, persistent volumes.")
@click.option("--yes", is_flag=True, help="Do not ask before --purge.")
@click.option(
    "--force",
    is_flag=True,
    help="Also forget a cluster that was started on another host and gives no sign of life there.",
)
def command(cluster: str, purge: bool, yes: bool, force: bool) -> None:
    """Stop my cluster and every Slurm job it made. Without --purge a later `up` brings its objects back."""
    from slurmlet.controlplane.cluster_stop import down

    files = ClusterFiles.named(cluster)
    if purge and not yes and sys.stdin.isatty():
        volumes = len(list(files.volumes.iterdir())) if files.volumes.is_dir() else 0
        with_them = f", with the data of {volumes} persistent volumes" if volumes else ""
        click.confirm(f"Remove {files.root} and everything in it{with_them}?", abort=True, err=True)
    done = down(files, purge=purge, force=force)
    jobs = f", {done.cancelled_jobs} Slurm jobs cancelled" if done.cancelled_jobs else ""
    state = "is stopped" if done.was_running else "was not running"
    say(f"Cluster {cluster!r} {state}{jobs}{'; its data is gone' if done.purged else ''}")
