"""`slurmlet run`."""

from __future__ import annotations

import sys

import click


class _RawCommand(click.Command):
    """Most arguments are srun's, which click does not know: `jobcluster/arguments` parses them, click prints the help."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["slurmlet.words"] = list(args)
        ours = args[: args.index("--")] if "--" in args else args
        return super().parse_args(ctx, ["--help"] if {"-h", "--help"} & set(ours) else [])


@click.command(
    cls=_RawCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="[-N n] [srun options] [OPTIONS]",
)
@click.option(
    "--manifest", multiple=True, metavar="FILE", help="Manifest to apply before the command; repeatable."
)
@click.option(
    "--wait",
    is_flag=True,
    help="Wait for the Jobs and pods of the manifests instead of a command, and follow their logs.",
)
@click.option(
    "--image", multiple=True, metavar="FILE", help="Image archive to load before the command; repeatable."
)
@click.option("--encrypt", is_flag=True, help="Encrypt pod traffic between hosts, at a lower bandwidth.")
@click.option(
    "--keep-logs",
    metavar="DIR",
    help="Directory in which to keep pod logs, events and the output of `kubectl get all`.",
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    show_default="120",
    help="Time to wait until the cluster is ready, in seconds.",
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    help="Print each step with its time to stderr, even when stderr is not a terminal.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.pass_context
def command(context: click.Context, /, **_parsed: object) -> None:
    """Run a command in a temporary cluster inside one Slurm job.

    The cluster is removed when COMMAND ends; the exit code is that of COMMAND. COMMAND runs on the job's first node with
    KUBECONFIG set and kubectl in PATH. Without COMMAND, an interactive shell is opened. On a login host a job is submitted
    with the given srun options; inside an allocation, that allocation is used.
    """
    from slurmlet.jobcluster import arguments, step_tasks

    words = context.meta["slurmlet.words"]
    sys.exit(step_tasks.run(arguments.parse(words)))
