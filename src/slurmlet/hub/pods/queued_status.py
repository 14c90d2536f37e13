"""Status of pods that only wait for their job to start: written at a low rate, a few at once.

There may be thousands, and Slurm changes its reasons for all of them together. Their workers do not wait for these
writes, so that one whose job starts can go on at once; and a note is never written over anything newer.
"""

from __future__ import annotations

import asyncio
import logging

from slurmlet.hub.pods.pod_state import PodState
from slurmlet.hub.pods.status_writer import StatusWriter
from slurmlet.kube.client import ApiError
from slurmlet.model.ids import PodUid

log = logging.getLogger(__name__)
_WRITERS = 2
_RETRY_S = 2.0


class QueuedStatus:
    def __init__(self, status: StatusWriter) -> None:
        self._status = status
        self._due: dict[PodUid, PodState] = {}
        self._came = asyncio.Event()

    def add(self, state: PodState) -> None:
        """Write its status soon, as it is by then."""
        self._due[state.uid] = state
        self._came.set()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as writers:
            for _ in range(_WRITERS):
                writers.create_task(self._write_all(), name="queued status writer")

    async def _write_all(self) -> None:
        while True:
            while not self._due:
                self._came.clear()
                await self._came.wait()
            state = self._due.pop(next(iter(self._due)))
            try:
                if state.only_waits and not state.gone:
                    await self._status.write(state, only_if_latest=True)
            except ApiError as error:
                # Gone, or changed by somebody: the watch tells, and its worker writes what is then to be written.
                if error.status not in (404, 409):
                    log.warning("pod %s: %s", state.name, error.message)
                    await asyncio.sleep(_RETRY_S)
                    self.add(state)
