"""`slurmlet status`."""

from __future__ import annotations

import dataclasses
import sys

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.base.layout import ClusterFiles
from slurmlet.cli.options import cluster_option, output_option
from slurmlet.controlplane.cluster_status import ClusterState, age, status


@click.command()
@cluster_option
@output_option
def command(cluster: str, output: str) -> None:
    """Show the state of the cluster: components, nodes, pods and jobs.

    Exits with status 1 when the cluster is not running.
    """
    state = status(ClusterFiles.named(cluster))
    if output == "json":
        emit_json(dataclasses.asdict(state))
    elif state.running:
        _show(state)
    else:
        say(f"Cluster {cluster!r} is not running. Start it with: slurmlet up -c {cluster}")
    sys.exit(0 if state.running else 1)


def _show(state: ClusterState) -> None:
    ready = "ready" if state.api_ready else "not ready"
    print(f"Cluster   {state.config.name} ({state.config.id}) on {state.config.host}, up {age(state.since)}")
    print(f"API       {state.config.api_url}, {ready}, Kubernetes {state.config.kubernetes}")
    if state.config.encrypt:
        print("Network   encrypted between hosts")
    print(f"Pods      {_counts(state.pods)}")
    print(f"Jobs      {_counts(state.jobs) if state.jobs is not None else 'unknown: Slurm does not answer'}")
    if state.slurm_requests_last_minute is not None:
        print(f"Slurm     {state.slurm_requests_last_minute} requests to slurmctld in the last minute")
    print()
    emit_table(
        ["COMPONENT", "PID", "UP", "RESTARTS", "MEMORY"],
        [
            [
                part.name,
                str(part.pid) if part.running else "-",
                age(part.since) if part.running else "down",
                str(part.restarts),
                f"{part.memory_bytes >> 20} MiB" if part.memory_bytes else "-",
            ]
            for part in state.components
        ],
    )
    print()
    emit_table(
        ["NODE", "READY", "REASON"],
        [[node.name, "yes" if node.ready else "no", node.reason] for node in state.nodes],
    )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {name}" for name, number in sorted(counts.items())) or "none"
