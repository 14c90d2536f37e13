"""`slurmlet bench run`: a whole cluster in a job, beside a bare srun."""

from __future__ import annotations

import click

from slurmlet.base.console import emit_json, emit_table, say


@click.command()
@click.option(
    "-N",
    "--nodes",
    multiple=True,
    type=click.IntRange(1),
    default=(1, 3),
    show_default=True,
    help="Repeat it.",
)
@click.option("--runs", default=5, show_default=True, type=click.IntRange(1, 100))
@click.option("--srun", "options", multiple=True, metavar="OPTION", help="For both, such as --srun=-pshort.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(nodes: tuple[int, ...], runs: int, options: tuple[str, ...], output: str) -> None:
    """From `slurmlet run` to the workload's first instruction, and from its end to the end of all."""
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
