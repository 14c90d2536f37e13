"""One reflector: list, then watch with bookmarks; resume after a break, relist on 410. Tells what is, not what happened."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Any

from slurmlet.kube.client import METADATA, METADATA_LIST, ApiClient, ApiError
from slurmlet.kube.string_pool import Sharer

log = logging.getLogger(__name__)
PAGE_SIZE = 500
_BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)

Obj = dict[str, Any]


class _Expired(ApiError):
    """An ERROR event: the watch cannot go on from where it is."""


class Reflector:
    """Keeps a copy of a collection and calls back with each object's newest version, or its last when it is gone.

    `on_change(object, gone)` must not block. A relist reports objects that vanished while nobody looked.
    `metadata_only`: the server sends objects without contents, and of these only the identity is kept.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        on_change: Callable[[Obj, bool], None],
        *,
        on_synced: Callable[[], None] | None = None,
        metadata_only: bool = False,
        **query: str,
    ) -> None:
        self._client = client
        self._path = path
        self._query = query
        self._on_change = on_change
        self._on_synced = on_synced
        self._metadata_only = metadata_only
        self._known: dict[str, Obj] = {}
        self._failures = 0
        self._sharer = Sharer()

    async def run(self) -> None:
        while True:
            try:
                await self._watch(await self._list())
            except ApiError as error:
                await self._pause(error)

    async def _pause(self, error: ApiError) -> None:
        """Longer with each failure in a row; news from a watch ends the row."""
        delay_s = _BACKOFF_S[min(self._failures, len(_BACKOFF_S) - 1)]
        self._failures += 1
        if error.status != 410:
            log.warning("watch of %s: %s; again in %.1f s", self._path, error.message, delay_s)
        await asyncio.sleep(delay_s * random.uniform(0.8, 1.2))  # noqa: S311

    async def _list(self) -> str:
        seen: dict[str, Obj] = {}
        query = {**self._query, "limit": str(PAGE_SIZE)}
        while True:
            accept = METADATA_LIST if self._metadata_only else ""
            page = await self._client.get(self._path, accept=accept, **query)
            seen.update({item["metadata"]["uid"]: self._kept(item) for item in page.get("items") or ()})
            if not page["metadata"].get("continue"):
                break
            query["continue"] = page["metadata"]["continue"]
        for uid in set(self._known) - set(seen):
            self._on_change(self._known.pop(uid), True)
        for uid, item in seen.items():
            if (
                self._known.get(uid, {}).get("metadata", {}).get("resourceVersion")
                != item["metadata"]["resourceVersion"]
            ):
                self._known[uid] = item
                self._on_change(item, False)
        if self._on_synced is not None:
            self._on_synced()
        return str(page["metadata"]["resourceVersion"])

    async def _watch(self, version: str) -> None:
        """Follow from `version` on, through breaks of the connection, until the server no longer has what follows."""
        while True:
            try:
                accept = METADATA if self._metadata_only else ""
                events = self._client.watch(self._path, accept=accept, resourceVersion=version, **self._query)
                async for event in events:
                    item = event["object"]
                    if event["type"] == "ERROR":
                        # Whatever it is, it is about our place in the history: begin anew.
                        raise _Expired(item.get("code", 410), item.get("message", "watch expired"))
                    version = item["metadata"]["resourceVersion"]
                    self._failures = 0
                    if event["type"] != "BOOKMARK":
                        self._take(item, event["type"] == "DELETED")
                # A server that ends watches at once must not be asked in a tight loop.
                await asyncio.sleep(_BACKOFF_S[0])
            except ApiError as error:
                if isinstance(error, _Expired) or not error.transient:
                    raise
                await self._pause(error)

    def _kept(self, item: Obj) -> Obj:
        """Annotations and managed fields of a big object can be as big as the object."""
        if not self._metadata_only:
            whole: Obj = self._sharer.shared(item)
            return whole
        metadata = item["metadata"]
        names = ("uid", "namespace", "name", "resourceVersion")
        return {"metadata": {name: metadata[name] for name in names if name in metadata}}

    def _take(self, item: Obj, gone: bool) -> None:
        item = self._kept(item)
        uid = item["metadata"]["uid"]
        if gone:
            self._known.pop(uid, None)
        else:
            self._known[uid] = item
        self._on_change(item, gone)
