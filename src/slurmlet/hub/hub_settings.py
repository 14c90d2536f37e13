"""What the hub knows from the start: the cluster's configuration and keys, read once from its directory."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.model.launch_mode import BATCH
from slurmlet.model.network_plan import PodNetwork
from slurmlet.protocol.pod_plan import OverlayTls
from slurmlet.slurm import connection
from slurmlet.slurm.connection import Connection

SERVER_NAME = "hub.slurmlet"
# In kube-system; its name is in the hub's certificate (controlplane/pki.py).
METRICS_SERVICE = "slurmlet-metrics"


@dataclass(frozen=True)
class Settings:
    files: ClusterFiles
    cluster: str
    cluster_id: str
    kubernetes_version: str
    api_address: str
    api_port: int
    partitions: frozenset[str] | None  # None: all of the site's; empty: no partition nodes at all
    host: str
    # None in a cluster that was brought up before pods had a network of their own: the next `up` gives it one.
    network: PodNetwork | None = None
    # A cluster inside one Slurm job: when the hub is told to end, everything is.
    ephemeral: bool = False
    # How pods start that do not say: model/launch_mode.py.
    launch: str = BATCH
    # How Slurm is reached.
    slurm: Connection = field(default_factory=Connection)
    # The budget of requests to slurmctld (docs/slurm.md). Jobs are looked at this often at first while somebody waits for
    # news, then less and less; at least this often while some are in the queue; and this often at rest.
    busy_poll_s: float = 0.3
    queued_poll_s: float = 10.0
    calm_poll_s: float = 30.0
    lease_s: int = 40
    lease_renew_s: float = 10.0
    # Partitions: as often as a kubelet looks at its node while there is something to do, and this often at rest.
    partition_poll_s: float = 10.0
    calm_partition_poll_s: float = 45.0
    sbatch_at_once: int = 8
    pulls_at_once: int = 3
    # To the API server, about pods. Few: what waits here does not stand in the way of people's own requests there.
    requests_at_once: int = 6

    @property
    def api_url(self) -> str:
        return f"https://{self.api_address}:{self.api_port}"

    def pki(self, name: str) -> Path:
        return self.files.pki / name


def load(directory: Path) -> Settings:
    config = read_json(directory / "cluster.json")
    if not config:
        raise SlurmletError(f"{directory} contains no cluster", hint="Run: slurmlet up")
    partitions = config.get("partitions")
    return Settings(
        files=ClusterFiles(directory),
        cluster=config["name"],
        cluster_id=config["id"],
        kubernetes_version=config["kubernetes"],
        api_address=config["api_address"],
        api_port=int(config["api_port"]),
        partitions=frozenset(partitions) if partitions is not None else None,
        host=socket.gethostname(),
        ephemeral=bool(config.get("ephemeral")),
        launch=config.get("launch", BATCH),
        slurm=connection.from_json(config.get("slurm") or {}),
        network=_network(ClusterFiles(directory), config),
    )


def _network(files: ClusterFiles, config: dict[str, Any]) -> PodNetwork | None:
    key = files.pki / "overlay.key"
    if not config.get("pod_range") or not key.exists():
        return None
    tls = _tls(files) if config.get("encrypt") else None
    return PodNetwork(config["pod_range"], config["service_range"], key.read_text().strip(), tls)


def _tls(files: ClusterFiles) -> OverlayTls:
    return {
        "ca": (files.pki / "overlay-ca.crt").read_text(),
        "cert": (files.pki / "netd.crt").read_text(),
        "key": (files.pki / "netd.key").read_text(),
    }
