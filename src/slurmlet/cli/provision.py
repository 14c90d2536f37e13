"""`slurmlet provision`: Slurm workers from Kubernetes, for administrators. Nothing of it is loaded before it is used."""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurmlet.base import console
from slurmlet.cli.options import output_option

if TYPE_CHECKING:
    from slurmlet.kube.client import ApiClient
    from slurmlet.kube.credentials import Credentials
    from slurmlet.operators.provisioning.provider_parts import WebhookSettings
    from slurmlet.operators.provisioning.slurm_access import SlurmSource

_T = TypeVar("_T")
# Commands with a file of their own, loaded when they are used: name → module.
_MODULES = {"simulate": "provision_simulate"}

kubeconfig_option = click.option(
    "--kubeconfig",
    metavar="FILE",
    envvar="KUBECONFIG",
    type=click.Path(dir_okay=False),
    default=None,
    show_default="$KUBECONFIG, the pod's service account, or ~/.kube/config",
    help="Path of the kubeconfig file of the management cluster.",
)
namespace_option = click.option(
    "-n",
    "--namespace",
    metavar="NAME",
    default="",
    help="Namespace of the WorkerSets and SlurmClusters; all namespaces where it is not given.",
)
trusted_option = click.option(
    "--trusted-namespace",
    "trusted",
    metavar="NAME",
    multiple=True,
    show_default="that of the credentials, and --namespace",
    help="Namespace whose SlurmClusters may use Slurm of this host and controllers elsewhere; may be given several times.",
)


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *_MODULES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        command = importlib.import_module(f"slurmlet.cli.{_MODULES[cmd_name]}").command
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Group)
def command() -> None:
    """Manage Slurm workers from Kubernetes: make, scale and retire them (for administrators)."""


@command.command()
@kubeconfig_option
@namespace_option
@trusted_option
@click.option(
    "--without",
    metavar="PART",
    multiple=True,
    help="Name of a part that is not run; may be given several times.",
)
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(0.5),
    default=15.0,
    show_default=True,
    help="Time between two looks at the queue, in seconds.",
)
@click.option(
    "--metrics-address",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    help="Address on which metrics and health are served.",
)
@click.option(
    "--metrics-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=9810,
    show_default=True,
    help="Port on which metrics and health are served; 0 for any.",
)
@click.option(
    "--lease-namespace",
    metavar="NAME",
    default="",
    show_default="that of the credentials",
    help="Namespace of the lease by which one of several replicas leads.",
)
@click.option(
    "--webhook-port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    default=0,
    show_default="webhooks are not served",
    help="Port on which webhooks are served.",
)
@click.option(
    "--webhook-address",
    metavar="ADDRESS",
    default="0.0.0.0",
    show_default=True,
    help="Address on which webhooks are served.",
)
@click.option(
    "--webhook-name",
    metavar="NAME",
    multiple=True,
    help="Name or address under which the API server calls webhooks; may be given several times.",
)
@click.option(
    "--webhook-certificates",
    metavar="DIRECTORY",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default="certificates are made and replaced by the operator",
    help="Path of a directory with tls.crt and tls.key, such as a mounted Secret of cert-manager.",
)
@click.option(
    "--injection-fail-open", is_flag=True, help="Admit metadata that cannot be completed, with a warning."
)
@click.option(
    "--scaling-fail-open",
    is_flag=True,
    help="Admit scaling of a mirror that cannot be followed, with a warning.",
)
def run(
    kubeconfig: str | None,
    namespace: str,
    trusted: tuple[str, ...],
    without: tuple[str, ...],
    interval_s: float,
    metrics_address: str,
    metrics_port: int,
    lease_namespace: str,
    **webhooks: Any,
) -> None:
    """Run the operator until it is stopped.

    It scales WorkerSets with the queue of their SlurmCluster, retires machines without ending a job, and keeps Slurm's
    records right. Several replicas may run: one of them leads.
    """
    from slurmlet.operators.provisioning import operator_process
    from slurmlet.operators.provisioning.operator_settings import OperatorSettings, chosen_parts

    credentials = _credentials(kubeconfig)
    home = lease_namespace or credentials.namespace or "default"
    trusting = frozenset({home, namespace, *trusted} - {""})
    settings = OperatorSettings(
        namespace=namespace,
        trusted=trusting,
        parts=chosen_parts(without),
        interval_s=interval_s,
        metrics_address=metrics_address,
        metrics_port=metrics_port,
        lease_namespace=home,
        webhooks=_webhook_settings(home, namespace, trusting, **webhooks),
    )
    sys.exit(operator_process.run(settings, credentials))


@command.command()
@kubeconfig_option
@namespace_option
@trusted_option
@output_option
def plan(kubeconfig: str | None, namespace: str, trusted: tuple[str, ...], output: str) -> None:
    """Print what the autoscaler would do now, and why; nothing is changed."""
    from slurmlet.operators.provisioning import status_view

    async def read(client: ApiClient, source: SlurmSource) -> list[status_view.ClusterPlan]:
        return await status_view.read_plan(client, source, time.time(), namespace)

    plans = _asked(kubeconfig, read, (namespace, *trusted))
    if output == "json":
        console.emit_json(status_view.as_json(plans))
        return
    for one in plans:
        print(f"SlurmCluster {one.name}{f': {one.problem}' if one.problem else ''}")
        for made in one.sets:
            print(
                f"  WorkerSet {made.worker_set}: desired {'unknown' if made.desired is None else made.desired}"
            )
            for text in made.reasons:
                print(f"    {text}")
            for text in made.acts:
                print(f"    → {text}")
        for title, texts in (("not counted", one.ignored), ("without workers", one.unplaced)):
            for text in texts:
                print(f"  {title}: {text}")


