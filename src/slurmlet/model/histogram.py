"""How long things took, counted in buckets, as Prometheus reads it. A mean hides the one call in a hundred that is slow."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from slurmlet.model.stats_summary import Family

_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_Labels = tuple[tuple[str, str], ...]


class Histogram:
    """Observed from several threads. One series for each set of labels that was seen."""

    def __init__(self, bounds: Sequence[float] = _BOUNDS_S) -> None:
        self._bounds = tuple(bounds)
        self._series: dict[_Labels, tuple[list[int], float]] = {(): self._empty()}
        self._lock = threading.Lock()

    def observe(self, value: float, labels: Mapping[str, str] | None = None) -> None:
        key = tuple((labels or {}).items())
        with self._lock:
            counts, total = self._series.get(key) or self._empty()
            counts[bisect_left(self._bounds, value)] += 1
            self._series[key] = (counts, total + value)

    def family(self, name: str, text: str) -> Family:
        """The series without labels is left out where there are others: it would be counted twice."""
        family = Family(name, "histogram", text)
        with self._lock:
            series = {key: (list(counts), total) for key, (counts, total) in self._series.items()}
        for key, (counts, total) in series.items():
            if key or len(series) == 1 or any(counts):
                self._add(family, dict(key), counts, total)
        return family

    def _add(self, family: Family, labels: Mapping[str, str], counts: Sequence[int], total: float) -> None:
        running = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), counts, strict=True):
            running += count
            family.samples.append(("_bucket", {**labels, "le": bound}, running, None))
        family.samples.extend([("_sum", labels, total, None), ("_count", labels, running, None)])

    def _empty(self) -> tuple[list[int], float]:
        return [0] * (len(self._bounds) + 1), 0.0
