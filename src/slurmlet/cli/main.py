"""The `slurmlet` command: a group whose commands are imported only when they are used.

Add a command: write `cli/<name>.py` with a click command called `command`, and add its line to COMMANDS.
"""

from __future__ import annotations

import importlib
import sys

import click

from slurmlet import __version__
from slurmlet.base.errors import SlurmletError

# name -> help line. The help lives here so that `slurmlet --help` and completion import no command.
COMMANDS = {
    "up": "Bring up (or find running) my cluster.",
    "down": "Stop my cluster and every Slurm job it made.",
    "status": "What runs of my cluster, where, since when.",
    "ls": "Every cluster of mine.",
    "run": "A whole cluster inside one Slurm job, gone when its command ends.",
    "pool": "Slurm allocations that serve pods at once: add, rm, size, ls.",
    "kubectl": "Run kubectl against my cluster.",
    "kubeconfig": "Print the path of my cluster's kubeconfig.",
    "shell": "Open a shell with KUBECONFIG set and kubectl on its PATH.",
    "proxy": "A SOCKS5 and HTTP proxy into my cluster, for a browser or curl.",
    "image": "The image store: load, pull, ls, rm.",
    "doctor": "What this site offers, what is missing, what to do about it.",
    "bench": "Measure against bare Slurm, in the same run.",
    "testbed": "A real multi-host Slurm on this machine.",
    "upstream": "Fetch or build the pinned upstream binaries.",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"slurmlet.cli.{cmd_name}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog='Shell completion: eval "$(_SLURMLET_COMPLETE=bash_source slurmlet)" (or zsh_source, fish_source).',
)
@click.version_option(__version__, prog_name="slurmlet")
def app() -> None:
    """Your own Kubernetes on any Slurm cluster, without root."""


def main() -> None:
    try:
        app(prog_name="slurmlet")
    except SlurmletError as error:
        click.secho(f"slurmlet: {error.message}", fg="red", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(1)
