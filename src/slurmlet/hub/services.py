"""The Services of all namespaces, for the variables that containers get about them. A few words each, nothing else kept."""

from __future__ import annotations

import asyncio
from typing import Any

from slurmlet.hub.settings import Settings
from slurmlet.kube.client import ApiClient
from slurmlet.kube.reflecting import Reflector
from slurmlet.model.serviceenv import Service, api_service, service_of, service_variables

_API_SERVICE = ("default", "kubernetes")


class Services:
    def __init__(self, settings: Settings, client: ApiClient) -> None:
        self._api = api_service(settings.api_address, settings.api_port)
        self._known: dict[tuple[str, str], Service] = {}
        self._synced = asyncio.Event()
        self._reflector = Reflector(client, "/api/v1/services", self._changed, on_synced=self._synced.set)

    async def run(self) -> None:
        await self._reflector.run()

    async def variables(self, namespace: str, links: bool) -> dict[str, str]:
        """Those a new container of the namespace gets; `links` is enableServiceLinks."""
        # As the kubelet: a pod that starts before the first list would miss Services that are there.
        await self._synced.wait()
        own = (service for (where, _), service in sorted(self._known.items()) if where == namespace)
        return service_variables((*(own if links else ()), self._api))

    def _changed(self, obj: dict[str, Any], gone: bool) -> None:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        service = None if gone or key == _API_SERVICE else service_of(obj)
        if service is None:
            self._known.pop(key, None)
        else:
            self._known[key] = service
