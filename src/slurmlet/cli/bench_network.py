"""`slurmlet bench network`: the pod network beside the bare hosts."""

from __future__ import annotations

from typing import Any

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli.options import cluster_option, output_option


@click.command()
@cluster_option
@click.option(
    "--runs",
    default=5,
    show_default=True,
    type=click.IntRange(1, 100),
    help="Number of rounds; each measures every path.",
)
@click.option(
    "--seconds",
    default=2,
    show_default=True,
    type=click.IntRange(1, 60),
    help="Duration of each measurement, in seconds.",
)
@click.option(
    "--image",
    default="localhost:5000/bench:1",
    show_default=True,
    help="Image of the pods: Debian with iperf3, sockperf, wrk, nginx and ping, and slirp4netns and passt to compare with.",
)
@click.option(
    "--hosts",
    metavar="A,B",
    show_default="two with free resources",
    help="Names of two hosts, for the clients and the servers.",
)
@click.option(
    "--partition", metavar="NAME", show_default="Slurm's default partition", help="Partition to measure in."
)
@click.option(
    "--services",
    default=0,
    show_default=True,
    type=click.IntRange(0, 4000),
    help="Number of additional Services, of ten endpoints each, during the measurement.",
)
@click.option("--only", metavar="TEXT", help="Select the measurements whose name contains TEXT, such as TCP.")
@click.option(
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(["pod", "service", "host", "slirp4netns", "pasta"]),
    show_default="all",
    help="Path to measure beside the bare hosts; repeatable.",
)
@click.option(
    "--picture", type=click.Path(dir_okay=False, writable=True), help="SVG file to draw the results to."
)
@output_option
def command(
    cluster: str, runs: int, seconds: int, image: str, hosts: str | None, partition: str | None, services: int,
    only: str | None, ways: tuple[str, ...], picture: str | None, output: str,
) -> None:  # fmt: skip
    """Measure the pod network against the bare hosts.

    Bandwidth, latency and connection rate are measured with the same programs in pods and on the hosts.
    """
    from slurmlet.base.errors import UserError
    from slurmlet.bench.network_bench import NetworkBench
    from slurmlet.bench.network_measurements import MEASUREMENTS, as_json

    chosen = [
        each.among(ways) if ways else each
        for each in MEASUREMENTS
        if only is None or only.lower() in each.name.lower()
    ]
    pair = hosts.split(",") if hosts else []
    if not chosen or len(pair) not in (0, 2):
        raise UserError(
            f"--only {only!r} matches no measurement"
            if not chosen
            else f"--hosts {hosts!r} does not name two hosts",
            hint=f"Measurements: {', '.join(each.name for each in MEASUREMENTS)}."
            if not chosen
            else "Separate them with a comma: --hosts c1,c2",
        )

    def told(number: int, name: str, way: str, value: float | None, problem: str) -> None:
        say(f"  {number}/{runs} {name}, {way}: {problem if value is None else f'{value:.4g}'}")

    result = as_json(
        NetworkBench(cluster, image, pair, partition, services).measure(runs, seconds, chosen, told)
    )
    if picture is not None:
        _draw(picture, result)
    if output == "json":
        emit_json(result)
    else:
        _show(result)


def _show(result: dict[str, Any]) -> None:
    from slurmlet.bench.network_measurements import TITLES

    rows = [
        _row(f"{name} [{told['unit']}]", TITLES[way], found, told)
        for name, told in result.items()
        for way, found in told["ways"].items()
    ]
    emit_table(["MEASUREMENT", "PATH", "MEDIAN", "SPREAD", "OF BARE", "TARGET"], rows)


def _row(what: str, way: str, found: dict[str, Any], told: dict[str, Any]) -> list[str]:
    if "median" not in found:
        return [what, way, "-", found["problem"], "-", "-"]
    wanted = "-"
    if found.get("holds") is not None:
        limit = f"{'≥' if told['more_is_better'] else '≤'} {told['wanted']:.2f}"
        wanted = f"{limit}: {'yes' if found['holds'] else 'no'}"
    ratio = "-" if found["ratio"] is None else f"{found['ratio']:.3f}"
    spread = f"{found['low']:.4g} … {found['high']:.4g}"
    return [what, way, f"{found['median']:.4g}", spread, ratio, wanted]


def _draw(path: str, result: dict[str, Any]) -> None:
    from pathlib import Path

    from slurmlet.base.bar_chart import bars
    from slurmlet.bench.network_measurements import TITLES

    groups = {
        f"{name} [{told['unit']}]": [
            (TITLES[way], found["median"]) for way, found in told["ways"].items() if "median" in found
        ]
        for name, told in result.items()
    }
    Path(path).write_text(bars("The pod network beside the bare hosts", groups))
    say(f"Wrote {path}")
