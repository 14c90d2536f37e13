"""From what a SlurmCluster says to the controller's address and key: through the objects of Slinky, or without Kubernetes.

Whatever is missing on the way is a BrokenLink that names itself: an administrator who reads "no worker joins" has six
objects in two clusters to look at, and must be told which.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from slurmlet.base.errors import SlurmletError
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.discovery import Discovery
from slurmlet.operators.provisioning.controller_spec import (
    NAME_LABEL,
    AddressFrom,
    ControllerSpec,
    SecretKey,
)
from slurmlet.operators.provisioning.workload_clients import WorkloadClients

Obj = dict[str, Any]
SLINKY_GROUP = "slinky.slurm.net"
# Slinky's own labels, of its first releases and of those since 0.4.
_COMPONENT, _NAMES = "app.kubernetes.io/component=controller", ("slurmctld", "slurm-ctld")
_INSTANCE = "app.kubernetes.io/instance"
_ACTIVE = "controller.slinky.slurm.net/active"
_PORT_NAME, _SLURMCTLD_PORT = "slurmctld", 6817
_KEY = "slurm.key"
_ADDRESS = re.compile(r"[A-Za-z0-9._:-]+")
LOOKUP_TIMEOUT_S = 20.0


class Link(StrEnum):
    """The chain, in its order; the words are those of error messages and of the metric's label."""

    SECRET = "metaData"  # noqa: S105 - no password
    DATA = "Metal3Data"
    TEMPLATE = "Metal3DataTemplate"
    SLURM_CLUSTER = "SlurmCluster"
    KUBECONFIG = "kubeconfig Secret"
    WORKLOAD = "workload cluster"
    STATEFUL_SET = "StatefulSet"
    POD = "controller pod"
    SERVICE = "Service"
    CONTROLLER = "Controller"
    KEY = "key Secret"


class BrokenLink(SlurmletError):
    """`link`: the first of the chain that did not hold."""

    def __init__(self, link: Link, message: str, *, hint: str = "", transient: bool = False) -> None:
        reason = "".join(word[0].upper() + word[1:] for word in link.value.split()) + "Broken"
        super().__init__(f"{link.value}: {message}", hint=hint, reason=reason, transient=transient)
        self.link = link


class Chain:
    """Where one climb stands, so that what fails or hangs is told with its place."""

    def __init__(self) -> None:
        self.link = Link.SECRET

    def at(self, link: Link) -> None:
        self.link = link

    def broken(self, error: Exception) -> BrokenLink:
        if isinstance(error, BrokenLink):
            return error
        if isinstance(error, SlurmletError):
            return BrokenLink(self.link, error.message, hint=error.hint, transient=error.transient)
        return BrokenLink(self.link, "no answer in time", transient=True)


