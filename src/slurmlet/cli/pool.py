"""`slurmlet pool`: allocation nodes beside the partitions of a running cluster."""

from __future__ import annotations

import click

from slurmlet.base import console
from slurmlet.base.layout import ClusterFiles
from slurmlet.controlplane.user_tools import default_cluster

_CLUSTER = click.option(
    "-c",
    "--cluster",
    default=default_cluster,
    help="Which cluster. [default: $SLURMLET_CLUSTER or 'default']",
)


@click.group()
def command() -> None:
    """Slurm allocations that serve pods at once: add, rm, ls."""


@command.command()
@click.argument("count", type=click.IntRange(1), default=1)
@click.option(
    "--sbatch", "words", metavar="OPTIONS", default="", help="sbatch options of new nodes, as one argument."
)
@_CLUSTER
def add(count: int, words: str, cluster: str) -> None:
    """COUNT more pool nodes, each a Slurm job of its own."""
    from slurmlet.controlplane import pool_size

    spec = pool_size.grow(ClusterFiles.named(cluster), count, pool_size.options_of(words))
    console.say(f"The pool will have {spec.least} nodes. They serve pods as soon as Slurm grants them.")


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="NODE...")
@_CLUSTER
def rm(names: tuple[str, ...], cluster: str) -> None:
    """Drain these pool nodes, then let them go; no pod is killed for it."""
    from slurmlet.controlplane import pool_size

    pool_size.shrink(ClusterFiles.named(cluster), names)
    console.say("They go as soon as their pods have moved or finished.")


@command.command()
@click.option("--min", "least", type=click.IntRange(0), required=True, help="Always this many.")
@click.option(
    "--max", "most", type=click.IntRange(0), required=True, help="Up to this many while pods wait for a node."
)
@click.option(
    "--idle", "idle_s", type=float, help="Seconds without a pod after which one above the minimum goes."
)
@click.option(
    "--sbatch", "words", metavar="OPTIONS", default="", help="sbatch options of new nodes, as one argument."
)
@_CLUSTER
def size(least: int, most: int, idle_s: float | None, words: str, cluster: str) -> None:
    """How large the pool may be."""
    from slurmlet.controlplane import pool_size

    spec = pool_size.set_size(ClusterFiles.named(cluster), least, most, pool_size.options_of(words), idle_s)
    console.say(f"The pool will have {spec.least} to {spec.most} nodes.")


@command.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@_CLUSTER
def ls(output: str, cluster: str) -> None:
    """The pool's nodes and their Slurm jobs."""
    from slurmlet.controlplane.pool_size import members

    found = members(ClusterFiles.named(cluster))
    if output == "json":
        console.emit_json(found)
        return
    columns = ("node", "job", "state", "ready", "time_left")
    rows = [[str(one[name] if one[name] is not None else "") for name in columns] for one in found]
    console.emit_table([name.upper().replace("_", " ") for name in columns], rows)
