"""A whole test site for `slurmlet provision`: Slurm, a management cluster, Cluster API and bare metal.

    with running_site(SiteSettings(), crds) as site:
        site.management.kubectl(...)          site.slurm("squeue")

Everything of it ends with the testbed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from slurmlet.base.processes import Completed, run
from slurmlet.testbed import lifecycle
from slurmlet.testbed.host_namespaces import enter_argv, wait_until
from slurmlet.testbed.hosts import Testbed
from slurmlet.testbed.provisioning import cluster_api, metal3_kinds, site_objects
from slurmlet.testbed.provisioning.machine_hosts import MachineHosts
from slurmlet.testbed.provisioning.management_cluster import ManagementCluster
from slurmlet.testbed.testbed_plan import LOGIN, NAME_VARIABLE, Plan, address_of

Obj = dict[str, Any]
PLAN = Plan(dynamic=True, accounting=False)
PROVIDER = "infrastructure-provider"
# Commands of Slurm's that the operator calls where it is not told of a slurmrestd.
_COMMANDS = ("squeue", "sinfo", "scontrol", "sacct", "sbatch", "scancel", "sacctmgr")


@dataclass(frozen=True)
class SiteSettings:
    machines: int = 6
    boot_s: float = 0.0
    host_labels: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ProvisionSite:
    bed: Testbed
    management: ManagementCluster
    settings: SiteSettings

    @property
    def machines(self) -> MachineHosts:
        return MachineHosts(self.bed)

    def slurm(self, *argv: str, user: str = "user1", check: bool = True) -> str:
        """What one of Slurm's commands says on host login."""
        return self.bed.run(argv, user=user, check=check).stdout

    def controller_log(self) -> str:
        """slurmctld's own log: what was done to nodes and jobs, however short it lasted."""
        path = self.bed.paths.host_dir(LOGIN) / "log" / "slurm" / "slurmctld.log"
        return path.read_text(errors="replace")

    def prepare(self, crds: Sequence[Mapping[str, Any]]) -> None:
        """What is there before a worker is asked for; `crds`: those of the operator under test."""
        cluster = self.management
        definitions = [*metal3_kinds.definitions(), *crds]
        cluster.apply(*definitions)
        names = [f"crd/{one['metadata']['name']}" for one in definitions]
        cluster.kubectl("wait", "--for=condition=Established", "--timeout=60s", *names, timeout_s=90)
        cluster.apply(site_objects.namespace(site_objects.NAMESPACE))
        cluster.apply(*site_objects.hosts(self.settings.machines, self.settings.host_labels))
        self.make_slinky()
        self.start_provider()
        cluster.apply(*site_objects.cluster(cluster.kubeconfig.read_text()))

    def start_provider(self, metal3: str = "v1beta2") -> None:
        """`metal3`: the version of its kinds that it reads and writes. One that runs is replaced."""
        self.management.end(PROVIDER)
        argv = [sys.executable, "-m", "slurmlet.testbed.provisioning.infrastructure_provider"]
        argv += [str(self.management.kubeconfig), "--metal3", metal3]
        env = {NAME_VARIABLE: self.bed.paths.name}
        self.management.launch_on_machine(PROVIDER, [*argv, "--boot-seconds", str(self.settings.boot_s)], env)

    def rest_token(self) -> str:
        said = self.slurm("scontrol", "token", "username=root", "lifespan=86400", user="root")
        return said.strip().partition("=")[2]

    def command_path(self) -> Path:
        """A folder with Slurm's commands for programs that run with the machine's files and host login's network."""
        folder = self.management.root / "slurm-commands"
        folder.mkdir(exist_ok=True)
        init = self.bed.init(LOGIN)
        for name in _COMMANDS:
            argv = enter_argv(init, "root", ["env", "-u", "SLURM_CONF", name])
            (folder / name).write_text(f'#!/bin/sh\nexec {" ".join(argv)} "$@"\n')
            (folder / name).chmod(0o755)
        return folder

    def make_slinky(self, namespace: str = site_objects.SLURM_NAMESPACE, *, old: bool = False) -> None:
        """Slinky's objects for the slurmctld of host login; its pod runs nowhere, so its address is written in."""
        cluster = self.management
        key = (self.bed.paths.etc / "slurm/slurm.key").read_bytes()
        cluster.apply(site_objects.namespace(namespace), site_objects.node(address_of(LOGIN)))
        cluster.apply(*site_objects.slinky_controller(key, namespace))
        here = ("-n", namespace)
        controller = cluster.get("controllers.slinky.slurm.net", site_objects.SLURM, *here)
        cluster.apply(site_objects.slinky_stateful_set(controller, namespace, old=old))
        pod = f"{site_objects.SLURM}-controller-0"
        wait_until(lambda: cluster.get("pod", pod, *here) is not None, 60, f"pod {pod}", pause_s=0.2)
        status = {"phase": "Running", "hostIP": address_of(LOGIN), "podIP": address_of(LOGIN)}
        cluster.kubectl(
            "patch", "pod", pod, *here, "--subresource=status", "--type=merge",
            "-p", json.dumps({"status": status}),
        )  # fmt: skip


def definitions_in(folder: Path) -> list[Obj]:
    return [
        document
        for path in sorted(folder.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
        if document
    ]


@contextmanager
def running_site(settings: SiteSettings, crds: Sequence[Mapping[str, Any]]) -> Iterator[ProvisionSite]:
    """Brought up from nothing, and taken down at the end."""
    parts = cluster_api.ensure()
    lifecycle.down()
    lifecycle.up(PLAN)
    try:
        site = ProvisionSite(Testbed.running(), ManagementCluster(Testbed.running(), parts), settings)
        site.management.start()
        site.prepare(crds)
        yield site
        site.management.stop()
    finally:
        if os.environ.get("KEEP") != "1":
            lifecycle.down()


def done_on(site: ProvisionSite, argv: Sequence[str], timeout_s: float = 60) -> Completed:
    """A program with host login's network and the machine's files."""
    init = site.bed.init(LOGIN)
    return run(["nsenter", f"--target={init.pid}", "--net", "--", *argv], timeout_s=timeout_s, check=False)
