"""`slurmlet ls`."""

from __future__ import annotations

import dataclasses

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli.options import output_option
from slurmlet.controlplane.cluster_status import age, clusters


@click.command()
@output_option
def command(output: str) -> None:
    """List your clusters."""
    lines = clusters()
    if output == "json":
        emit_json([dataclasses.asdict(line) for line in lines])
        return
    if not lines:
        say("No clusters found. Create one with: slurmlet up")
        return
    emit_table(
        ["NAME", "STATE", "HOST", "UP", "API"],
        [[line.name, line.state, line.host, age(line.since), line.api or "-"] for line in lines],
    )
