"""`slurmlet bench run`: a whole cluster in a job, beside a bare srun."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli.options import output_option


@click.command()
@click.option(
    "-N",
    "--nodes",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 3),
    show_default=True,
    help="Number of nodes; repeatable.",
)
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of measurements of each size.",
)
@click.option(
    "--srun",
    "options",
    multiple=True,
    metavar="OPTION",
    help="Option for both, such as --srun=-pshort; repeatable.",
)
@output_option
def command(nodes: tuple[int, ...], runs: int, options: tuple[str, ...], output: str) -> None:
    """Measure the time `slurmlet run` takes to start a command, and to clean up after it."""
    from slurmlet.bench import run_bench

    def told(size: int, bare_s: float, start_s: float, end_s: float) -> None:
        say(f"  {size} nodes: srun {bare_s:.3f} s; slurmlet run {start_s:.3f} s, end {end_s:.3f} s")

    sizes = run_bench.measure(list(dict.fromkeys(nodes)), runs, options, told)
    if output == "json":
        emit_json([size.as_json() for size in sizes])
        return
    rows = [
        [str(size.nodes), what, f"{one.median_s:.3f}", f"{one.p10_s:.3f}", f"{one.p90_s:.3f}"]
        for size in sizes
        for what, one in (("srun", size.srun), ("first instruction", size.start), ("end", size.end))
    ]
    emit_table(["NODES", "WHAT", "MEDIAN [s]", "P10", "P90"], rows)
