"""Back-off for a controller whose pods fail before they start.

A Deployment replaces a Failed pod at once. When every job fails the same way (no runtime on the nodes, a broken prolog),
that would flood Slurm with a job a second; so pods of an owner whose last ones never ran wait, twice as long each time.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

_FIRST_S = 5.0
_LONGEST_S = 300.0
_FORGET_S = 600.0
_REMEMBERED = 1000


class Pacer:
    def __init__(self) -> None:
        self._owners: OrderedDict[str, tuple[float, float]] = (
            OrderedDict()
        )  # owner → (not before, last delay)

    def never_started(self, pod: Mapping[str, Any]) -> None:
        """A pod of this owner ended without ever having run."""
        owner = _owner(pod)
        if not owner:
            return
        now_s = time.monotonic()
        until_s, delay_s = self._owners.pop(owner, (0.0, 0.0))
        if now_s < until_s:  # its sisters failed with it: one failure, not three
            self._owners[owner] = (until_s, delay_s)
            return
        longer_s = _FIRST_S if now_s - until_s > _FORGET_S or not delay_s else min(2 * delay_s, _LONGEST_S)
        self._owners[owner] = (now_s + longer_s, longer_s)
        if len(self._owners) > _REMEMBERED:
            self._owners.popitem(last=False)

    def started(self, pod: Mapping[str, Any]) -> None:
        self._owners.pop(_owner(pod), None)

    def wait_s(self, pod: Mapping[str, Any]) -> float:
        until_s, _ = self._owners.get(_owner(pod), (0.0, 0.0))
        return max(0.0, until_s - time.monotonic())


def _owner(pod: Mapping[str, Any]) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((str(one["uid"]) for one in owners if one.get("controller")), "")
