"""Events people read in `kubectl describe`. Repeats are counted on one object; a burst never blocks the hub."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

from slurmlet.base.clock import rfc3339
from slurmlet.kube.client import ApiClient, ApiError

log = logging.getLogger(__name__)
_QUEUE_LIMIT = 2000
_WRITERS = 3
_REMEMBERED = 5000
_SAME_WITHIN_S = 600.0
# Normal events can wait, and the moment they belong to, mostly a pod's start, is a busy one.
_NORMAL, _LATER_S = "Normal", 0.25

Obj = dict[str, Any]


class _Told(NamedTuple):
    """An event that waits to be written: as little as can be, for a burst of pods makes thousands."""

    involved: Obj
    namespace: str
    kind: str
    reason: str
    message: str
    at: str
    put_s: float

    @property
    def key(self) -> int:
        """Equal for what counts as the same event again."""
        field = self.involved.get("fieldPath", "")
        return hash((self.involved["uid"], self.kind, self.reason, self.message, field))


class EventRecorder:
    def __init__(self, client: ApiClient, host: str) -> None:
        self._client = client
        self._host = host
        # Several writers keep up with a burst of pods; all about one object goes through one, so order stays.
        self._queues: list[asyncio.Queue[_Told]] = [asyncio.Queue(_QUEUE_LIMIT) for _ in range(_WRITERS)]
        # key → (name, count, when): an LRU, so that memory stays bounded
        self._seen: OrderedDict[int, tuple[str, int, float]] = OrderedDict()

    def pod_event(
        self, pod: Mapping[str, Any], kind: str, reason: str, message: str, container: str = ""
    ) -> None:
        metadata = pod["metadata"]
        involved = {
            "kind": "Pod",
            "apiVersion": "v1",
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        }
        if container:
            involved["fieldPath"] = f"spec.{_list_of(pod, container)}{{{container}}}"
        self._put(involved, metadata["namespace"], kind, reason, message)

    def core_event(
        self, object_kind: str, obj: Mapping[str, Any], kind: str, reason: str, message: str
    ) -> None:
        """About any object of the core API."""
        self.object_event("v1", object_kind, obj, kind, reason, message)

    def object_event(
        self, api_version: str, object_kind: str, obj: Mapping[str, Any], kind: str, reason: str, message: str
    ) -> None:
        """About any object; one without a namespace is told of in "default"."""
        metadata = obj["metadata"]
        involved = {name: metadata[name] for name in ("namespace", "name", "uid") if name in metadata}
        involved.update(kind=object_kind, apiVersion=api_version)
        self._put(involved, metadata.get("namespace", "default"), kind, reason, message)

    def node_event(self, name: str, kind: str, reason: str, message: str) -> None:
        involved = {"kind": "Node", "apiVersion": "v1", "name": name, "uid": name}
        self._put(involved, "default", kind, reason, message)

    def _put(self, involved: Obj, namespace: str, kind: str, reason: str, message: str) -> None:
        told = _Told(involved, namespace, kind, reason, message, rfc3339(), time.monotonic())
        try:
            self._queues[hash(involved["uid"]) % _WRITERS].put_nowait(told)
        except asyncio.QueueFull:
            log.warning("event dropped, too many at once: %s %s", reason, message)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as writers:
            for queue in self._queues:
                writers.create_task(self._write_all(queue), name="event writer")

    async def _write_all(self, queue: asyncio.Queue[_Told]) -> None:
        while True:
            told = await queue.get()
            if told.kind == _NORMAL:
                await asyncio.sleep(told.put_s + _LATER_S - time.monotonic())
            try:
                await self._write(told)
            except ApiError as error:
                log.warning("event %s not written: %s", told.reason, error.message)

    async def _write(self, told: _Told) -> None:
        path = f"/api/v1/namespaces/{told.namespace}/events"
        name, count, when = self._seen.pop(told.key, ("", 0, 0.0))
        now_s = time.monotonic()
        if name and now_s - when < _SAME_WITHIN_S:
            self._seen[told.key] = (name, count + 1, now_s)
            try:
                change = {"count": count + 1, "lastTimestamp": told.at}
                await self._client.patch(f"{path}/{name}", change)
                return
            except ApiError as error:
                if error.status != 404:
                    raise
        created = await self._client.create(path, self._event(told))
        self._seen[told.key] = (created["metadata"]["name"], 1, now_s)
        if len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)

    def _event(self, told: _Told) -> Obj:
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{told.involved['name'][:200].rstrip('-.')}.{uuid.uuid4().hex[:16]}",
                "namespace": told.namespace,
            },
            "involvedObject": told.involved,
            "type": told.kind,
            "reason": told.reason,
            "message": told.message[:1024],
            "source": {"component": "slurmlet", "host": self._host},
            "firstTimestamp": told.at,
            "lastTimestamp": told.at,
            "count": 1,
        }


def _list_of(pod: Mapping[str, Any], container: str) -> str:
    """The field of the spec that holds a container, as the kubelet names it."""
    init = (pod.get("spec") or {}).get("initContainers") or ()
    return "initContainers" if any(one["name"] == container for one in init) else "containers"
