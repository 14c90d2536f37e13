"""Config maps, secrets, tokens and the pod's own labels, kept up to date in the volumes of running pods.

Two watches of the whole cluster that bring identities without contents tell which version of each config map and secret
is the newest. Every `TICK_S` each running pod's record (what it was given, and when its tokens grow old) is held
against that: nothing depends on an event being seen, so a lost connection or a new hub costs one more delivery, never
a missed one. Contents are read when they are delivered and not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurmlet.base.errors import RefusedPod
from slurmlet.hub.pods.delivered_volumes import (
    Record,
    Versions,
    digest,
    due,
    has_new_token,
    note,
    unknown_record,
)
from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.source_fetch import Memo, gather_files
from slurmlet.hub.runner_links import LinkLost
from slurmlet.kube.client import ApiClient, ApiError
from slurmlet.kube.events import EventRecorder
from slurmlet.model.downward_api import Place
from slurmlet.model.pod_sources import MissingSource, Sources
from slurmlet.model.volume_plan import FILE_KINDS, files_plan
from slurmlet.protocol.pod_plan import FilesVolume

log = logging.getLogger(__name__)
Obj = Mapping[str, Any]
TICK_S = 2.0
_AT_ONCE = 8
_RETRY_S = 10.0


class VolumeRefresh:
    def __init__(
        self, client: ApiClient, events: EventRecorder, states: Callable[[], Iterable[PodState]]
    ) -> None:
        self._client = client
        self._events = events
        self._states = states
        self._versions = {kind: Versions(client, kind) for kind in ("configmaps", "secrets")}
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for kind, versions in self._versions.items():
                tasks.create_task(versions.reflector.run(), name=f"versions of {kind}")
            tasks.create_task(self._tick(), name="refresh")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            waiting = [state for state in self._states() if self._is_due(state, now_s)]
            memo: Memo = {}
            await asyncio.gather(*(self._refresh(state, memo) for state in waiting))

    def _is_due(self, state: PodState, now_s: float) -> bool:
        link = state.live_link
        if link is None or not link.has_pod or state.deleting or state.runner_done:
            return False
        if state.delivered is None or state.delivered.link is not link:
            state.delivered = unknown_record(state.pod, link, now_s)
        return due(state.delivered, state.pod, self._versions, now_s)

    async def _refresh(self, state: PodState, memo: Memo) -> None:
        record: Record | None = state.delivered
        if record is None:
            return
        async with self._slots:
            try:
                await self._deliver(state, record, memo)
            except LinkLost:
                pass  # the next link starts with a record of its own
            except (ApiError, RefusedPod) as error:
                log.warning("pod %s: its volumes were not refreshed: %s", state.name, error.message)
                record.look_s = time.monotonic() + _RETRY_S

    async def _deliver(self, state: PodState, record: Record, memo: Memo) -> None:
        now_s = time.monotonic()
        old = [token for token, due_s in record.token_due_s.items() if due_s <= now_s]
        sources = await gather_files(self._client, state.pod, old, memo)
        volumes = self._volumes(state, sources)
        changed = {
            name: volume
            for name, volume in volumes.items()
            if record.digests.get(name) != digest(volume) or has_new_token(volume, sources)
        }
        if changed:
            await record.link.tell({"type": "volumes", "volumes": changed})
            log.info("pod %s: refreshed %s", state.name, ", ".join(sorted(changed)))
        record.unsure = False
        note(record, state.pod, volumes, sources, now_s)

    def _volumes(self, state: PodState, sources: Sources) -> dict[str, FilesVolume]:
        """All volumes of files; one that lacks something keeps what it has, with the kubelet's complaint."""
        found: dict[str, FilesVolume] = {}
        for volume in state.pod["spec"].get("volumes", ()):
            if not any(kind in volume for kind in FILE_KINDS):
                continue
            try:
                found[volume["name"]] = files_plan(state.pod, volume, sources, state.place or Place())
            except MissingSource as missing:
                self._events.pod_event(state.pod, "Warning", "FailedMount", missing.event)
        return found
