"""`slurmlet pool`: allocation nodes beside the partitions of a running cluster."""

from __future__ import annotations

import click

from slurmlet.base import console
from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option, output_option


@click.group()
def command() -> None:
    """Manage the pool: nodes whose Slurm allocation is held, so that pods start immediately."""


@command.command()
@click.argument("count", type=click.IntRange(1), default=1)
@click.option(
    "--sbatch",
    "words",
    metavar="OPTIONS",
    default="",
    help="Options of sbatch for new nodes, as one argument.",
)
@cluster_option
def add(count: int, words: str, cluster: str) -> None:
    """Add COUNT nodes to the pool, each a Slurm job of its own."""
    from slurmlet.controlplane import pool_size

    spec = pool_size.grow(ClusterFiles.named(cluster), count, pool_size.options_of(words))
    console.say(f"The pool will have {spec.least} nodes. They become Ready when Slurm starts their jobs.")


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@cluster_option
def rm(names: tuple[str, ...], cluster: str) -> None:
    """Drain nodes and remove them from the pool.

    Pods of a controller are evicted, so that they move to other nodes; other pods run to their end.
    """
    from slurmlet.controlplane import pool_size

    pool_size.shrink(ClusterFiles.named(cluster), names)
    console.say("The nodes are removed when their pods have moved or ended.")


@command.command()
@click.option(
    "--min", "least", metavar="N", type=click.IntRange(0), required=True, help="Minimum number of nodes."
)
@click.option(
    "--max",
    "most",
    metavar="N",
    type=click.IntRange(0),
    required=True,
    help="Maximum number of nodes, reached while pods wait.",
)
@click.option(
    "--idle",
    "idle_s",
    metavar="SECONDS",
    show_default="unchanged; 120 for a new pool",
    type=float,
    help="Time without a pod after which a node above the minimum is released, in seconds.",
)
@click.option(
    "--sbatch",
    "words",
    metavar="OPTIONS",
    default="",
    help="Options of sbatch for new nodes, as one argument.",
)
@cluster_option
def size(least: int, most: int, idle_s: float | None, words: str, cluster: str) -> None:
    """Set the minimum and maximum number of nodes of the pool."""
    from slurmlet.controlplane import pool_size

    pool_size.check_range("--min", least, "--max", most)
    spec = pool_size.set_size(ClusterFiles.named(cluster), least, most, pool_size.options_of(words), idle_s)
    console.say(f"The pool will have {spec.least} to {spec.most} nodes.")


@command.command()
@output_option
@cluster_option
def ls(output: str, cluster: str) -> None:
    """List the nodes of the pool and their Slurm jobs."""
    from slurmlet.controlplane.pool_size import members

    found = members(ClusterFiles.named(cluster))
    if output == "json":
        console.emit_json(found)
        return
    columns = ("node", "job", "state", "ready", "time_left")
    rows = [[str(one[name] if one[name] is not None else "") for name in columns] for one in found]
    console.emit_table([name.upper().replace("_", " ") for name in columns], rows)
