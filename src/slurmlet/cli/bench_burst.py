"""`slurmlet bench burst`: the latency of kubectl exec and logs while very many pods are created at once."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli.options import bench_image_option, cluster_option, output_option


@click.command()
@cluster_option
@click.option(
    "--pods",
    default=1000,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Number of pods, and of jobs.",
)
@bench_image_option
@output_option
def command(cluster: str, pods: int, image: str, output: str) -> None:
    """Measure the latency of kubectl exec and logs under a burst of pods.

    It is compared with the latency at rest, and under a burst of as many bare jobs.
    """
    from slurmlet.bench.burst import BurstBench

    def told(phase: str, exec_s: float, through: int) -> None:
        say(f"  {phase}: exec {exec_s:.2f} s ({through} done)")

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
