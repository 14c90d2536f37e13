"""The Service of the cluster's DNS and its one endpoint, the gateway: made by the hub, and made again when they go."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from slurmlet.hub.network.service_entries import SLICES, Key, Translator
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.model.network_plan import PodNetwork
from slurmlet.model.service_table import SERVICE_NAME

log = logging.getLogger(__name__)
Obj = dict[str, Any]
NAMESPACE, NAME = "kube-system", "kube-dns"
_KEY: Key = (NAMESPACE, NAME)
_SERVICES = f"/api/v1/namespaces/{NAMESPACE}/services"
_SLICES = SLICES.replace("endpointslices", f"namespaces/{NAMESPACE}/endpointslices")
_LABELS = {"k8s-app": NAME, "kubernetes.io/cluster-service": "true", "kubernetes.io/name": "CoreDNS"}
_PORTS = (("dns", "UDP"), ("dns-tcp", "TCP"))
_PORT = 53
# In a new cluster the namespace takes a moment to appear.
_RETRY_S = 0.5
_LOOK_S = 10.0


class DnsKeeper:
    def __init__(self, client: ApiClient, network: PodNetwork, translator: Translator) -> None:
        self._client, self._translator = client, translator
        self._service, self._slice = dns_service(network.dns_ip), dns_slice(network.gateway_ip)
        self._wake = asyncio.Event()

    def service_changed(self, obj: Obj, _gone: bool) -> None:
        if (obj["metadata"]["namespace"], obj["metadata"]["name"]) == _KEY:
            self._wake.set()

    async def run(self, synced: asyncio.Event) -> None:
        await synced.wait()
        await self._translator.synced.wait()
        complaint = ""
        while True:
            try:
                await self._keep()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
                self._wake.clear()
            except ApiError as error:
                if error.message != complaint:
                    log.warning("the Service of the cluster's DNS: %s", error.message)
                    complaint = error.message
                await asyncio.sleep(_RETRY_S)

    async def _keep(self) -> None:
        known = self._translator.services.get(_KEY)
        if known is None:
            await self._make(_SERVICES, self._service)
        elif not _covers(known["spec"], self._service["spec"]):
            await self._client.patch(f"{_SERVICES}/{NAME}", self._service)
        slices = self._translator.slices(_KEY)
        if not any(_covers(one, self._slice) for one in slices):
            await self._make(_SLICES, self._slice)

    async def _make(self, path: str, wanted: Obj) -> None:
        try:
            await self._client.create(path, wanted)
        except ApiError as error:
            if error.status != 409:
                raise
            await self._client.patch(f"{path}/{wanted['metadata']['name']}", wanted)


def dns_service(ip: str) -> Obj:
    ports = [
        {"name": name, "port": _PORT, "protocol": protocol, "targetPort": _PORT} for name, protocol in _PORTS
    ]
    return {
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": _LABELS},
        # No selector: what answers is not a pod.
        "spec": {"clusterIP": ip, "ports": ports},
    }


def dns_slice(gateway_ip: str) -> Obj:
    labels = {SERVICE_NAME: NAME, "endpointslice.kubernetes.io/managed-by": "slurmlet"}
    return {
        "metadata": {"name": f"{NAME}-gateway", "namespace": NAMESPACE, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [gateway_ip], "conditions": {"ready": True}}],
        "ports": [{"name": name, "port": _PORT, "protocol": protocol} for name, protocol in _PORTS],
    }


def _covers(known: Any, wanted: Any) -> bool:
    """Whether `known` has all that is wanted; the API server adds defaults."""
    if isinstance(wanted, dict):
        return isinstance(known, dict) and all(
            _covers(known.get(key), value) for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return isinstance(known, list) and len(known) == len(wanted) and all(map(_covers, known, wanted))
    return bool(known == wanted)
