"""`slurmlet bench burst`: answers for people while very many pods come at once."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.base.layout import DEFAULT_CLUSTER


@click.command()
@click.option("-c", "--cluster", default=DEFAULT_CLUSTER, envvar="SLURMLET_CLUSTER", show_default=True)
@click.option("--pods", default=1000, show_default=True, type=click.IntRange(1, 10_000))
@click.option("--image", default="busybox:1", show_default=True, help="An image with a shell.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(cluster: str, pods: int, image: str, output: str) -> None:
    """`kubectl exec` and `logs` while nothing happens, while raw jobs go through, and while as many pods do."""
    from slurmlet.bench.burst import BurstBench

    def told(phase: str, exec_s: float, through: int) -> None:
        say(f"  {phase}: exec {exec_s:.2f} s ({through} through)")

    phases = BurstBench(cluster, image).measure(pods, told)
    if output == "json":
        emit_json([phase.as_json() for phase in phases])
        return
    rows = []
    for phase in phases:
        found = phase.as_json()
        times = [
            f"{found[what][at]:.2f}" for what in ("exec", "logs") for at in ("median_s", "p90_s", "worst_s")
        ]
        rows.append([phase.name, f"{phase.took_s:.0f}", *times, f"{found['lease_worst_age_s']:.1f}"])
    head = ["WHILE", "TOOK [s]", "EXEC [s]", "P90", "WORST", "LOGS [s]", "P90", "WORST", "OLDEST LEASE [s]"]
    emit_table(head, rows)
