"""What a SlurmCluster says about its controller, as types: where it is, and how workers are told. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

SLURMCTLD_PORT = 6817
# On a Metal3DataTemplate (or a Metal3Data): which SlurmCluster of its namespace the machine is for.
CLUSTER_LABEL = "slurmlet.io/slurm-cluster"
# The thesis's: the namespace of the controller in the workload cluster. With the next one where there are several.
NAMESPACE_LABEL = "slurm-controller-namespace"
NAME_LABEL = "slurm-controller-name"


class AddressFrom(StrEnum):
    HOST_IP = "hostIP"
    NODE_PORT = "nodePort"
    LOAD_BALANCER = "loadBalancer"
    DNS_NAME = "dnsName"


@dataclass(frozen=True)
class SecretKey:
    name: str
    key: str


@dataclass(frozen=True)
class MetaDataNames:
    """Under which names a worker's cloud-init finds what was injected: `ds.meta_data.NAME`."""

    address: str = "slurm_controller_address"
    conf_server: str = "slurm_conf_server"
    key: str = "slurm_key_base64"
    cluster: str = "slurm_cluster"


@dataclass(frozen=True)
class DnsSpec:
    server: str
    port: int
    zone: str
    name: str
    ttl_s: int
    tsig_secret: str
    address_from: AddressFrom = AddressFrom.HOST_IP


@dataclass(frozen=True)
class ControllerSpec:
    """`slurm_cluster`: the object's name, "" where only the thesis's label is given."""

    slurm_cluster: str = ""
    cluster: str = ""  # of Cluster API; "": the machine's
    in_management_cluster: bool = False
    namespace: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    instance: str = ""  # name of Slinky's Controller, where one namespace has several
    address_from: AddressFrom = AddressFrom.HOST_IP
    port: int = SLURMCTLD_PORT
    service: str = ""
    dns_name: str = ""
    key: SecretKey | None = None
    names: MetaDataNames = MetaDataNames()
    dns: DnsSpec | None = None

    @property
    def needs_pods(self) -> bool:
        """Whether the controller must be looked for in Kubernetes at all."""
        return self.key is None or self.address_from is not AddressFrom.DNS_NAME


def controller_spec(slurm_cluster: Mapping[str, Any]) -> ControllerSpec:
    """Of a SlurmCluster that the API server has checked."""
    given: Mapping[str, Any] = (slurm_cluster.get("spec") or {}).get("controller") or {}
    address: Mapping[str, Any] = given.get("address") or {}
    kind = next((one for one in AddressFrom if address.get(one.value) is not None), AddressFrom.HOST_IP)
    how: Mapping[str, Any] = address.get(kind.value) or {}
    key, names = given.get("keySecretRef"), given.get("metaDataNames") or {}
    defaults = MetaDataNames()
    return ControllerSpec(
        slurm_cluster=slurm_cluster["metadata"]["name"],
        cluster=given.get("cluster") or "",
        in_management_cluster=bool(given.get("inManagementCluster")),
        namespace=given.get("namespace") or "",
        labels=given.get("labels") or {},
        address_from=kind,
        port=int(how.get("port") or SLURMCTLD_PORT),
        service=how.get("service") or "",
        dns_name=how.get("name") or "",
        key=SecretKey(key["name"], key["key"]) if key else None,
        names=MetaDataNames(
            address=names.get("address") or defaults.address,
            conf_server=names.get("confServer") or defaults.conf_server,
            key=names.get("key") or defaults.key,
            cluster=names.get("cluster") or defaults.cluster,
        ),
        dns=_dns(given.get("dns")),
    )


def _dns(given: Mapping[str, Any] | None) -> DnsSpec | None:
    if not given:
        return None
    return DnsSpec(
        server=given["server"],
        port=int(given.get("port") or 53),
        zone=given["zone"],
        name=given["name"],
        ttl_s=int(given.get("ttlSeconds") or 60),
        tsig_secret=given["tsigSecretRef"]["name"],
        address_from=AddressFrom(given.get("addressFrom") or AddressFrom.HOST_IP),
    )
