"""The operator under test on a provisioning site: installed from its own manifests, run as a process, killed, asked.

It comes to the API server as the ServiceAccount of its manifests, so that their roles are tried too. What a pod would be is
a process of host login here: webhooks are called at an address instead of a Service.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import write_private
from slurmlet.base.processes import Completed
from slurmlet.testbed.config_files import REST_PORT
from slurmlet.testbed.host_namespaces import wait_until
from slurmlet.testbed.provisioning import site_objects
from slurmlet.testbed.provisioning.management_cluster import API_PORT, kubeconfig
from slurmlet.testbed.provisioning.provision_site import ProvisionSite, done_on

Obj = dict[str, Any]
SLURMLET = str(Path(sys.executable).parent / "slurmlet")
NAME = "slurmlet-provision"
# Looks at the queue more often than a site would want: a test waits for each of them.
INTERVAL_S = 2
METRICS_PORT, WEBHOOK_PORT = 9810, 9811
_ADDRESS = "127.0.0.1"
# For tests that let the operator use Slurm's commands.
_TRUSTED = ("--trusted-namespace", site_objects.NAMESPACE)


@dataclass(frozen=True)
class SiteOperator:
    site: ProvisionSite
    name: str = "operator"
    metrics_port: int = METRICS_PORT
    webhook_port: int = WEBHOOK_PORT
    arguments: Sequence[str] = ()

    @property
    def kubeconfig(self) -> Path:
        return self.site.management.root / "operator.kubeconfig"

    def install(self, manifests: Path, *, rest: bool = True) -> None:
        """`rest`: Slurm is asked through slurmrestd; else by its commands."""
        cluster = self.site.management
        documents = [one for one in yaml.safe_load_all(manifests.read_text()) if one]
        cluster.apply(*(self._adapted(one) for one in documents if one["kind"] != "Deployment"))
        token = cluster.kubectl("-n", NAME, "create", "token", NAME, "--duration=24h").stdout.strip()
        authority = (cluster.root / "ca.crt").read_bytes()
        server = f"https://{_ADDRESS}:{API_PORT}"
        write_private(self.kubeconfig, kubeconfig(server, authority, token, NAME))
        self.connect(rest=rest)

    def connect(self, *, rest: bool) -> None:
        cluster = self.site.management
        connection: Obj = {"commands": {}}
        if rest:
            cluster.apply(site_objects.secret("slurm-token", token=self.site.rest_token()))
            reference = {"name": "slurm-token", "key": "token"}
            url = f"http://{_ADDRESS}:{REST_PORT}"
            connection = {"rest": {"url": url, "user": "root", "tokenSecretRef": reference}}
        cluster.apply(site_objects.slurm_cluster(connection))

    def start(self) -> None:
        """Returns when it answers."""
        argv = [
            SLURMLET, "provision", "run",
            "--kubeconfig", str(self.kubeconfig),
            "--interval", str(INTERVAL_S),
            "--metrics-port", str(self.metrics_port),
            "--webhook-port", str(self.webhook_port),
            "--webhook-name", _ADDRESS,
            *_TRUSTED,
            *self.arguments,
        ]  # fmt: skip
        path = f"{self.site.command_path()}:/usr/bin:/bin"
        self.site.management.launch(self.name, argv, {"PATH": path})
        wait_until(self._answers, 60, f"{self.name} to serve metrics", pause_s=0.2)

    def kill(self) -> None:
        self.site.management.end(self.name, kill=True)

    def stop(self) -> None:
        self.site.management.end(self.name)

    def running(self) -> bool:
        return self.site.management.running(self.name)

    def log(self) -> str:
        return self.site.management.log(self.name)

    def metrics(self) -> str:
        return done_on(self.site, ["curl", "-sf", f"http://{_ADDRESS}:{self.metrics_port}/metrics"]).stdout

    def ask(self, *words: str) -> Completed:
        """`slurmlet provision WORDS` of an administrator."""
        trusted = _TRUSTED if words[0] in ("plan", "status") else ()
        argv = [SLURMLET, "provision", *words, *trusted, "--kubeconfig", str(self.kubeconfig)]
        return done_on(self.site, argv)

    def _answers(self) -> bool:
        if not self.running():
            raise SlurmletError(f"{self.name} ended; the end of its log:\n{self.log()[-2000:]}")
        return bool(self.metrics())

    def _adapted(self, document: Mapping[str, Any]) -> Obj:
        if "webhooks" not in document:
            return dict(document)
        # The operator writes the path.
        config = {"url": f"https://{_ADDRESS}:{self.webhook_port}/"}
        return {**document, "webhooks": [{**one, "clientConfig": config} for one in document["webhooks"]]}
