"""The operator under test as a process of the site: installed, started, killed, asked."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.processes import Completed
from slurmlet.testbed.provisioning import site_objects
from slurmlet.testbed.provisioning.provision_site import OPERATOR, ProvisionSite, done_on

SLURMLET = str(Path(sys.executable).parent / "slurmlet")
# Looks at the queue more often than a site would want: a test waits for each of them.
INTERVAL_S = 2
METRICS_PORT, WEBHOOK_PORT = 9810, 9811
LEASE_NAMESPACE = site_objects.NAMESPACE


@dataclass
class OperatorProcess:
    """`rest`: Slurm is asked through slurmrestd; else by its commands."""

    site: ProvisionSite
    name: str = OPERATOR
    port: int = METRICS_PORT
    webhook_port: int = WEBHOOK_PORT
    arguments: Sequence[str] = ()

    def install(self, *, rest: bool = True) -> None:
        cluster = self.site.management
        connection: dict[str, object] = {"commands": {}}
        if rest:
            cluster.apply(site_objects.secret("slurm-token", token=self.site.rest_token()))
            connection = {
                "rest": {
                    "url": "http://127.0.0.1:6820",
                    "user": "root",
                    "tokenSecretRef": {"name": "slurm-token", "key": "token"},
                }
            }
        cluster.kubectl("-n", site_objects.NAMESPACE, "delete", "slurmcluster", "--all", "--ignore-not-found")
        cluster.apply(site_objects.slurm_cluster(connection))

    def start(self) -> None:
        argv = [
            SLURMLET, "provision", "run",
            "--kubeconfig", str(self.site.management.kubeconfig),
            "--interval", str(INTERVAL_S),
            "--metrics-port", str(self.port),
            "--lease-namespace", LEASE_NAMESPACE,
            *self.arguments,
        ]  # fmt: skip
        path = f"{self.site.command_path()}:/usr/bin:/bin"
        self.site.management.launch(self.name, argv, {"PATH": path})
        self._await_metrics()

    def kill(self) -> None:
        self.site.management.end(self.name, kill=True)

    def stop(self) -> None:
        self.site.management.end(self.name)

    def running(self) -> bool:
        return self.site.management.running(self.name)

    def log(self) -> str:
        return self.site.management.log(self.name)

    def metrics(self) -> str:
        return done_on(self.site, ["curl", "-sf", f"http://127.0.0.1:{self.port}/metrics"]).stdout

    def ask(self, *words: str) -> Completed:
        """`slurmlet provision WORDS` of an administrator."""
        config = ["--kubeconfig", str(self.site.management.kubeconfig)]
        return done_on(self.site, [SLURMLET, "provision", *words, *config])

    def _await_metrics(self) -> None:
        deadline_s = time.monotonic() + 60
        while not self.metrics():
            assert self.running(), f"the operator ended:\n{self.log()[-3000:]}"
            assert time.monotonic() < deadline_s, f"no metrics after 60 s:\n{self.log()[-3000:]}"
            time.sleep(0.3)
