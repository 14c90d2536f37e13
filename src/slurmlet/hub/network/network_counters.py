"""What netds and the gateway counted (what fell to the slow path, and why), summed up for `/metrics`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping

from slurmlet.model.ids import PodUid
from slurmlet.model.stats_summary import Family

_NO_NAME = re.compile(r"[^a-z0-9_]")


class NetworkCounts:
    def __init__(self) -> None:
        self._living: dict[PodUid, Counter[str]] = {}
        self._past: Counter[str] = Counter()

    def take(self, uid: PodUid, counts: Mapping[str, int]) -> None:
        """All that one netd counted since it began."""
        before = self._living.get(uid, Counter())
        # One that was started anew counts from the beginning.
        self._past.update({name: old for name, old in before.items() if counts.get(name, 0) < old})
        self._living[uid] = Counter(counts)

    def ended(self, uid: PodUid) -> None:
        self._past.update(self._living.pop(uid, Counter()))

    def families(self) -> Iterator[Family]:
        total = Counter(self._past)
        for counts in self._living.values():
            total.update(counts)
        for name, value in sorted(total.items()):
            name = _NO_NAME.sub("_", name.lower())
            text = f"Networks of pods: {name.replace('_', ' ')}"
            family = Family(f"slurmlet_network_{name}_total", "counter", text)
            family.add(value)
            yield family
