"""`slurmlet up`."""

from __future__ import annotations

import click

from slurmlet.base.console import say
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import default_cluster
from slurmlet.model.launch_mode import WAYS


@click.command()
@click.option(
    "-c",
    "--cluster",
    default=default_cluster,
    help="Which cluster. [default: $SLURMLET_CLUSTER or 'default']",
)
@click.option(
    "--partition", "partitions", multiple=True, metavar="P", help="Only these Slurm partitions (repeat it)."
)
@click.option("--address", metavar="IP", help="The address of this host that compute nodes reach.")
@click.option(
    "--pod-range", metavar="CIDR", help="Addresses of pods, for a new cluster. [default: one that is free]"
)
@click.option("--service-range", metavar="CIDR", help="Addresses of Services, for a new cluster.")
@click.option(
    "--encrypt/--no-encrypt",
    default=None,
    help="Encrypt what pods say between hosts, for a new cluster; slower. [default: not]",
)
@click.option(
    "--launch",
    type=click.Choice(WAYS),
    help="How pods start that have no annotation slurmlet.io/launch. [default: as before, batch at first]",
)
@click.option("--pool", type=click.IntRange(0), metavar="N", help="Keep N pool nodes: see `slurmlet pool`.")
@click.option(
    "--pool-min", type=click.IntRange(0), metavar="N", help="An elastic pool: always this many nodes."
)
@click.option("--pool-max", type=click.IntRange(0), metavar="N", help="And up to this many while pods wait.")
@click.option("--timeout", "timeout_s", default=120.0, show_default=True, help="Seconds to wait.")
def command(
    cluster: str,
    partitions: tuple[str, ...],
    address: str | None,
    pod_range: str | None,
    service_range: str | None,
    encrypt: bool | None,
    launch: str | None,
    pool: int | None,
    pool_min: int | None,
    pool_max: int | None,
    timeout_s: float,
) -> None:
    """Bring up (or find running) my cluster; returns when a pod could be scheduled."""
    from slurmlet.controlplane.address_ranges import Wanted
    from slurmlet.controlplane.cluster_start import up

    files = ClusterFiles.named(cluster)
    done = up(
        files,
        partitions=partitions,
        address=address,
        wanted=Wanted(pod_range, service_range),
        encrypt=encrypt,
        launch=launch,
        timeout_s=timeout_s,
    )
    if pool is not None or pool_min is not None or pool_max is not None:
        from slurmlet.controlplane.pool_size import set_size

        set_size(files, pool_min or pool or 0, pool_max)
    what = "is already running" if done.already_running else f"is up after {done.took_s:.1f} s"
    say(f"Cluster {cluster!r} {what}: Kubernetes {done.config.kubernetes}, nodes {', '.join(done.nodes)}")
    say(f"  export KUBECONFIG={done.files.kubeconfig}")
    say(f"  slurmlet kubectl{f' --cluster {cluster}' if cluster != default_cluster() else ''} get nodes")
