"""Services and EndpointSlices of all namespaces, turned into entries of the board. Rules in `model/service_table`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurmlet.hub.network.table_board import NODE_PORTS, SERVICES, Board
from slurmlet.kube.client import ApiClient
from slurmlet.kube.reflector import Reflector
from slurmlet.model.service_table import entries, service_key
from slurmlet.protocol.network_tables import Target

SLICES = "/apis/discovery.k8s.io/v1/endpointslices"
_NODES = "/api/v1/nodes"
_ZONE = "topology.kubernetes.io/zone"
Obj = dict[str, Any]
Key = tuple[str, str]


class Translator:
    def __init__(self, client: ApiClient, board: Board) -> None:
        self._board = board
        board.before_tell.append(self._translate)
        self.services: dict[Key, Obj] = {}
        self._slices: dict[Key, dict[str, Obj]] = {}
        # By name, which Service a slice was of: its label may change.
        self._slice_of: dict[Key, Key] = {}
        self._due: set[Key] = set()
        self._told: dict[Key, set[tuple[str, str]]] = {}
        # Two Services may claim one external address and port.
        self._owners: dict[tuple[str, str], Key] = {}
        self._listeners: list[Callable[[Iterable[Key]], None]] = []
        self.synced = asyncio.Event()
        self._reflector = Reflector(client, SLICES, self.slice_changed, on_synced=self.synced.set)
        # Zones only move traffic, so nobody waits for them.
        self._zones: dict[str, str] = {}
        self._node_reflector = Reflector(client, _NODES, self.node_changed)

    def subscribe(self, translated: Callable[[Iterable[Key]], None]) -> None:
        """`translated` is called with the Services whose backends may have changed."""
        self._listeners.append(translated)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._reflector.run(), name="endpoint slices")
            tasks.create_task(self._node_reflector.run(), name="zones of nodes")

    def node_changed(self, obj: Obj, gone: bool) -> None:
        name = obj["metadata"]["name"]
        zone = "" if gone else (obj["metadata"].get("labels") or {}).get(_ZONE, "")
        if zone == self._zones.get(name, ""):
            return
        if zone:
            self._zones[name] = zone
        else:
            del self._zones[name]
        for key in self.services:
            self._later(key)

    def slices(self, key: Key) -> list[Obj]:
        return list(self._slices.get(key, {}).values())

    def service_changed(self, obj: Obj, gone: bool) -> None:
        key = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        if gone:
            self.services.pop(key, None)
        else:
            self.services[key] = obj
        self._later(key)

    def slice_changed(self, obj: Obj, gone: bool) -> None:
        name = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        key = None if gone else service_key(obj)
        before = self._slice_of.pop(name, None)
        if before is not None and before != key:
            self._slices[before].pop(name[1], None)
            if not self._slices[before]:
                del self._slices[before]
            self._later(before)
        if key is not None:
            self._slice_of[name] = key
            self._slices.setdefault(key, {})[name[1]] = obj
            self._later(key)

    def _later(self, key: Key) -> None:
        # Computed when it is told: a Service of many slices changes in bursts.
        self._due.add(key)
        self._board.announce()

    def _translate(self) -> None:
        due, self._due = self._due, set()
        for key in due:
            service = self.services.get(key)
            found = entries(service, self.slices(key), self._zones) if service is not None else None
            wanted = {(SERVICES, name): target for name, target in (found.services if found else {}).items()}
            wanted |= {
                (NODE_PORTS, name): target for name, target in (found.node_ports if found else {}).items()
            }
            self._put(key, wanted)
        for translated in self._listeners:
            translated(due)

    def _put(self, key: Key, wanted: Mapping[tuple[str, str], Target]) -> None:
        for where in self._told.pop(key, set()) - set(wanted):
            if self._owners.get(where) == key:
                del self._owners[where]
                self._board.put(*where, None)
        for where, target in wanted.items():
            self._owners[where] = key
            self._board.put(*where, target)
        if wanted:
            self._told[key] = set(wanted)
