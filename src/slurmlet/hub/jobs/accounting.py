"""How jobs ended, asked of accounting: many in one request, and not again and again while nobody answers."""

from __future__ import annotations

import asyncio

from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmError, SlurmletError
from slurmlet.model.ids import JobId
from slurmlet.model.slurm_values import EndedJob
from slurmlet.slurm.interface import Slurm

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0


class Accounting:
    """Those asked about while an answer is under way are asked about together, in the next request."""

    def __init__(self, slurm: Slurm, clock: Clock) -> None:
        self._slurm = slurm
        self._clock = clock
        self._asked: dict[JobId, asyncio.Future[EndedJob | None]] = {}
        self._turn = asyncio.Lock()
        self._pause_s = 0.0
        self._again_s = float("-inf")

    async def of(self, job_id: JobId) -> EndedJob | None:
        """None: nobody knows the job. Raises SlurmError while nobody can say."""
        if self._clock.monotonic_s() < self._again_s:
            raise SlurmError(
                "Slurm accounting did not answer a moment ago", reason="SlurmUnavailable", transient=True
            )
        answer = self._asked.get(job_id)
        if answer is None:
            answer = self._asked[job_id] = asyncio.get_running_loop().create_future()
        async with self._turn:
            if not answer.done():
                await self._ask()
        return await answer

    async def _ask(self) -> None:
        asked, self._asked = self._asked, {}
        try:
            ended = await self._slurm.ended(list(asked))
        except SlurmletError as error:
            self._pause_s = min(max(_FIRST_PAUSE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)
            self._again_s = self._clock.monotonic_s() + self._pause_s
            _fail(asked, error)
        except BaseException:
            # Whoever asked was cancelled in the middle; the others ask again.
            _fail(
                asked,
                SlurmError(
                    "the request to Slurm accounting was cancelled", reason="SlurmUnavailable", transient=True
                ),
            )
            raise
        else:
            self._pause_s = 0.0
            for job_id, answer in asked.items():
                if not answer.done():
                    answer.set_result(ended.get(job_id))


def _fail(asked: dict[JobId, asyncio.Future[EndedJob | None]], error: SlurmletError) -> None:
    for answer in asked.values():
        if not answer.done():
            answer.set_exception(error)
            # Somebody who was cancelled does not come for it; that is no unhandled error.
            answer.exception()
