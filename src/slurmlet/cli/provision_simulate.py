"""`slurmlet provision simulate`: a recorded queue under a scaling policy, in simulated time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli.options import output_option

if TYPE_CHECKING:
    from slurmlet.operators.provisioning.autoscaler.worker_sets import WorkerSet
    from slurmlet.operators.provisioning.simulator.simulation import Outcome
    from slurmlet.operators.provisioning.simulator.trace_job import TraceJob

_POLICIES = ("slurmlet", "thesis", "slinky", "power-saving", "fixed")


@click.command()
@click.argument("trace", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--policy",
    "policies",
    type=click.Choice(_POLICIES),
    multiple=True,
    help="Name of a policy; may be repeated.",
    show_default="all",
)
@click.option(
    "--worker-sets",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Manifest with the WorkerSets to scale.",
)
@click.option(
    "--max", "most", default=32, show_default=True, type=click.IntRange(1, 65533), help="Maximum of nodes."
)
@click.option(
    "--min", "least", default=0, show_default=True, type=click.IntRange(0, 65533), help="Minimum of nodes."
)
@click.option(
    "--cpus", default=16, show_default=True, type=click.IntRange(1), help="Number of CPUs of a node."
)
@click.option(
    "--boot-time", default=300.0, show_default=True, help="Duration of a machine's boot, in seconds."
)
@click.option(
    "--idle-time", default=300.0, show_default=True, help="Time that a node must be idle to go, in seconds."
)
@click.option(
    "--generate",
    "generated",
    metavar="JOBS",
    type=click.IntRange(1, 1_000_000),
    help="Number of jobs of a generated trace, instead of TRACE.",
)
@click.option("--seed", default=1, show_default=True, help="Number that the generated trace follows from.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory to write the pictures, the figures and a generated trace to.",
)
@output_option
def command(
    trace: Path | None,
    policies: tuple[str, ...],
    worker_sets: Path | None,
    most: int,
    least: int,
    cpus: int,
    boot_time: float,
    idle_time: float,
    generated: int | None,
    seed: int,
    out: Path | None,
    output: str,
) -> None:
    """Show how jobs of TRACE would wait, and what machines would cost, under scaling policies.

    TRACE is a file in the Standard Workload Format, or what sacct prints with --parsable2 and a header.
    """
    from slurmlet.operators.provisioning.simulator.simulated_cluster import Delays
    from slurmlet.operators.provisioning.simulator.simulation import POLICIES, default_set, simulate

    if (trace is None) == (generated is None):
        raise click.UsageError("Give either TRACE or --generate JOBS.")
    if least > most:
        raise click.UsageError(f"--min is {least}, expected at most --max, which is {most}.")
    jobs = _jobs(trace, generated, seed, cpus, most)
    plain = default_set(cpus=cpus, memory_mb=4000 * cpus, most=most, least=least, scale_in_after_s=idle_time)
    sets = _sets(worker_sets) if worker_sets is not None else [plain]
    outcomes = []
    for name in policies or _POLICIES:
        say(f"  {name} …")
        outcomes.append(simulate(jobs, sets, POLICIES[name](), Delays(boot_s=boot_time)))
    if out is not None:
        _write(
            out, outcomes, jobs if generated is not None else [], trace.name if trace else f"{len(jobs)} jobs"
        )
    _print(outcomes, output)


def _jobs(trace: Path | None, generated: int | None, seed: int, cpus: int, most: int) -> list[TraceJob]:
    from slurmlet.operators.provisioning.simulator import trace_files

    if trace is not None:
        return trace_files.read_trace(trace)
    return trace_files.generate(generated or 0, seed, cpus_per_node=cpus, nodes=most)


def _sets(path: Path) -> list[WorkerSet]:
    import yaml

    from slurmlet.base.errors import UserError
    from slurmlet.operators.provisioning.autoscaler.worker_sets import parse_worker_set

    try:
        found = [one for one in yaml.safe_load_all(path.read_text()) if one]
    except yaml.YAMLError as error:
        raise UserError(f"{path}: is not YAML: {error}") from error
    sets = [
        parse_worker_set(one) for one in found if isinstance(one, dict) and one.get("kind") == "WorkerSet"
    ]
    if not sets:
        raise UserError(f"{path}: holds no object of kind WorkerSet")
    return sets


def _print(outcomes: list[Outcome], output: str) -> None:
    from slurmlet.operators.provisioning.simulator import simulation_report as report

    if output == "json":
        emit_json([report.as_json(one) for one in outcomes])
        return
    emit_table(report.HEAD, report.rows(outcomes))
    for one in outcomes:
        if one.decisions_s:
            times = report.decision_times(one)
            say(
                f"{times['count']} decisions of {times['mean_ms']} ms on the average (99 % within {times['p99_ms']} ms, "
                f"all within {times['most_ms']} ms of processor time), with up to {times['longest_queue']} waiting jobs."
            )


def _write(out: Path, outcomes: list[Outcome], generated: list[TraceJob], what: str) -> None:
    import json

    from slurmlet.operators.provisioning.simulator import simulation_report as report
    from slurmlet.operators.provisioning.simulator.trace_files import to_swf

    out.mkdir(parents=True, exist_ok=True)
    files = {
        "policies.svg": report.bar_picture(outcomes, f"Scaling policies on {what}"),
        "timeline.svg": report.timeline_picture(outcomes, f"Machines and waiting jobs on {what}"),
        "figures.json": json.dumps([report.as_json(one) for one in outcomes], indent=2) + "\n",
    }
    if generated:
        files["trace.swf"] = to_swf(generated, note="generated by slurmlet provision simulate --generate")
    for name, text in files.items():
        (out / name).write_text(text)
        say(f"Wrote {out / name}")
