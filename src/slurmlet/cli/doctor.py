"""`slurmlet doctor`: what this site offers, what is missing, what to do about it."""

from __future__ import annotations

import dataclasses
import sys

import click

from slurmlet.base import console


@click.command()
@click.option(
    "--node", "only_here", is_flag=True, help="Judge this host as if it were a compute node; submits no job."
)
@click.option(
    "--partition", metavar="P", help="Probe a node of this partition (else of Slurm's default one)."
)
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
def command(only_here: bool, partition: str | None, output: str) -> None:
    """What this host and, through a small Slurm job, a compute node offer.

    Exit status 1 only if slurmlet cannot work here at all.
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
        console.say("slurmlet cannot work here:")
        for remedy in verdict.remedies:
            console.say(f"  {remedy}")
        sys.exit(1)
    bad = sum(line.status != "ok" for line in verdict.lines)
    console.say(
        "slurmlet works here." if not bad else f"slurmlet works here; not everything is ok ({bad} lines)."
    )
    for advice in verdict.advice:
        console.say(f"  {advice}")
