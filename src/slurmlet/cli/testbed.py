"""`slurmlet testbed`: a multi-host Slurm cluster on this machine."""

from __future__ import annotations

import os

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.cli.options import output_option
from slurmlet.testbed.testbed_plan import DEFAULT_SLURM, LOGIN, SUITES, Paths, Plan

_HOST = click.option(
    "--host", default=LOGIN, show_default=True, metavar="NAME", help="Name of the host, such as login or c1."
)
_USER = click.option(
    "--user",
    default="user1",
    show_default=True,
    metavar="NAME",
    help="Name of the user: user1, user2 or root.",
)


@click.group()
def command() -> None:
    """Manage the testbed: a multi-host Slurm cluster on this machine (needs root).

    Its hosts (login, c1, c2 …) are made of namespaces over a Debian root; its users are user1 and user2, its partitions
    batch and short. slurmlet itself never needs root.
    """


@command.command()
@click.option(
    "--nodes", default=3, show_default=True, type=click.IntRange(1, 64), help="Number of compute hosts."
)
@click.option(
    "--slurm",
    default=DEFAULT_SLURM,
    show_default=True,
    type=click.Choice(list(SUITES)),
    help="Version of Slurm.",
)
@click.option("--no-accounting", is_flag=True, help="Leave out slurmdbd and MariaDB.")
@click.option("--no-rest", is_flag=True, help="Leave out slurmrestd.")
def up(nodes: int, slurm: str, no_accounting: bool, no_rest: bool) -> None:
    """Start the testbed, or repair a running one.

    The first start builds a Debian root, which takes minutes. A testbed with other options is taken down first.
    """
    from slurmlet.testbed import lifecycle

    outcome = lifecycle.up(Plan(nodes, slurm, not no_accounting, not no_rest))
    if outcome.already_up:
        say("The testbed is already up." + (" slurmlet was reinstalled." if outcome.installed else ""))
    else:
        say(f"The testbed is up ({outcome.elapsed_s:.1f} s). Try: slurmlet testbed exec -- sinfo")


@command.command()
def down() -> None:
    """Remove the testbed with its home directories and jobs.

    Downloads and the Debian root stay in the cache.
    """
    from slurmlet.testbed import lifecycle

    say("The testbed is down." if lifecycle.down() else "No testbed was up.")


@command.command()
@output_option
def status(output: str) -> None:
    """Show the hosts of the testbed and their services.

    Exits with status 1 when a host or a service is down.
    """
    from slurmlet.testbed import hosts

    hosts.require_root()
    found = hosts.status(Paths.default())
    if output == "json":
        emit_json({**found.as_json(), "healthy": found.healthy})
    elif not found.up:
        say("No testbed is up. Start one with: slurmlet testbed up")
    else:
        rows = []
        for name, host in found.hosts.items():
            services = " ".join(
                service if runs else f"{service}(down)" for service, runs in host.services.items()
            )
            rows.append([name, "on" if host.on else "off", host.slurm or "-", services])
        emit_table(["HOST", "POWER", "SLURM", "SERVICES"], rows)
    raise SystemExit(0 if found.healthy else 1)


@command.command(
    name="exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@_HOST
@_USER
@click.argument("argv", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD [ARG]…")
def exec_(host: str, user: str, argv: tuple[str, ...]) -> None:
    """Run CMD on a host as a user.

    It is connected to this terminal; the exit code is that of CMD.
    """
    _become(argv, host, user)


@command.command()
@_HOST
@_USER
def shell(host: str, user: str) -> None:
    """Open a login shell on a host as a user."""
    _become(("bash", "--login"), host, user)


def _become(argv: tuple[str, ...], host: str, user: str) -> None:
    from slurmlet.testbed.hosts import Testbed

    bed = Testbed.running()
    full = bed.argv(argv, host=host, user=user)
    os.execvpe(full[0], full, bed.environment(user))  # noqa: S606 - that there is no shell is the point


@command.command()
def install() -> None:
    """Install the slurmlet of this checkout for the users of the testbed."""
    from slurmlet.testbed import lifecycle

    say("Installed." if lifecycle.reinstall() else "Nothing to do: the testbed already has this slurmlet.")


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="tools|servers|java|bench|sysbench…")
@click.option(
    "--user",
    default="user1",
    show_default=True,
    metavar="NAME",
    help="Name of the user whose store is filled: user1 or user2.",
)
def load(names: tuple[str, ...], user: str) -> None:
    """Load images of third-party programs into a user's image store.

    They are built from Debian packages the first time.
    """
    from slurmlet.testbed import server_images
    from slurmlet.testbed.hosts import Testbed

    server_images.load(Testbed.running(), names, user)
    say(f"Loaded: {' '.join(names)}")


@command.command()
@click.argument("verb", metavar="VERB")
@click.argument("arguments", nargs=-1, metavar="[HOST]")
def fault(verb: str, arguments: tuple[str, ...]) -> None:
    """Inject a fault, for tests, or undo one.

    \b
    stop-slurmctld         start-slurmctld
    kill-slurmd HOST       start-slurmd HOST
    take-host HOST         return-host HOST      power off and on
    cut-network HOST       mend-network HOST
    fill-scratch HOST      free-scratch HOST     /tmp of the host
    hide-runtimes HOST     show-runtimes HOST    crun and runc
    """
    from slurmlet.testbed.faults import inject
    from slurmlet.testbed.hosts import Testbed

    inject(Testbed.running(), verb, *arguments)
    say(f"Done: {' '.join((verb, *arguments))}")
