"""`slurmlet kubectl`."""

from __future__ import annotations

import click

from slurmlet.controlplane.user_tools import exec_kubectl


@click.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="[--cluster NAME]",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="KUBECTL-ARGUMENTS…")
def command(arguments: tuple[str, ...]) -> None:
    """Run kubectl against the cluster.

    All arguments are passed to kubectl, except --cluster NAME where it comes first.
    """
    exec_kubectl(arguments)
