"""Options that several commands take, so that they have one name, one default and one help text everywhere."""

from __future__ import annotations

import click

from slurmlet.controlplane.user_tools import default_cluster

cluster_option = click.option(
    "-c",
    "--cluster",
    metavar="NAME",
    default=default_cluster,
    show_default="$SLURMLET_CLUSTER or 'default'",
    help="Name of the cluster.",
)
output_option = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Format of the output.",
)
bench_image_option = click.option(
    "--image",
    metavar="REF",
    default="busybox:1",
    show_default=True,
    help="Image of the pods; it needs a shell and is pulled once, before the measurement.",
)
runtime_class_option = click.option(
    "--runtime-class",
    metavar="NAME",
    default="",
    help="RuntimeClass of the pods: pool or queue.",
)
