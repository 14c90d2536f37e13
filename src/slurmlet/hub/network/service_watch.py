"""The Services of all namespaces: one watch for the variables that containers get about them and for whoever follows it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from slurmlet.hub.hub_settings import Settings
from slurmlet.kube.client import ApiClient
from slurmlet.kube.reflector import Reflector
from slurmlet.model.network_plan import API_PORT
from slurmlet.model.service_environment import Service, api_service, service_of, service_variables

_API_SERVICE = ("default", "kubernetes")


class Services:
    def __init__(self, settings: Settings, client: ApiClient) -> None:
        # The network of a host leads to no cluster IP.
        self._real_api = api_service(settings.api_address, settings.api_port)
        network = settings.network
        self._api = api_service(network.api_ip, API_PORT) if network is not None else self._real_api
        self._known: dict[tuple[str, str], Service] = {}
        # Called with (object, gone).
        self.followers: list[Callable[[dict[str, Any], bool], None]] = []
        self.synced = asyncio.Event()
        self._reflector = Reflector(client, "/api/v1/services", self._changed, on_synced=self.synced.set)

    async def run(self) -> None:
        await self._reflector.run()

    async def variables(self, namespace: str, links: bool, host_network: bool) -> dict[str, str]:
        """Those a new container of the namespace gets; `links` is enableServiceLinks."""
        # As the kubelet: a pod that starts before the first list would miss Services that are there.
        await self.synced.wait()
        own = (service for (where, _), service in sorted(self._known.items()) if where == namespace)
        return service_variables((*(own if links else ()), self._real_api if host_network else self._api))

    def _changed(self, obj: dict[str, Any], gone: bool) -> None:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        service = None if gone or key == _API_SERVICE else service_of(obj)
        if service is None:
            self._known.pop(key, None)
        else:
            self._known[key] = service
        for follower in self.followers:
            follower(obj, gone)