@dataclass(frozen=True)
class ControllerFacts:
    address: str
    port: int
    key: bytes

    @property
    def conf_server(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"{host}:{self.port}"


class _Flight:
    """One lookup for all who asked before it began."""

    def __init__(self) -> None:
        self.chain = Chain()
        self.task: asyncio.Task[ControllerFacts]


class ControllerLookup:
    """Nothing is remembered between two lookups but connections: an answer is never older than its question.

    `trusted`: namespaces whose SlurmClusters may have a controller in another namespace of the management cluster.
    A burst of machines asks the same thing a hundred times. Those who ask while a lookup is under way get the next one,
    all together.
    """

    def __init__(self, client: ApiClient, workload: WorkloadClients, trusted: Collection[str] = ()) -> None:
        self._client, self._workload, self._trusted = client, workload, frozenset(trusted)
        self._next: dict[str, _Flight] = {}
        self._turns: dict[str, asyncio.Lock] = {}

    async def facts(
        self, spec: ControllerSpec, namespace: str, cluster: str, timeout_s: float = LOOKUP_TIMEOUT_S
    ) -> ControllerFacts:
        """`namespace`: of the SlurmCluster and the kubeconfig Secret; `cluster`: that of the machine. Raises BrokenLink."""
        key = repr((spec, namespace, cluster))
        flight = self._next.get(key)
        if flight is None:
            flight = self._next[key] = _Flight()
            work = self._flown(key, flight, spec, namespace, cluster)
            flight.task = asyncio.create_task(work, name="controller lookup")
            # Also where everybody stopped waiting.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(flight.task)
        except (SlurmletError, TimeoutError) as error:
            raise flight.chain.broken(error) from error

    async def _flown(
        self, key: str, flight: _Flight, spec: ControllerSpec, namespace: str, cluster: str
    ) -> ControllerFacts:
        turn = self._turns.setdefault(key, asyncio.Lock())
        async with turn:
            del self._next[key]  # who asks from here on gets the next one
            try:
                async with asyncio.timeout(LOOKUP_TIMEOUT_S):
                    return await self._facts(spec, namespace, cluster, flight.chain)
            finally:
                if key not in self._next:
                    del self._turns[key]

    async def _facts(
        self, spec: ControllerSpec, namespace: str, cluster: str, chain: Chain
    ) -> ControllerFacts:
        address, port, key = spec.dns_name, spec.port, b""
        if spec.needs_pods:
            client = await self._cluster_client(spec, namespace, cluster, chain)
            stateful_set = await _stateful_set(client, spec, chain)
            if spec.address_from is not AddressFrom.DNS_NAME:
                address, port = await _address(client, spec, stateful_set, chain)
            if spec.key is None:
                chain.at(Link.CONTROLLER)
                ref = await _key_ref(client, stateful_set)
                chain.at(Link.KEY)
                key = await _secret_value(client, spec.namespace, ref)
        if spec.key is not None:
            chain.at(Link.KEY)
            key = await _secret_value(self._client, namespace, spec.key)
        if not _ADDRESS.fullmatch(address):
            # A script on the worker holds it, in quotes.
            raise BrokenLink(chain.link, f"{address!r} is neither an address nor a name of a host")
        return ControllerFacts(address, port, key)

    async def address(
        self, spec: ControllerSpec, namespace: str, cluster: str, chain: Chain
    ) -> tuple[str, int]:
        """Without the key, for who publishes it."""
        client = await self._cluster_client(spec, namespace, cluster, chain)
        return await _address(client, spec, await _stateful_set(client, spec, chain), chain)

    async def _cluster_client(
        self, spec: ControllerSpec, namespace: str, cluster: str, chain: Chain
    ) -> ApiClient:
        chain.at(Link.SLURM_CLUSTER)
        if not spec.namespace:
            raise BrokenLink(
                Link.SLURM_CLUSTER,
                f"SlurmCluster {spec.slurm_cluster} does not say where its controller is",
                hint="Set spec.controller.namespace, or address.dnsName and keySecretRef.",
            )
        if spec.in_management_cluster:
            if namespace not in {spec.namespace, *self._trusted}:
                # The key that is found goes to the author of the SlurmCluster; the right to read it is only ours.
                raise BrokenLink(
                    Link.SLURM_CLUSTER,
                    f"one of namespace {namespace} may not have a controller of namespace {spec.namespace}",
                    hint="An administrator allows it with --trusted-namespace (chart: trustedNamespaces).",
                )
            chain.at(Link.WORKLOAD)
            return self._client
        chain.at(Link.KUBECONFIG)
        name = spec.cluster or cluster
        if not name:
            raise BrokenLink(
                Link.KUBECONFIG,
                "the machine's cluster is not known",
                hint="Label the objects with cluster.x-k8s.io/cluster-name, or set spec.controller.cluster.",
            )
        return await self._workload.client(namespace, name)


async def _stateful_set(client: ApiClient, spec: ControllerSpec, chain: Chain) -> Obj:
    chain.at(Link.WORKLOAD)
    selector = _selector(spec)
    path = f"/apis/apps/v1/namespaces/{spec.namespace}/statefulsets"
    found: list[Obj] = (await client.get(path, labelSelector=selector)).get("items") or []
    chain.at(Link.STATEFUL_SET)
    if len(found) == 1:
        return found[0]
    if not found:
        raise BrokenLink(Link.STATEFUL_SET, f"namespace {spec.namespace} has none with the labels {selector}")
    names = ", ".join(one["metadata"]["name"] for one in found)
    raise BrokenLink(
        Link.STATEFUL_SET,
        f"namespace {spec.namespace} has several with the labels {selector}: {names}",
        hint=f"Label the Metal3DataTemplate with {NAME_LABEL}, or set spec.controller.labels of the SlurmCluster.",
    )


def _selector(spec: ControllerSpec) -> str:
    if spec.labels:
        wanted = [f"{name}={value}" for name, value in sorted(spec.labels.items())]
    else:
        wanted = [_COMPONENT, f"app.kubernetes.io/name in ({','.join(_NAMES)})"]
    return ",".join([*wanted, *([f"{_INSTANCE}={spec.instance}"] if spec.instance else [])])


async def _address(
    client: ApiClient, spec: ControllerSpec, stateful_set: Obj, chain: Chain
) -> tuple[str, int]:
    if spec.address_from is AddressFrom.LOAD_BALANCER:
        chain.at(Link.SERVICE)
        return _balanced(await _service(client, spec, stateful_set))
    chain.at(Link.POD)
    host = await _host_ip(client, spec.namespace, stateful_set)
    if spec.address_from is AddressFrom.HOST_IP:
        return host, spec.port
    chain.at(Link.SERVICE)
    service = await _service(client, spec, stateful_set)
    return host, int(_slurmctld_port(service)["nodePort"])


async def _host_ip(client: ApiClient, namespace: str, stateful_set: Obj) -> str:
    labels: Mapping[str, str] = stateful_set["spec"]["selector"].get("matchLabels") or {}
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    listed = await client.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
    pods = [pod for pod in listed.get("items") or () if (pod.get("status") or {}).get("hostIP")]
    if not pods:
        name = stateful_set["metadata"]["name"]
        raise BrokenLink(Link.POD, f"StatefulSet {name} has no pod on a host yet", transient=True)
    return str(min(pods, key=_preference)["status"]["hostIP"])


def _preference(pod: Obj) -> tuple[bool, bool, bool, str]:
    """The active controller first, then those that run and are ready; by name, so that two calls agree."""
    metadata, status = pod["metadata"], pod["status"]
    active = (metadata.get("labels") or {}).get(_ACTIVE) == "true"
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    leaving = bool(metadata.get("deletionTimestamp")) or status.get("phase") != "Running"
    return not active, leaving, not ready, metadata["name"]


async def _service(client: ApiClient, spec: ControllerSpec, stateful_set: Obj) -> Obj:
    path = f"/api/v1/namespaces/{spec.namespace}/services"
    kind = "LoadBalancer" if spec.address_from is AddressFrom.LOAD_BALANCER else "NodePort"
    if spec.service:
        found = await client.get(f"{path}/{spec.service}")
        if not _fits(found, kind):
            raise BrokenLink(Link.SERVICE, f"{spec.service} is no {kind} Service of slurmctld's port")
        return found
    pod_labels = stateful_set["spec"]["selector"].get("matchLabels") or {}
    listed: Sequence[Obj] = (await client.get(path)).get("items") or ()
    fitting = [one for one in listed if _fits(one, kind) and _selects(one, pod_labels)]
    if not fitting:
        raise BrokenLink(
            Link.SERVICE,
            f"namespace {spec.namespace} has no {kind} Service for the controller's pods and slurmctld's port",
            hint="Make one, or choose another of spec.controller.address.",
        )
    return min(fitting, key=lambda one: str(one["metadata"]["name"]))


def _fits(service: Obj, kind: str) -> bool:
    port = _slurmctld_port(service)
    return service["spec"].get("type") == kind and bool(port.get("nodePort") if kind == "NodePort" else port)


def _selects(service: Obj, pod_labels: Mapping[str, str]) -> bool:
    """Whether its selector is about these pods: a selector may say more (the active one of them), not something else."""
    selector: Mapping[str, str] = service["spec"].get("selector") or {}
    shared = [name for name in pod_labels if name in selector]
    return bool(shared) and all(selector[name] == pod_labels[name] for name in shared)


def _slurmctld_port(service: Obj) -> Obj:
    ports: Sequence[Obj] = service["spec"].get("ports") or ()
    named = [one for one in ports if one.get("name") == _PORT_NAME]
    numbered = [one for one in ports if _SLURMCTLD_PORT in (one.get("port"), one.get("targetPort"))]
    return next(iter([*named, *numbered]), ports[0] if len(ports) == 1 else {})


def _balanced(service: Obj) -> tuple[str, int]:
    ingress = ((service.get("status") or {}).get("loadBalancer") or {}).get("ingress") or ()
    address = next((one.get("ip") or one.get("hostname") for one in ingress), None)
    if not address:
        raise BrokenLink(
            Link.SERVICE,
            f"{service['metadata']['name']} has no address of a load balancer yet",
            transient=True,
        )
    return str(address), int(_slurmctld_port(service)["port"])


async def _key_ref(client: ApiClient, stateful_set: Obj) -> SecretKey:
    owners: Sequence[Obj] = stateful_set["metadata"].get("ownerReferences") or ()
    owner = next((one for one in owners if one["kind"] == "Controller"), None)
    if owner is None:
        raise BrokenLink(
            Link.CONTROLLER,
            f"StatefulSet {stateful_set['metadata']['name']} is owned by no Controller of Slinky",
            hint="Name the key in spec.controller.keySecretRef of a SlurmCluster.",
        )
    controller = await _owner(client, owner, stateful_set["metadata"]["namespace"])
    ref = (controller.get("spec") or {}).get("slurmKeyRef") or {}
    if ref.get("name"):
        return SecretKey(ref["name"], ref.get("key") or _KEY)
    # As Slinky named it before there was a reference.
    return SecretKey(f"{owner['name']}-auth-slurm", _KEY)


async def _owner(client: ApiClient, owner: Obj, namespace: str) -> Obj:
    try:
        return await client.get(
            f"/apis/{owner['apiVersion']}/namespaces/{namespace}/controllers/{owner['name']}"
        )
    except ApiError as error:
        if error.status != 404:
            raise
        # Slinky may have been upgraded since: the version that it wrote then may be served no more.
        resource = await Discovery(client).resource("Controller", owner["apiVersion"].partition("/")[0])
        return await client.get(resource.path(owner["name"], namespace))


async def _secret_value(client: ApiClient, namespace: str, ref: SecretKey) -> bytes:
    try:
        secret = await client.get(f"/api/v1/namespaces/{namespace}/secrets/{ref.name}")
    except ApiError as error:
        raise BrokenLink(
            Link.KEY, f"{namespace}/{ref.name}: {error.message}", transient=error.transient
        ) from error
    try:
        value = base64.b64decode((secret.get("data") or {}).get(ref.key) or "", validate=True)
    except (binascii.Error, ValueError):
        value = b""
    if not value:
        raise BrokenLink(Link.KEY, f"{namespace}/{ref.name} has nothing under {ref.key!r}")
    return value
