"""`slurmlet ls`."""

from __future__ import annotations

import dataclasses

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.controlplane.cluster_status import age, clusters


@click.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(output: str) -> None:
    """Every cluster of mine."""
    lines = clusters()
    if output == "json":
        emit_json([dataclasses.asdict(line) for line in lines])
        return
    if not lines:
        say("No clusters yet; `slurmlet up` makes one.")
        return
    emit_table(
        ["NAME", "STATE", "HOST", "UP", "API"],
        [[line.name, line.state, line.host, age(line.since), line.api or "-"] for line in lines],
    )
