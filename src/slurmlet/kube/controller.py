"""A controller: keys come in, `reconcile(key)` brings the world to what the object says, failures are tried again.

Whatever one key's reconcile raises concerns this key alone: it is logged, counted, told to `on_failure` and tried again with
back-off. It never ends the process. Only cancellation passes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from slurmlet.base.errors import SlurmletError
from slurmlet.kube.client import ApiClient
from slurmlet.kube.reflector import Reflector
from slurmlet.kube.work_queue import Backoff, Key, WorkQueue

log = logging.getLogger(__name__)
Obj = dict[str, Any]
# In how many seconds to look again though nothing changed; None: when something does.
Again = float | None
Reconcile = Callable[[Key], Awaitable[Again]]


@dataclass
class Tally:
    """For /metrics: what a controller did since it began."""

    reconciled: int = 0
    failed: int = 0
    failing: set[object] = field(default_factory=set)  # keys whose last reconcile failed


def told(error: BaseException) -> str:
    """An error in words for logs and events; some exceptions have none of their own."""
    if isinstance(error, SlurmletError):
        return f"{error.message} {error.hint}".rstrip()
    return str(error) or type(error).__name__


class Controller(Generic[Key]):
    """`on_failure(key, error, failures, delay_s)` is where an event on the object is made; it must not block.

    `workers`: how many keys are worked on at once, each by one. `timeout_s`: a reconcile that takes longer has failed.
    """

    def __init__(
        self,
        name: str,
        reconcile: Reconcile[Key],
        *,
        workers: int = 1,
        timeout_s: float = 300.0,
        backoff: Backoff = Backoff(),  # noqa: B008 - frozen
        on_failure: Callable[[Key, Exception, int, float], None] | None = None,
    ) -> None:
        self.name, self.tally = name, Tally()
        self.queue: WorkQueue[Key] = WorkQueue(backoff)
        self._reconcile, self._on_failure = reconcile, on_failure
        self._workers, self._timeout_s = workers, timeout_s

    def add(self, key: Key) -> None:
        self.queue.add(key)

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(self._workers):
                    tasks.create_task(self._work(), name=f"{self.name} {number}")
        finally:
            self.queue.close()

    async def _work(self) -> None:
        while True:
            key = await self.queue.get()
            try:
                await self._attempt(key)
            finally:
                self.queue.done(key)

    async def _attempt(self, key: Key) -> None:
        self.tally.reconciled += 1
        try:
            async with asyncio.timeout(self._timeout_s):
                again_s = await self._reconcile(key)
        except Exception as error:  # the broad guard that this module exists for
            self._failed(key, error)
            return
        self.queue.forget(key)
        self.tally.failing.discard(key)
        if again_s is not None:
            self.queue.add_after(key, again_s)

    def _failed(self, key: Key, error: Exception) -> None:
        self.tally.failed += 1
        self.tally.failing.add(key)
        delay_s = self.queue.add_failed(key)
        # What we raise says what is wrong; of anything else we want to know where it came from.
        trace = None if isinstance(error, (SlurmletError, OSError)) else error
        log.warning("%s %s: %s; again in %.1f s", self.name, key, told(error), delay_s, exc_info=trace)
        if self._on_failure is not None:
            try:
                self._on_failure(key, error, self.queue.failures(key), delay_s)
            except Exception:
                log.exception("%s %s: the failure could not be reported", self.name, key)


def key_of(obj: Mapping[str, Any]) -> str:
    """namespace/name, or the name of what has no namespace."""
    metadata = obj["metadata"]
    return (
        f"{metadata['namespace']}/{metadata['name']}" if metadata.get("namespace") else str(metadata["name"])
    )


def _version(obj: Mapping[str, Any]) -> int:
    """Versions of one resource can be compared (Kubernetes 1.35 says so; etcd's always could)."""
    return int(obj["metadata"].get("resourceVersion") or 0)


class Informer:
    """A reflector's objects by key, for many controllers to read; each change puts a key into their queues.

    Objects are shared: who wants to change one makes a copy.
    """

    def __init__(self, client: ApiClient, path: str, *, metadata_only: bool = False, **query: str) -> None:
        self._objects: dict[str, Obj] = {}
        self._listeners: list[Callable[[Obj], None]] = []
        self.synced = asyncio.Event()
        self._reflector = Reflector(
            client, path, self._changed, on_synced=self.synced.set, metadata_only=metadata_only, **query
        )

    def get(self, key: str) -> Obj | None:
        return self._objects.get(key)

    def objects(self) -> list[Obj]:
        return list(self._objects.values())

    def keep(self, obj: Obj) -> None:
        """An answer to a write of ours is known before the watch tells of it; or after it has told of something newer."""
        known = self._objects.get(key_of(obj))
        if known is None or _version(obj) >= _version(known):
            self._objects[key_of(obj)] = obj

    def on_change(self, changed: Callable[[Obj], None]) -> None:
        """`changed` hears of every object that came, changed or went, and of those that are there now."""
        self._listeners.append(changed)
        for obj in self.objects():
            changed(obj)

    def feed(self, controller: Controller[Key], key: Callable[[Obj], Key | None]) -> None:
        """`key`: which key a changed object concerns (its own, its owner's), or None."""

        def changed(obj: Obj) -> None:
            found = key(obj)
            if found is not None:
                controller.add(found)

        self.on_change(changed)

    async def run(self) -> None:
        await self._reflector.run()

    def _changed(self, obj: Obj, gone: bool) -> None:
        key = key_of(obj)
        if not gone:
            self._objects[key] = obj
        # One that was made again under the name is another object: late news of the old one must not take it away.
        elif self._objects.get(key, obj)["metadata"]["uid"] == obj["metadata"]["uid"]:
            self._objects.pop(key, None)
        for listener in self._listeners:
            listener(obj)
