"""Many Services in a cluster while its network is measured: nothing of a connect may depend on how many there are.

Their endpoints are addresses of the pod range that no pod has: entries in every table, and nobody there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from slurmlet.base.errors import UserError
from slurmlet.base.files import read_json
from slurmlet.base.layout import ClusterFiles
from slurmlet.kube.client import ApiClient
from slurmlet.kube.credentials import by_certificate

ENDPOINTS_EACH = 10
_SERVICES = "/api/v1/namespaces/{}/services"
_SLICES = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"
_NAMESPACES = "/api/v1/namespaces"
_REQUESTS_AT_ONCE = 16
# Until the tables are everywhere.
_SETTLE_S = 5.0


def objects(number: int, pod_range: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """One Service and its slice."""
    name = f"crowd-{number}"
    # From the end of the range: pods get addresses from its beginning.
    last = int(ipaddress.ip_network(pod_range).broadcast_address) - 1
    ips = [
        str(ipaddress.ip_address(last - (number * ENDPOINTS_EACH + each) % 40000))
        for each in range(ENDPOINTS_EACH)
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {"ports": [{"port": 80, "targetPort": 8080}]},
    }
    piece = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": name}},
        "addressType": "IPv4",
        "ports": [{"port": 8080, "protocol": "TCP"}],
        "endpoints": [{"addresses": [ip], "conditions": {"ready": True}} for ip in ips],
    }
    return service, piece


@contextmanager
def crowded(cluster: str, namespace: str, services: int) -> Iterator[None]:
    """So many Services, in a namespace of their own that goes with them."""
    if not services:
        yield
        return
    files = ClusterFiles.named(cluster)
    config = read_json(files.config)
    if not config:
        raise UserError(f"cluster {cluster!r} does not exist", hint=f"Run: slurmlet up -c {cluster}")
    asyncio.run(_with_client(files, config, lambda client: _make(client, config, namespace, services)))
    time.sleep(_SETTLE_S)
    try:
        yield
    finally:
        asyncio.run(
            _with_client(files, config, lambda client: client.delete(f"{_NAMESPACES}/{namespace}", {}))
        )


async def _with_client(
    files: ClusterFiles, config: dict[str, Any], act: Callable[[ApiClient], Awaitable[object]]
) -> None:
    url = f"https://{config['api_address']}:{config['api_port']}"
    pki = files.pki
    credentials = by_certificate(url, pki / "ca.crt", pki / "admin.crt", pki / "admin.key")
    async with ApiClient(credentials) as client:
        await act(client)


async def _make(client: ApiClient, config: dict[str, Any], namespace: str, services: int) -> None:
    await client.create(_NAMESPACES, {"metadata": {"name": namespace}})
    slots = asyncio.Semaphore(_REQUESTS_AT_ONCE)

    async def one(number: int) -> None:
        service, piece = objects(number, config["pod_range"])
        async with slots:
            await client.create(_SERVICES.format(namespace), service)
            await client.create(_SLICES.format(namespace), piece)

    async with asyncio.TaskGroup() as tasks:
        for number in range(services):
            tasks.create_task(one(number))
