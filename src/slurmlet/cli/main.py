"""The `slurmlet` command: a group whose commands are imported only when they are used.

Add a command: write `cli/<name>.py` with a click command called `command`, and add its line to COMMANDS.
"""

from __future__ import annotations

import importlib
import sys

import click

from slurmlet import __version__
from slurmlet.base.errors import SlurmletError

# name -> summary. It is written here so that `slurmlet --help` and completion import no command.
COMMANDS = {
    "up": "Start the cluster, or connect to a running one.",
    "down": "Stop the cluster and cancel its Slurm jobs.",
    "status": "Show the state of the cluster: components, nodes, pods and jobs.",
    "ls": "List your clusters.",
    "run": "Run a command in a temporary cluster inside one Slurm job.",
    "pool": "Manage the pool: nodes whose Slurm allocation is held, so that pods start immediately.",
    "kubectl": "Run kubectl against the cluster.",
    "kubeconfig": "Print the path of the cluster's kubeconfig file.",
    "shell": "Open a shell with KUBECONFIG set and kubectl in PATH.",
    "proxy": "Serve a SOCKS5 and HTTP proxy into the cluster, for a browser or curl.",
    "image": "Manage the image store.",
    "doctor": "Check whether slurmlet can run on this host and on the compute nodes.",
    "bench": "Measure slurmlet against bare Slurm.",
    "testbed": "Manage the testbed: a multi-host Slurm cluster on this machine (needs root).",
    "provision": "Manage Slurm workers from Kubernetes: make, scale and retire them (for administrators).",
    "upstream": "Download or build the pinned upstream binaries.",
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
    epilog='Enable shell completion: eval "$(_SLURMLET_COMPLETE=bash_source slurmlet)" (or zsh_source, fish_source).',
)
@click.version_option(__version__, prog_name="slurmlet")
def app() -> None:
    """Run your own Kubernetes cluster on Slurm, without root."""


def main() -> None:
    try:
        app(prog_name="slurmlet")
    except SlurmletError as error:
        click.secho(f"slurmlet: {error.message}", fg="red", err=True)
        if error.hint:
            click.echo(f"  {error.hint}", err=True)
        sys.exit(1)
