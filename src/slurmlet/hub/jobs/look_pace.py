"""How often Slurm is asked about jobs: the budget of docs/slurm.md as one pure rule.

At rest one look in `calm_s`. Somebody who waits for news of a job says what for (`expect`): the first looks follow each
other quickly, then ever less often, for what did not come in a minute may come tomorrow. Jobs in the queue alone are no
reason to hurry: a runner dials in by itself when its job starts. A Slurm that is slow, away or limits the rate of
requests is asked less.
"""

from __future__ import annotations

from slurmlet.base.clock import Clock

# Two looks are never closer than this, however many ask.
SHORTEST_S = 0.15
# … nor closer than this many times what the last one took: with thousands of jobs a look is dear, here and there.
_REST_PER_LOOK = 3.0
# What has been expected for this many times an interval is looked for again after the next interval.
_PATIENCE = 4.0
_FIRST_FAILURE_S, _LONGEST_FAILURE_S = 1.0, 60.0
_FIRST_LIMIT_S, _LONGEST_LIMIT_S = 5.0, 120.0


class LookPace:
    def __init__(self, clock: Clock, busy_s: float, queued_s: float, calm_s: float) -> None:
        self._clock = clock
        self._busy_s = busy_s
        self._queued_s = queued_s
        self._calm_s = calm_s
        self._expected: dict[str, tuple[str, float]] = {}  # who → what for, since when
        self._look_s = 0.0
        self._failure_s = 0.0
        self._limit_s = 0.0

    def expect(self, who: str, what: str) -> bool:
        """`who` waits for a change of this kind; saying it again changes nothing. True where it is new."""
        if self._expected.get(who, ("", 0.0))[0] == what:
            return False
        self._expected[who] = what, self._clock.monotonic_s()
        return True

    def settle(self, who: str) -> None:
        self._expected.pop(who, None)

    @property
    def quiet(self) -> bool:
        """Nobody has begun to wait for anything lately."""
        return self._eagerness_s() >= self._queued_s

    def answered(self, look_s: float) -> None:
        self._look_s = look_s
        self._failure_s = 0.0
        # What a site limits it goes on limiting: back to the old pace in small steps.
        self._limit_s = self._limit_s * 0.8 if self._limit_s > 1.0 else 0.0

    def failed(self, limited: bool) -> None:
        """Slurm did not answer; `limited`: it said that it is asked too often."""
        self._failure_s = min(max(_FIRST_FAILURE_S, 2 * self._failure_s), _LONGEST_FAILURE_S)
        if limited:
            self._limit_s = min(max(_FIRST_LIMIT_S, 2 * self._limit_s), _LONGEST_LIMIT_S)

    def shortest_s(self) -> float:
        """Before that there is no look, whoever asks."""
        return max(SHORTEST_S, _REST_PER_LOOK * self._look_s, self._failure_s, self._limit_s)

    def interval_s(self, queued: bool) -> float:
        """Until the next look; `queued`: jobs of ours wait in the queue."""
        ceiling_s = self._queued_s if queued else self._calm_s
        return max(min(self._eagerness_s(), ceiling_s), self.shortest_s())

    def _eagerness_s(self) -> float:
        latest_s = max((since_s for _, since_s in self._expected.values()), default=float("-inf"))
        waited_s = self._clock.monotonic_s() - latest_s
        return max(self._busy_s, waited_s / _PATIENCE)
