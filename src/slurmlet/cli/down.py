"""`slurmlet down`."""

from __future__ import annotations

import sys

import click

from slurmlet.base.console import say
from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option


@click.command()
@cluster_option
@click.option("--purge", is_flag=True, help="Delete its data too: objects, logs, keys, persistent volumes.")
@click.option("--yes", is_flag=True, help="Skip the confirmation of --purge.")
@click.option(
    "--force",
    is_flag=True,
    help="Clean up a cluster that was started on another host and has no heartbeat there any more.",
)
def command(cluster: str, purge: bool, yes: bool, force: bool) -> None:
    """Stop the cluster and cancel its Slurm jobs.

    Without --purge its objects are kept, and the next `slurmlet up` restores them.
    """
    from slurmlet.controlplane.cluster_stop import down

    files = ClusterFiles.named(cluster)
    if purge and not yes and sys.stdin.isatty():
        volumes = len(list(files.volumes.iterdir())) if files.volumes.is_dir() else 0
        with_them = f", with the data of {volumes} persistent volumes" if volumes else ""
        click.confirm(f"Remove {files.root} and everything in it{with_them}?", abort=True, err=True)
    done = down(files, purge=purge, force=force)
    jobs = f", {done.cancelled_jobs} Slurm jobs cancelled" if done.cancelled_jobs else ""
    state = "is stopped" if done.was_running else "was not running"
    say(f"Cluster {cluster!r} {state}{jobs}{'; its data is deleted' if done.purged else ''}")
