"""One back-off for the whole cluster while Slurm takes no more jobs of this user (MaxSubmitJobs and its kind).

A thousand pods that each try again every few seconds would be a storm for slurmctld, and for nothing: the limit passes
when jobs end. So one refusal closes the gate for all. Pods wait in line; when jobs of ours have ended, as many may
try as did; when nothing is seen to end, one tries now and then, less and less often. Each success lets the next one try.
"""

from __future__ import annotations

from collections.abc import Callable

from slurmlet.base.clock import Clock
from slurmlet.base.errors import SlurmError
from slurmlet.model.ids import PodUid

_FIRST_S, _LONGEST_S = 8.0, 300.0
_TURN_S = 30.0


class SlurmLimited(SlurmError):
    """`retry_s`: after that a try is worth while."""

    def __init__(self, message: str, said: str, retry_s: float) -> None:
        super().__init__(message, said=said, reason="SlurmLimited", transient=True)
        self.retry_s = retry_s


class SubmissionGate:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._listeners: list[Callable[[PodUid], None]] = []
        self._line: dict[PodUid, None] = {}  # in the order they came
        self._may_try: dict[PodUid, float] = {}  # whose turn it is, and since when
        self._pause_s = 0.0
        self._until_s = 0.0
        self._said = ""

    def subscribe(self, admitted: Callable[[PodUid], None]) -> None:
        """`admitted` is called for a pod whose turn has come."""
        self._listeners.append(admitted)

    @property
    def waiting(self) -> int:
        return len(self._line)

    def enter(self, uid: PodUid) -> None:
        """Before a submission. Raises SlurmLimited while the pod has to wait."""
        if not self._said or uid in self._may_try:
            return
        now_s = self._clock.monotonic_s()
        self._line.setdefault(uid, None)
        # One whose turn it was may be held up by something else.
        self._may_try = {one: since_s for one, since_s in self._may_try.items() if now_s - since_s < _TURN_S}
        if now_s >= self._until_s and not self._may_try:
            self._admit(1)
        if uid not in self._may_try:
            raise self._wait()

    def accepted(self, uid: PodUid) -> None:
        self._leave(uid)
        if not self._said:
            return
        if self._line:
            self._admit(1)
        else:
            self._said, self._pause_s = "", 0.0

    def refused(self, uid: PodUid, said: str) -> SlurmLimited:
        """Slurm named a limit. The error for the pod, which is the first in line from now on."""
        self._may_try.clear()
        self._line = {uid: None, **self._line}
        self._said = said
        now_s = self._clock.monotonic_s()
        if now_s >= self._until_s:  # else one of several that were on their way together
            self._pause_s = min(max(_FIRST_S, 2 * self._pause_s), _LONGEST_S)
            self._until_s = now_s + self._pause_s
        return self._wait()

    def gave_up(self, uid: PodUid) -> None:
        """The pod is gone, or Slurm could not be asked."""
        was_next = uid in self._may_try
        self._leave(uid)
        if was_next:
            self._admit(1)

    def jobs_ended(self, count: int) -> None:
        """So many jobs of ours are no longer in the queue or running."""
        if self._said and count > 0:
            self._pause_s = self._until_s = 0.0
            self._admit(count)

    def _leave(self, uid: PodUid) -> None:
        self._line.pop(uid, None)
        self._may_try.pop(uid, None)

    def _admit(self, count: int) -> None:
        for uid in [uid for uid in self._line if uid not in self._may_try][:count]:
            self._may_try[uid] = self._clock.monotonic_s()
            for admitted in self._listeners:
                admitted(uid)

    def _wait(self) -> SlurmLimited:
        left_s = max(1.0, self._until_s - self._clock.monotonic_s())
        others = f"; {len(self._line)} pods are waiting" if len(self._line) > 1 else ""
        return SlurmLimited(
            f"Slurm accepts no more jobs of this user for now ({self._said}){others}", self._said, left_s
        )
