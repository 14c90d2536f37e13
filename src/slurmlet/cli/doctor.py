"""`slurmlet doctor`: what this site offers, what is missing, what to do about it."""

from __future__ import annotations

import dataclasses
import sys

import click

from slurmlet.base import console
from slurmlet.cli.options import output_option


@click.command()
@click.option(
    "--node",
    "only_here",
    is_flag=True,
    help="Check this host as if it were a compute node, and submit no job.",
)
@click.option(
    "--partition",
    metavar="NAME",
    show_default="Slurm's default partition",
    help="Partition whose nodes to check.",
)
@output_option
def command(only_here: bool, partition: str | None, output: str) -> None:
    """Check whether slurmlet can run on this host and on the compute nodes.

    A compute node is checked through a small Slurm job. Exits with status 1 if slurmlet cannot run here.
    """
    from slurmlet.doctor.site_facts import collect, collect_here
    from slurmlet.doctor.verdicts import Verdict, judge

    findings = collect_here() if only_here else collect(console.Steps(), partition=partition)
    verdict: Verdict = judge(findings)
    if output == "json":
        console.emit_json(
            {
                "usable": verdict.usable,
                "lines": [dataclasses.asdict(line) for line in verdict.lines],
                "facts": {"login": findings.here, "node": findings.node, "slurm": findings.slurm_config},
            }
        )
    else:
        rows = [
            [line.where, line.what, line.status, line.found, line.uses, line.without]
            for line in verdict.lines
        ]
        console.emit_table(["WHERE", "WHAT", "STATUS", "FOUND", "SLURMLET USES", "WITHOUT IT"], rows)
    if not verdict.usable:
        console.say("slurmlet cannot run here:")
        for remedy in verdict.remedies:
            console.say(f"  {remedy}")
        sys.exit(1)
    bad = sum(line.status != "ok" for line in verdict.lines)
    console.say(
        "slurmlet works here." if not bad else f"slurmlet works here; not everything is ok ({bad} lines)."
    )
    for advice in verdict.advice:
        console.say(f"  {advice}")
