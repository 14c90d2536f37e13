"""`slurmlet up`."""

from __future__ import annotations

import click

from slurmlet.base.console import say
from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option
from slurmlet.controlplane.user_tools import default_cluster
from slurmlet.model.launch_mode import WAYS


@click.command()
@cluster_option
@click.option(
    "--partition",
    "partitions",
    multiple=True,
    metavar="NAME",
    show_default="all partitions",
    help="Partition of Slurm to offer as a node; repeatable.",
)
@click.option(
    "--address",
    metavar="IP",
    show_default="detected",
    help="Address of this host at which compute nodes reach it.",
)
@click.option(
    "--pod-range",
    metavar="CIDR",
    show_default="a free range",
    help="Address range of the pods; new clusters only.",
)
@click.option(
    "--service-range",
    metavar="CIDR",
    show_default="a free range",
    help="Address range of the Services; new clusters only.",
)
@click.option(
    "--encrypt/--no-encrypt",
    default=None,
    show_default="no-encrypt",
    help="Encrypt pod traffic between hosts, at a lower bandwidth; new clusters only.",
)
@click.option(
    "--launch",
    type=click.Choice(WAYS),
    show_default="unchanged; batch for a new cluster",
    help="Launch mode of pods without the annotation slurmlet.io/launch.",
)
@click.option(
    "--slurm",
    metavar="CONNECTION",
    envvar="SLURMLET_SLURM",
    show_default="unchanged; commands for a new cluster",
    help="Connection to Slurm: commands, rest:URL or rest:unix:PATH (docs/slurm.md).",
)
@click.option(
    "--pool", type=click.IntRange(0), metavar="N", help="Number of pool nodes to hold (see `slurmlet pool`)."
)
@click.option(
    "--pool-min", type=click.IntRange(0), metavar="N", help="Minimum number of nodes of an elastic pool."
)
@click.option(
    "--pool-max",
    type=click.IntRange(0),
    metavar="N",
    help="Maximum number of nodes of an elastic pool, reached while pods wait.",
)
@click.option(
    "--timeout",
    "timeout_s",
    metavar="SECONDS",
    default=120.0,
    show_default=True,
    help="Time to wait until the cluster is ready, in seconds.",
)
def command(
    cluster: str,
    partitions: tuple[str, ...],
    address: str | None,
    pod_range: str | None,
    service_range: str | None,
    encrypt: bool | None,
    launch: str | None,
    slurm: str | None,
    pool: int | None,
    pool_min: int | None,
    pool_max: int | None,
    timeout_s: float,
) -> None:
    """Start the cluster, or connect to a running one.

    Returns as soon as pods can be scheduled. Settings given here are kept for the next `slurmlet up`.
    """
    from slurmlet.controlplane.address_ranges import Wanted
    from slurmlet.controlplane.cluster_start import up
    from slurmlet.controlplane.pool_size import check_range, set_size
    from slurmlet.slurm.connection import parse

    files = ClusterFiles.named(cluster)
    least = pool if pool_min is None else pool_min
    check_range("--pool" if pool_min is None else "--pool-min", least, "--pool-max", pool_max)
    done = up(
        files,
        partitions=partitions,
        address=address,
        wanted=Wanted(pod_range, service_range),
        encrypt=encrypt,
        launch=launch,
        slurm=parse(slurm) if slurm else None,
        timeout_s=timeout_s,
    )
    if least is not None or pool_max is not None:
        set_size(files, least or 0, pool_max)
    what = "is already running" if done.already_running else f"is up after {done.took_s:.1f} s"
    say(f"Cluster {cluster!r} {what}: Kubernetes {done.config.kubernetes}, nodes {', '.join(done.nodes)}")
    say(f"  export KUBECONFIG={done.files.kubeconfig}")
    say(f"  slurmlet kubectl{f' --cluster {cluster}' if cluster != default_cluster() else ''} get nodes")
