"""Numbers out of samples. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Summary:
    runs: int
    median_s: float
    p10_s: float
    p90_s: float

    def as_json(self) -> dict[str, Any]:
        return {key: round(value, 4) for key, value in asdict(self).items()}


def summary(samples_s: Sequence[float]) -> Summary:
    ordered = sorted(samples_s)
    return Summary(len(ordered), statistics.median(ordered), _at(ordered, 0.1), _at(ordered, 0.9))


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
