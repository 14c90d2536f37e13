"""Clients of workload clusters, by the kubeconfig Secrets that Cluster API keeps. Made anew when a Secret has changed."""

from __future__ import annotations

import base64
import binascii
import logging
import ssl

from slurmlet.base.errors import UserError
from slurmlet.kube.client import ApiClient
from slurmlet.kube.credentials import from_kubeconfig_data

log = logging.getLogger(__name__)


class WorkloadClients:
    """A client that was replaced may still be in use, and stays open until the next one of its cluster is replaced."""

    def __init__(self, management: ApiClient) -> None:
        self._management = management
        self._clients: dict[tuple[str, str], tuple[str, ApiClient]] = {}
        self._replaced: dict[tuple[str, str], ApiClient] = {}

    async def client(self, namespace: str, cluster: str) -> ApiClient:
        """Raises ApiError where the Secret cannot be had, UserError where it holds no kubeconfig that can be used."""
        name = f"{cluster}-kubeconfig"
        secret = await self._management.read(f"/api/v1/namespaces/{namespace}/secrets/{name}")
        version = f"{secret['metadata']['uid']} {secret['metadata']['resourceVersion']}"
        known = self._clients.get((namespace, cluster))
        if known is not None and known[0] == version:
            return known[1]
        made = await _client(_value(secret, name), name).__aenter__()
        # Another call may have made one meanwhile: the last one stays, for both are of a Secret as it was read.
        if (replaced := self._clients.get((namespace, cluster))) is not None:
            await self._retire((namespace, cluster), replaced[1])
        self._clients[namespace, cluster] = (version, made)
        log.info("cluster %s/%s: client made from Secret %s", namespace, cluster, name)
        return made

    async def close(self) -> None:
        for _, client in self._clients.values():
            await client.__aexit__()
        for client in self._replaced.values():
            await client.__aexit__()
        self._clients, self._replaced = {}, {}

    async def _retire(self, key: tuple[str, str], client: ApiClient) -> None:
        older = self._replaced.pop(key, None)
        self._replaced[key] = client
        if older is not None:
            await older.__aexit__()


def _client(kubeconfig: bytes, name: str) -> ApiClient:
    credentials = from_kubeconfig_data(kubeconfig, f"Secret {name}")
    try:
        return ApiClient(credentials)
    except (ssl.SSLError, ValueError) as error:
        raise UserError(f"Secret {name}: its certificates cannot be used: {error}") from error


def _value(secret: dict[str, object], name: str) -> bytes:
    data = secret.get("data")
    value = data.get("value") if isinstance(data, dict) else None
    if not value:
        raise UserError(f"Secret {name} has no data under `value`, where Cluster API keeps the kubeconfig")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise UserError(f"Secret {name}: data.value is not base64") from error
