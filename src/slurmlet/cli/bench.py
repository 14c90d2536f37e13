"""`slurmlet bench`: measurements against bare Slurm."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.base.layout import DEFAULT_CLUSTER


@click.group()
def command() -> None:
    """Measure against bare Slurm, in the same run, interleaved."""


@command.command()
@click.option("-c", "--cluster", default=DEFAULT_CLUSTER, envvar="SLURMLET_CLUSTER", show_default=True)
@click.option("--runs", default=20, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--image", default="busybox:1", show_default=True, help="An image with a shell; pulled once beforehand."
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def startup(cluster: str, runs: int, image: str, output: str) -> None:
    """From the request to the first instruction: a pod beside a raw sbatch."""
    from slurmlet.bench.startup import StartupBench

    def told(number: int, raw_s: float, pod_s: float) -> None:
        say(f"  {number + 1}/{runs}: sbatch {raw_s:.3f} s, pod {pod_s:.3f} s")

    result = StartupBench(cluster, image).compare(runs, told)
    if output == "json":
        emit_json(result.as_json())
        return
    rows = [
        [name, f"{one.median_s:.3f}", f"{one.p10_s:.3f}", f"{one.p90_s:.3f}"]
        for name, one in (("sbatch", result.sbatch), ("pod", result.pod))
    ]
    emit_table(["WHAT", "MEDIAN [s]", "P10", "P90"], rows)
    told_json = result.as_json()
    say(f"A pod starts {told_json['difference_s']:+.3f} s after a raw sbatch (× {told_json['ratio']:.2f}).")