@command.command()
@kubeconfig_option
@namespace_option
@trusted_option
@output_option
def status(kubeconfig: str | None, namespace: str, trusted: tuple[str, ...], output: str) -> None:
    """Show machines and their Slurm state side by side, waiting jobs and the last decisions."""
    from slurmlet.operators.provisioning import status_view

    async def read(client: ApiClient, source: SlurmSource) -> list[status_view.ClusterView]:
        return await status_view.read_status(client, source, namespace)

    views = _asked(kubeconfig, read, (namespace, *trusted))
    if output == "json":
        console.emit_json(status_view.as_json(views))
        return
    for view in views:
        waiting = ", ".join(f"{count} {reason}" for reason, count in view.waiting.items()) or "none"
        print(f"SlurmCluster {view.name}: {view.problem or f'reachable; waiting jobs: {waiting}'}\n")
        console.emit_table(
            ("WORKERSET", "TARGET", "MIN", "MAX", "REPLICAS", "DESIRED", "WAITING", "DECIDED", "REASON"),
            [
                (one.name, one.target, str(one.min), str(one.max), _text(one.replicas), _text(one.desired),
                 str(one.waiting_jobs), one.decided_at, one.reason)
                for one in view.sets
            ],
        )  # fmt: skip
        print()
        console.emit_table(
            ("WORKERSET", "MACHINE", "PHASE", "NODE", "SLURM", "JOBS", "REASON"),
            [
                (row.worker_set or "-", row.machine or "-", row.phase or "-", row.node, row.state or "not registered",
                 ",".join(row.jobs) or "-", row.reason)
                for row in view.machines
            ],
        )  # fmt: skip
        print()


@command.command()
@click.argument("hostlist")
@kubeconfig_option
@namespace_option
def resume(hostlist: str, kubeconfig: str | None, namespace: str) -> None:
    """Start machines for the CLOUD nodes of HOSTLIST: a ResumeProgram for slurm.conf.

    The machines are made by the operator; this command returns when the nodes are written down.
    """
    from slurmlet.operators.provisioning.power_saving import resume_jobs

    jobs = resume_jobs(os.environ.get("SLURM_RESUME_FILE", ""))
    if jobs:
        console.say(f"for jobs {jobs}")
    _power(hostlist, kubeconfig, namespace, on=True)


@command.command()
@click.argument("hostlist")
@kubeconfig_option
@namespace_option
def suspend(hostlist: str, kubeconfig: str | None, namespace: str) -> None:
    """Stop the machines of the CLOUD nodes of HOSTLIST: a SuspendProgram for slurm.conf."""
    _power(hostlist, kubeconfig, namespace, on=False)


def _power(hostlist: str, kubeconfig: str | None, namespace: str, *, on: bool) -> None:
    from slurmlet.base.errors import UserError
    from slurmlet.model.host_lists import expand
    from slurmlet.operators.provisioning.power_saving import power

    try:
        nodes = expand(hostlist)
    except ValueError as error:
        raise UserError(f"HOSTLIST {hostlist!r}: {error}") from error

    async def write(client: ApiClient, _: SlurmSource) -> list[str]:
        return await power(client, namespace, nodes, on)

    for text in _asked(kubeconfig, write):
        console.say(text)


def _asked(
    kubeconfig: str | None,
    work: Callable[[ApiClient, SlurmSource], Awaitable[_T]],
    trusted: tuple[str, ...] = (),
) -> _T:
    """Do something with the API server and Slurm, and close both."""
    import tempfile

    from slurmlet.kube.client import ApiClient
    from slurmlet.operators.provisioning.slurm_access import SlurmConnections

    async def go() -> Any:
        with tempfile.TemporaryDirectory(prefix="slurmlet-provision-") as directory:
            credentials = _credentials(kubeconfig)
            async with ApiClient(credentials) as client:
                connections = SlurmConnections(
                    client, Path(directory), (credentials.namespace, *filter(None, trusted))
                )
                try:
                    return await work(client, connections)
                finally:
                    await connections.close()

    found: _T = asyncio.run(go())
    return found


def _credentials(kubeconfig: str | None) -> Credentials:
    from slurmlet.base.errors import SiteError
    from slurmlet.kube.credentials import from_kubeconfig, in_cluster

    if kubeconfig:
        return from_kubeconfig(Path(kubeconfig).expanduser())
    try:
        return in_cluster()
    except SiteError:
        return from_kubeconfig(Path.home() / ".kube" / "config")


def _webhook_settings(
    home: str,
    watched: str,
    trusted: frozenset[str],
    webhook_port: int,
    webhook_address: str,
    webhook_name: tuple[str, ...],
    webhook_certificates: Path | None,
    injection_fail_open: bool,
    scaling_fail_open: bool,
) -> WebhookSettings:
    from slurmlet.operators.provisioning.provider_parts import WebhookSettings

    if webhook_port and not webhook_name and webhook_certificates is None:
        raise click.UsageError("--webhook-port needs --webhook-name or --webhook-certificates")
    return WebhookSettings(
        namespace=home,
        watched=watched,
        trusted=trusted,
        address=webhook_address,
        port=webhook_port,
        names=webhook_name,
        certificates=webhook_certificates,
        injection_fail_open=injection_fail_open,
        scaling_fail_open=scaling_fail_open,
    )


def _text(value: int | None) -> str:
    return "-" if value is None else str(value)
