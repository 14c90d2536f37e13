"""`make conformance`: the suite's verdict on the testbed as a table, exit code 1 when a spec failed."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import private_dir, write_json
from slurmlet.testbed.conformance import suite_results
from slurmlet.testbed.conformance.suite_build import build
from slurmlet.testbed.conformance.suite_run import Run
from slurmlet.testbed.hosts import Testbed

FOCUS = r"\[sig-(node|storage|apps)\].*\[Conformance\]"


@click.command()
@click.option("--focus", default=FOCUS, show_default=True, help="Which specs: a regular expression.")
@click.option("--skip", default="", help="Which of them not: a regular expression.")
@click.option("--user", default="user1", show_default=True, help="Whose cluster: user1 or user2.")
@click.option("-c", "--cluster", default="conformance", show_default=True)
@click.option("--workers", default=3, show_default=True, help="Slices side by side.")
@click.option("--size", default=4, show_default=True, help="Specs in a slice.")
@click.option("--list", "only_list", is_flag=True, help="Show the specs' names and run nothing.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def command(
    focus: str, skip: str, user: str, cluster: str, workers: int, size: int, only_list: bool, output: str
) -> None:
    """Run upstream's conformance specs against a slurmlet cluster on the testbed."""
    built = build()
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    logs = private_dir(built.root / "runs" / f"{cluster}-{stamp}-{os.getpid()}")
    run = Run(Testbed.running(), built, user, cluster, logs)
    run.prepare()
    specs = run.specs(focus or FOCUS, skip)
    if only_list:
        for name in specs:
            click.echo(name)
        return
    say(f"{len(specs)} specs; logs in {run.logs}")
    found = list(run.run(specs, workers, size))
    write_json(run.logs / "outcomes.json", [asdict(outcome) for outcome in found])
    count = suite_results.summary(found)
    if output == "json":
        emit_json([asdict(outcome) for outcome in found])
    else:
        rows = [
            [o.state, f"{o.seconds:.0f} s", o.name, o.where, o.message] for o in found if o.state != "passed"
        ]
        emit_table(["STATE", "TIME", "SPEC", "WHERE", "WHY"], rows)
    say(", ".join(f"{number} {state}" for state, number in count.items()) + f"; logs in {run.logs}")
    raise SystemExit(1 if count[suite_results.FAILED] or count[suite_results.UNKNOWN] else 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        command()
    except SlurmletError as error:
        say(f"{error.message}\n{error.hint}".strip())
        raise SystemExit(1) from error
