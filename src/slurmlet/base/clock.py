"""Times as Kubernetes writes them."""

from __future__ import annotations

import time
from datetime import UTC, datetime


def rfc3339(moment: datetime | None = None) -> str:
    """Seconds resolution, Z."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_time(moment: datetime | None = None) -> str:
    """Microseconds, as leases carry them."""
    return (moment or datetime.now(UTC)).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def parse_rfc3339(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


class Clock:
    """The time, for what decides by it: tests give another and turn it by hand."""

    def monotonic_s(self) -> float:
        return time.monotonic()

    def time_s(self) -> float:
        return time.time()
