"""Services of type LoadBalancer: the login host is the load balancer, by the gateway's hands. Rules in `model/balancers`.

Which ports it serves is kept in the Services' status, where a new hub finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Iterable
from typing import Any

from slurmlet.hub.network.service_entries import Key, Translator
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.model import balancers
from slurmlet.model.balancers import Port
from slurmlet.model.service_table import balancer_targets
from slurmlet.protocol.network_tables import NetworkUpdate, Target

log = logging.getLogger(__name__)
Obj = dict[str, Any]
_RETRY_S = 2.0


class Balancer:
    def __init__(
        self,
        client: ApiClient,
        events: EventRecorder,
        translator: Translator,
        address: str,
        changed: Callable[[], None],
    ) -> None:
        """`changed` is called when the gateway is to be told anew."""
        self._client, self._events, self._translator, self._address = client, events, translator, address
        self._due: set[Key] = set()
        self._wake = asyncio.Event()
        self._held: dict[Port, Key] = {}
        self._changed = changed
        translator.subscribe(self._translated)

    def service_changed(self, obj: Obj, _gone: bool) -> None:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        if balancers.is_balanced(obj) or balancers.shows(obj, self._address) or key in self._held.values():
            self._due.add(key)
            self._wake.set()

    def fields(self) -> NetworkUpdate:
        """For the gateway: the whole table, every time."""
        found: dict[str, Target] = {}
        for (protocol, port), key in self._held.items():
            service = self._translator.services.get(key)
            if service is not None:
                targets = balancer_targets(service, self._translator.slices(key))
                sources = [one.strip() for one in service["spec"].get("loadBalancerSourceRanges") or ()]
                found[f"{protocol} {port}"] = {**targets[protocol, port], "sources": sources}
        return {"load_balancers": found}

    def _translated(self, keys: Iterable[Key]) -> None:
        if not set(keys).isdisjoint(self._held.values()):
            self._changed()

    async def run(self, synced: asyncio.Event) -> None:
        # Who has a port is known only when all have been seen.
        await synced.wait()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._due:
                await self._try(self._due.pop())

    async def _try(self, key: Key) -> None:
        try:
            await self._look_at(key)
        except ApiError as error:
            if error.status != 404:
                log.warning("load balancer %s/%s: %s", *key, error.message)
                self._due.add(key)
                await asyncio.sleep(_RETRY_S)

    async def _look_at(self, key: Key) -> None:
        service = self._translator.services.get(key)
        if service is None or not balancers.is_balanced(service):
            self._hold(key, set())
            if service is not None and balancers.shows(service, self._address):
                await self._write(key, {"ingress": None})
            return
        kept = balancers.served(service, self._address)
        ports = balancers.decide(service, kept, self._taken(key), self._is_free)
        self._hold(key, {(one.protocol, one.port) for one in ports if not one.problem})
        wanted = balancers.status(ports, self._address)
        if ((service.get("status") or {}).get("loadBalancer") or {}) != wanted:
            await self._write(key, wanted)
            for one in ports:
                kind, text = balancers.told(one, self._address)
                self._events.core_event("Service", service, kind, "LoadBalancer", text)

    def _taken(self, key: Key) -> set[Port]:
        others = {port for port, holder in self._held.items() if holder != key}
        for other, service in self._translator.services.items():
            if other != key and balancers.is_balanced(service):
                others |= balancers.served(service, self._address)
        return others

    def _hold(self, key: Key, ports: set[Port]) -> None:
        before = {port for port, holder in self._held.items() if holder == key}
        for port in before - ports:
            del self._held[port]
        self._held.update(dict.fromkeys(ports, key))
        if before != ports:
            self._changed()

    def _is_free(self, port: Port) -> bool:
        kind = socket.SOCK_STREAM if port[0] == "tcp" else socket.SOCK_DGRAM
        with socket.socket(socket.AF_INET, kind) as probe, contextlib.suppress(OSError):
            if kind == socket.SOCK_STREAM:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            # As the gateway will: on all addresses of the host.
            probe.bind(("0.0.0.0", port[1]))
            return True
        return False

    async def _write(self, key: Key, wanted: Obj) -> None:
        path = f"/api/v1/namespaces/{key[0]}/services/{key[1]}/status"
        await self._client.patch(path, {"status": {"loadBalancer": wanted}})
