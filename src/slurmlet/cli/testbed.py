"""`slurmlet testbed`: a real multi-host Slurm on this machine."""

from __future__ import annotations

import os

import click

from slurmlet.base.console import emit_json, emit_table, say
from slurmlet.testbed.testbed_plan import DEFAULT_SLURM, LOGIN, SUITES, Paths, Plan

_HOST = click.option("--host", default=LOGIN, show_default=True, help="Where: login, c1, c2 …")
_USER = click.option("--user", default="user1", show_default=True, help="As whom: user1, user2 or root.")


@click.group()
def command() -> None:
    """A real multi-host Slurm on this machine.

    Hosts login, c1, c2 … made of namespaces over a Debian root; users user1 and user2; partitions batch and short.
    Needs root (slurmlet itself never does).
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
    help="Slurm's version.",
)
@click.option("--no-accounting", is_flag=True, help="Leave slurmdbd and MariaDB out.")
@click.option("--no-rest", is_flag=True, help="Leave slurmrestd out.")
def up(nodes: int, slurm: str, no_accounting: bool, no_rest: bool) -> None:
    """Bring the testbed up, mend it, or find it running.

    The first time it makes a Debian root (about two minutes). A testbed with other options is taken down first.
    """
    from slurmlet.testbed import lifecycle

    outcome = lifecycle.up(Plan(nodes, slurm, not no_accounting, not no_rest))
    if outcome.already_up:
        say("The testbed is already up." + (" slurmlet was installed anew." if outcome.installed else ""))
    else:
        say(f"The testbed is up ({outcome.elapsed_s:.1f} s). Try: slurmlet testbed exec -- sinfo")


@command.command()
def down() -> None:
    """Take the testbed away, homes and jobs included; downloads and the Debian root stay cached."""
    from slurmlet.testbed import lifecycle

    say("The testbed is down." if lifecycle.down() else "No testbed was up.")


@command.command()
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", help="How to show it.")
def status(output: str) -> None:
    """Which hosts are on and what runs there. Exit code 1 when something is missing."""
    from slurmlet.testbed import hosts

    hosts.require_root()
    found = hosts.status(Paths.default())
    if output == "json":
        emit_json({**found.as_json(), "healthy": found.healthy})
    elif not found.up:
        say("No testbed is up. Bring one up: slurmlet testbed up")
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
    """Run CMD on a host as a user; its input, output, terminal and exit code are yours."""
    _become(argv, host, user)


@command.command()
@_HOST
@_USER
def shell(host: str, user: str) -> None:
    """Open a login shell on a host."""
    _become(("bash", "--login"), host, user)


def _become(argv: tuple[str, ...], host: str, user: str) -> None:
    from slurmlet.testbed.hosts import Testbed

    bed = Testbed.running()
    full = bed.argv(argv, host=host, user=user)
    os.execvpe(full[0], full, bed.environment(user))  # noqa: S606 - that there is no shell is the point


@command.command()
def install() -> None:
    """Install the slurmlet of this checkout anew for the testbed's users; does nothing when it is there already."""
    from slurmlet.testbed import lifecycle

    say("Installed." if lifecycle.reinstall() else "Nothing changed; the testbed has this slurmlet already.")


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="tools|servers|java|bench|sysbench…")
@click.option("--user", default="user1", show_default=True, help="Into whose store: user1 or user2.")
def load(names: tuple[str, ...], user: str) -> None:
    """Put images of programs nobody here wrote into a user's store; the first time they are made, from Debian's packages."""
    from slurmlet.testbed import server_images
    from slurmlet.testbed.hosts import Testbed

    server_images.load(Testbed.running(), names, user)
    say(f"Loaded: {' '.join(names)}")


@command.command()
@click.argument("verb", metavar="VERB")
@click.argument("arguments", nargs=-1, metavar="[HOST]")
def fault(verb: str, arguments: tuple[str, ...]) -> None:
    """Do harm on purpose, for tests.

    \b
    stop-slurmctld         start-slurmctld
    kill-slurmd HOST       start-slurmd HOST
    take-host HOST         return-host HOST      power off (every process dies) and on
    cut-network HOST       mend-network HOST
    fill-scratch HOST      free-scratch HOST     /tmp of the host
    hide-runtimes HOST     show-runtimes HOST    crun and runc
    """
    from slurmlet.testbed.faults import inject
    from slurmlet.testbed.hosts import Testbed

    inject(Testbed.running(), verb, *arguments)
    say(f"Done: {' '.join((verb, *arguments))}")
