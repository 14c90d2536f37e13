"""cluster.json: what `slurmlet up` decided. The supervisor and the hub read it; only `up` and the supervisor write it."""

from __future__ import annotations

import dataclasses
import datetime
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.base.files import read_json, write_json
from slurmlet.base.host_addresses import LOOPBACK, free_port
from slurmlet.base.layout import DEFAULT_CLUSTER, ClusterFiles
from slurmlet.controlplane.address_ranges import Ranges
from slurmlet.model.launch_mode import BATCH
from slurmlet.slurm import connection
from slurmlet.slurm.connection import Connection


@dataclass(frozen=True)
class ClusterConfig:
    name: str
    id: str
    created_at: str
    kubernetes: str
    host: str
    addresses: tuple[str, ...]
    api_address: str
    api_port: int
    etcd_port: int
    etcd_peer_port: int
    service_range: str
    partitions: tuple[str, ...] | None
    # "" in a cluster that was made before pods had a network; its next `up` chooses one.
    pod_range: str = ""
    # Where CoreDNS listens, on loopback.
    dns_port: int = 0
    # A cluster inside one Slurm job: gone with it, so nothing need survive a crash.
    ephemeral: bool = False
    # What pods say between hosts is encrypted.
    encrypt: bool = False
    # How pods start that do not say.
    launch: str = BATCH
    # How Slurm is reached: slurm/connection.py.
    slurm: dict[str, str] = field(default_factory=dict)

    @property
    def connection(self) -> Connection:
        return connection.from_json(self.slurm)

    @property
    def api_url(self) -> str:
        return f"https://{self.api_address}:{self.api_port}"

    @property
    def local_api_url(self) -> str:
        return f"https://{LOOPBACK}:{self.api_port}"

    def save(self, files: ClusterFiles) -> None:
        write_json(files.config, dataclasses.asdict(self))


def load(files: ClusterFiles) -> ClusterConfig | None:
    raw = read_json(files.config)
    return from_json(raw) if isinstance(raw, dict) else None


def load_existing(files: ClusterFiles) -> ClusterConfig:
    found = load(files)
    if found is None:
        chosen = "" if files.name == DEFAULT_CLUSTER else f" -c {files.name}"
        raise UserError(
            f"cluster {files.name!r} does not exist",
            hint=f"Create it with `slurmlet up{chosen}`, or list your clusters with `slurmlet ls`.",
        )
    return found


def from_json(raw: dict[str, Any]) -> ClusterConfig:
    partitions = raw.get("partitions")
    return ClusterConfig(
        name=raw["name"],
        id=raw["id"],
        created_at=raw["created_at"],
        kubernetes=raw["kubernetes"],
        host=raw.get("host", ""),
        addresses=tuple(raw.get("addresses", ())),
        api_address=raw["api_address"],
        api_port=int(raw["api_port"]),
        etcd_port=int(raw["etcd_port"]),
        etcd_peer_port=int(raw["etcd_peer_port"]),
        service_range=raw["service_range"],
        pod_range=raw.get("pod_range", ""),
        partitions=None if partitions is None else tuple(partitions),
        dns_port=int(raw.get("dns_port", 0)),
        ephemeral=bool(raw.get("ephemeral", False)),
        encrypt=bool(raw.get("encrypt", False)),
        launch=raw.get("launch", BATCH),
        slurm=dict(raw.get("slurm") or {}),
    )


def decide(
    files: ClusterFiles,
    *,
    kubernetes: str,
    host: str,
    addresses: Sequence[str],
    api_address: str,
    partitions: Sequence[str],
    ranges: Ranges,
    encrypt: bool = False,
    launch: str | None = None,
    slurm: Connection | None = None,
) -> ClusterConfig:
    """The configuration of the next start: identity and, where free, ports of the last one are kept."""
    before = load(files)
    # The API port is the one that kubeconfigs elsewhere remember.
    api_port = free_port("0.0.0.0", before.api_port if before else None)
    kept = before.partitions if before else None
    return ClusterConfig(
        name=files.name,
        id=before.id if before else secrets.token_hex(4),
        created_at=before.created_at if before else now(),
        kubernetes=kubernetes,
        host=host,
        addresses=tuple(addresses),
        api_address=api_address,
        api_port=api_port,
        etcd_port=free_port(LOOPBACK),
        etcd_peer_port=free_port(LOOPBACK),
        service_range=ranges.services,
        pod_range=ranges.pods,
        partitions=tuple(partitions) or kept,
        dns_port=free_port(LOOPBACK),
        encrypt=encrypt,
        launch=launch or (before.launch if before else BATCH),
        slurm=slurm.as_json() if slurm is not None else before.slurm if before else {},
    )


def encryption(before: ClusterConfig | None, wanted: bool | None) -> bool:
    """Chosen when a cluster is made: pods that run and those to come must speak the same. None: as it is."""
    if before is None:
        return bool(wanted)
    if wanted is not None and wanted != before.encrypt:
        has = "has" if before.encrypt else "was made without"
        raise UserError(
            f"--{'' if wanted else 'no-'}encrypt: cluster {before.name!r} {has} encryption between hosts",
            hint="Encryption is set when a cluster is created: run `slurmlet down --purge` first, "
            "or create another cluster with -c NAME.",
        )
    return before.encrypt


def now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
