"""What the gateway knows from the start: its address, the cluster's ranges and keys, read once from its directory."""

from __future__ import annotations

import ipaddress
import json
from dataclasses import dataclass
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.podnet import addresses
from slurmlet.podnet.netd_setup import Setup, Tls
from slurmlet.protocol.cluster_files import HubFile


@dataclass(frozen=True)
class HubAccess:
    """What the runner's Link wants to know (runner/link/hub_link.py)."""

    files: ClusterFiles

    @property
    def hub_ca(self) -> str:
        return str(self.files.pki / "hub-ca.crt")

    @property
    def chain(self) -> tuple[str, str | None]:
        return str(self.files.pki / "gateway.crt"), str(self.files.pki / "gateway.key")

    def hub(self) -> HubFile:
        found: HubFile = json.loads(self.files.hub.read_text())
        return found


@dataclass(frozen=True)
class Settings:
    files: ClusterFiles
    setup: Setup
    # Every address of this host, for externalIPs that are one of them.
    host_addresses: tuple[str, ...]

    @property
    def host_ip(self) -> str:
        return addresses.text(self.setup.host_ip)

    def dns_port(self) -> int:
        """Where CoreDNS listens now: the supervisor may have moved it."""
        config = read_json(self.files.config)
        return int(config["dns_port"]) if isinstance(config, dict) else 0


def load(directory: Path) -> Settings:
    files = ClusterFiles(directory)
    config = read_json(files.config)
    if not config or not config.get("pod_range"):
        raise SlurmletError(f"{directory} contains no cluster with a pod network", hint="Run: slurmlet up")
    first = next(ipaddress.IPv4Network(config["pod_range"]).hosts())
    setup = Setup(
        ip=int(first),
        pod_range=addresses.network(config["pod_range"]),
        service_range=addresses.network(config["service_range"]),
        key=bytes.fromhex((files.pki / "overlay.key").read_text().strip()),
        # No node: backends that only their own node may use are not for us.
        node="",
        host_ip=addresses.number(config["api_address"]),
        host_ports=[],
        tls=_tls(files) if config.get("encrypt") else None,
    )
    known = (config["api_address"], *config.get("addresses", ()))
    return Settings(files, setup, tuple(dict.fromkeys(known)))


def _tls(files: ClusterFiles) -> Tls:
    return Tls(*((files.pki / name).read_text() for name in ("overlay-ca.crt", "netd.crt", "netd.key")))
