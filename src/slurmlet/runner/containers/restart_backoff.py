"""How long the kubelet waits before it starts a container again: at once, then 10 s doubling to 5 minutes."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional


FIRST_S, MAX_S = 10.0, 300.0
FORGET_AFTER_S = 2 * MAX_S


class Backoff:
    """Times are of the monotonic clock. The same rules as client-go's flowcontrol.Backoff in the kubelet."""

    def __init__(self) -> None:
        self._delay_s: Optional[float] = None
        self._updated_s = 0.0

    def wait_s(self, finished_s: float, now_s: float) -> float:
        """How long from now until a container that ended at finished_s may start again."""
        if self._delay_s is None or finished_s - self._updated_s > FORGET_AFTER_S:
            return 0.0
        return max(0.0, finished_s + self._delay_s - now_s)

    @property
    def delay_s(self) -> float:
        return self._delay_s or 0.0

    def restarted(self, now_s: float) -> None:
        if self._delay_s is None or now_s - self._updated_s > FORGET_AFTER_S:
            self._delay_s = FIRST_S
        else:
            self._delay_s = min(MAX_S, self._delay_s * 2)
        self._updated_s = now_s


def spoken(delay_s: float) -> str:
    """As Go prints a duration: 10s, 1m20s, 5m0s."""
    minutes, seconds = divmod(int(delay_s), 60)
    return f"{minutes}m{seconds}s" if minutes else f"{seconds}s"
