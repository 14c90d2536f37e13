"""`slurmlet bench`: measurements against bare Slurm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli import bench_burst, bench_network, bench_run
from slurmlet.cli.options import bench_image_option, cluster_option, output_option, runtime_class_option
from slurmlet.model.launch_mode import BATCH, WAYS

if TYPE_CHECKING:
    from slurmlet.bench.scale import Scale


@click.group()
def command() -> None:
    """Measure slurmlet against bare Slurm.

    Both are measured in turns within one run.
    """


command.add_command(bench_network.command, "network")
command.add_command(bench_burst.command, "burst")
command.add_command(bench_run.command, "run")


@command.command()
@cluster_option
@click.option(
    "--runs",
    default=20,
    show_default=True,
    type=click.IntRange(1, 1000),
    help="Number of measurements of each kind.",
)
@bench_image_option
@click.option(
    "--validate/--no-validate",
    default=True,
    show_default=True,
    help="Validate the manifest with kubectl before it is sent.",
)
@click.option(
    "--launch",
    type=click.Choice(WAYS),
    default=BATCH,
    show_default=True,
    help="Launch mode of the pods.",
)
@runtime_class_option
@output_option
def startup(
    cluster: str, runs: int, image: str, validate: bool, launch: str, runtime_class: str, output: str
) -> None:
    """Measure the start time of a pod and of a bare sbatch.

    The time runs from the request to the first instruction.
    """
    from slurmlet.bench.startup import StartupBench

    def told(number: int, raw_s: float, pod_s: float) -> None:
        say(f"  {number + 1}/{runs}: sbatch {raw_s:.3f} s, pod {pod_s:.3f} s")

    bench = StartupBench(cluster, image, validate=validate, launch=launch, runtime_class=runtime_class)
    result = bench.compare(runs, told)
    if output == "json":
        emit_json(result.as_json())
        return
    rows = [
        [name, f"{one.median_s:.3f}", f"{one.p10_s:.3f}", f"{one.p90_s:.3f}"]
        for name, one in (("sbatch", result.sbatch), ("pod", result.pod))
    ]
    emit_table(["WHAT", "MEDIAN [s]", "P10", "P90"], rows)
    told_json = result.as_json()
    say(f"A pod starts {told_json['difference_s']:+.3f} s after a bare sbatch (× {told_json['ratio']:.2f}).")


@command.command()
@cluster_option
@click.option(
    "--pods", default=200, show_default=True, type=click.IntRange(1, 10_000), help="Total number of pods."
)
@click.option(
    "--batch",
    default=50,
    show_default=True,
    type=click.IntRange(1, 10_000),
    help="Number of pods created at a time, in turns with as many jobs.",
)
@bench_image_option
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, writable=True),
    help="SVG file to draw the hub's memory and CPU usage to.",
)
@click.option(
    "--known",
    default=0,
    show_default=True,
    type=click.IntRange(0, 10_000),
    help="Number of additional pods whose jobs are held in the queue during the measurement.",
)
@runtime_class_option
@output_option
def scale(
    cluster: str,
    pods: int,
    batch: int,
    image: str,
    picture: str | None,
    known: int,
    runtime_class: str,
    output: str,
) -> None:
    """Measure the throughput of pods and of bare sbatch, and the load on the hub.

    The throughput is in pods per second, from the request until they are deleted.
    """
    from slurmlet.bench.scale import Batch, Crowd, ScaleBench

    def told(raw: Batch, made: Batch) -> None:
        say(f"  {raw.count} jobs: {raw.per_s:.1f} /s; {made.count} pods: {made.per_s:.1f} /s")

    def told_crowd(crowd: Crowd) -> None:
        say(
            f"  {crowd.count} pods known, all queued after {crowd.queued_s:.0f} s: "
            f"the hub uses {crowd.memory_bytes / 2**20:.0f} MiB"
        )

    if known:
        say(f"  {known} pods with held jobs …")
    result = ScaleBench(cluster, image, runtime_class).measure(pods, batch, told, known, told_crowd)
    if picture is not None:
        _draw(picture, result)
        say(f"Wrote {picture}")
    told_json = result.as_json()
    if output == "json":
        emit_json(told_json)
        return
    rows = [
        [
            name,
            str(one.count),
            f"{one.accepted_s:.2f}",
            f"{one.started_s:.2f}",
            f"{one.gone_s:.2f}",
            f"{one.per_s:.1f}",
        ]
        for pair in zip(result.sbatch, result.pods, strict=True)
        for name, one in zip(("sbatch", "pods"), pair, strict=True)
    ]
    emit_table(["WHAT", "COUNT", "ACCEPTED [s]", "ALL STARTED", "ALL GONE", "PER SECOND"], rows)
    hub = told_json["hub"]
    idle, full, peak = (hub[f"{name}_memory_bytes"] / 2**20 for name in ("idle", "full", "peak"))
    say(f"The rate of pods is {told_json['ratio']:.2f} times that of bare sbatch.")
    say(
        f"Hub: {idle:.1f} MiB idle, {full:.1f} MiB with a batch known, {peak:.1f} MiB peak, {hub['cpu_s']:.1f} s CPU."
    )


def _draw(path: str, result: Scale) -> None:
    from pathlib import Path

    from slurmlet.base.line_chart import chart

    memory = [(one.at_s, one.memory_bytes / 2**20) for one in result.hub]
    pairs = zip(result.hub, result.hub[1:], strict=False)
    cpu = [(after.at_s, (after.cpu_s - one.cpu_s) / (after.at_s - one.at_s) * 100) for one, after in pairs]
    text = chart("The hub while pods come and go", ("memory [MiB]", memory), ("CPU [%]", cpu))
    Path(path).write_text(text)
