"""When a pool may ask for the next member: at once while all goes well, later and later when Slurm refuses or members die.

A member that ends without having served for a while has failed, unless it was let go; one that served for long enough says
that the next will too. Nothing here survives a restart, and nothing needs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurmlet.base.clock import Clock
from slurmlet.kube.work_queue import Backoff
from slurmlet.model.pool import Member

_REFUSED = Backoff(first_s=5.0, most_s=600.0)
_DIED = Backoff(first_s=5.0, most_s=600.0)
# One that served for so long did not fail at its start.
_HEALTHY_S = 60.0


@dataclass
class _Seen:
    member: Member
    ready_s: float | None = None  # since when it serves
    leaves: bool = False


class Growth:
    def __init__(self, clock: Clock) -> None:
        self._now_s = clock.monotonic_s
        self._seen: dict[str, _Seen] = {}
        self._begin()

    def _begin(self) -> None:
        self._refusals = 0
        self._deaths = 0
        self._not_before_s = float("-inf")

    def begin_anew(self) -> None:
        """Something else is asked for."""
        self._begin()

    def wait_s(self) -> float:
        return max(0.0, self._not_before_s - self._now_s())

    def refused(self) -> float:
        """Returns when to ask again, in seconds."""
        self._refusals += 1
        return self._hold(_REFUSED.delay_s(self._refusals))

    def accepted(self, member: Member) -> None:
        """Slurm took its job, which may be over before anybody looks."""
        self._refusals = 0
        self._seen[member.name] = _Seen(member)

    def leaves(self, name: str) -> None:
        """It was told to go: its end is no failure."""
        if name in self._seen:
            self._seen[name].leaves = True

    def look(self, members: Sequence[Member]) -> list[Member]:
        """Takes in what there is now; returns those that ended and should not have."""
        now_s, there = self._now_s(), {one.name for one in members}
        for one in members:
            seen = self._seen.setdefault(one.name, _Seen(one))
            if one.ready and seen.ready_s is None:
                seen.ready_s = now_s
            seen.leaves = seen.leaves or bool(one.retiring)
            if one.ready and now_s - (seen.ready_s or now_s) >= _HEALTHY_S:
                self._deaths = 0
        gone = [self._seen.pop(name) for name in list(self._seen) if name not in there]
        died = [seen.member for seen in gone if not seen.leaves and not self._was_healthy(seen)]
        if died:
            # Several that were asked for together fail together: that counts once.
            self._deaths += 1
            self._hold(_DIED.delay_s(self._deaths))
        return died

    def _was_healthy(self, seen: _Seen) -> bool:
        return seen.ready_s is not None and self._now_s() - seen.ready_s >= _HEALTHY_S

    def _hold(self, delay_s: float) -> float:
        self._not_before_s = max(self._not_before_s, self._now_s() + delay_s)
        return delay_s
