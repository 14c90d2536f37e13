"""`slurmlet run`."""

from __future__ import annotations

import sys

import click


class _RawCommand(click.Command):
    """Most words are srun's, which click does not know: `jobcluster/arguments` reads them; click only helps."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["slurmlet.words"] = list(args)
        ours = args[: args.index("--")] if "--" in args else args
        return super().parse_args(ctx, ["--help"] if {"-h", "--help"} & set(ours) else [])


@click.command(
    cls=_RawCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    options_metavar="[-N n] [srun options] [OPTIONS]",
)
@click.option("--manifest", multiple=True, metavar="FILE", help="Apply this file first (repeat it).")
@click.option(
    "--wait", is_flag=True, help="End when the manifests' Jobs and pods have, following their logs."
)
@click.option("--image", multiple=True, metavar="FILE", help="Load this image archive first (repeat it).")
@click.option("--encrypt", is_flag=True, help="Encrypt what pods say between hosts; slower.")
@click.option("--keep-logs", metavar="DIR", help="Leave pod logs, events and `kubectl get all` here.")
@click.option("--timeout", metavar="S", help="Seconds to wait for the cluster. [default: 120]")
@click.option("-v", "--verbose", is_flag=True, help="Progress with times on stderr, also in a pipe.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[-- COMMAND ...]")
@click.pass_context
def command(context: click.Context, /, **_parsed: object) -> None:
    """A whole cluster inside one Slurm job, gone when COMMAND ends; its exit code is the job's.

    COMMAND runs on the job's first host with KUBECONFIG set and kubectl on its PATH; without one, a shell does. On a login
    host the job is asked for with srun's own options; inside an allocation that one is used.
    """
    from slurmlet.jobcluster import arguments, step_tasks

    words = context.meta["slurmlet.words"]
    sys.exit(step_tasks.run(arguments.parse(words)))
