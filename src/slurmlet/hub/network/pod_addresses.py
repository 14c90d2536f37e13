"""Addresses of pods: each given to one pod at a time, and not given again soon.

Who has which is in the pods' own status, and the runners say it when they dial in; a new hub learns it from there. What
neither could tell yet (an address given a moment before the hub died) lies behind a mark on disk that new hubs begin at.
"""

from __future__ import annotations

import ipaddress
import logging
from pathlib import Path

from slurmlet.base.errors import SlurmletError
from slurmlet.base.files import read_json, write_json
from slurmlet.model.ids import PodUid

log = logging.getLogger(__name__)
# The range's own address and the gateway's come first.
_FIRST = 2
# The mark moves by this many, so that it is written once for many pods.
_STRIDE = 256


class NoAddressLeft(SlurmletError):
    reason = "NoPodAddressLeft"
    transient = True


class Addresses:
    def __init__(self, pod_range: str, mark: Path) -> None:
        self._network = ipaddress.IPv4Network(pod_range)
        self._end = self._network.num_addresses - 1
        self._stride = max(1, min(_STRIDE, self._end // 8))
        self._mark = mark
        self._by_ip: dict[str, PodUid] = {}
        self._by_uid: dict[PodUid, str] = {}
        self._next = self._limit = self._marked()

    def _marked(self) -> int:
        kept = read_json(self._mark)
        next_ = (
            kept.get("next") if isinstance(kept, dict) and kept.get("range") == str(self._network) else None
        )
        return next_ if isinstance(next_, int) and _FIRST <= next_ < self._end else _FIRST

    def of(self, uid: PodUid) -> str:
        """Its address, or ""."""
        return self._by_uid.get(uid, "")

    def reserve(self, uid: PodUid, ip: str) -> bool:
        """A pod has this address already. False where another has it too: then it must not be told to anybody."""
        if ipaddress.IPv4Address(ip) not in self._network:
            return False
        holder = self._by_ip.setdefault(ip, uid)
        if holder != uid:
            log.error("pods %s and %s both say they have address %s", holder, uid, ip)
            return False
        before = self._by_uid.get(uid)
        if before is not None and before != ip:
            del self._by_ip[before]
        self._by_uid[uid] = ip
        return True

    def give(self, uid: PodUid) -> str:
        """The pod's address, a new one if it has none."""
        if uid in self._by_uid:
            return self._by_uid[uid]
        for _ in range(self._end - _FIRST):
            ip = str(self._network[self._step()])
            if ip not in self._by_ip:
                self._by_ip[ip], self._by_uid[uid] = uid, ip
                return ip
        raise NoAddressLeft(
            f"all {self._end - _FIRST} addresses of the pod range {self._network} are in use",
            hint="Create a new cluster with a larger range: slurmlet up -c NAME --pod-range CIDR",
        )

    def release(self, uid: PodUid) -> str:
        """No runner has it any more. Its address, or ""."""
        ip = self._by_uid.pop(uid, "")
        self._by_ip.pop(ip, None)
        return ip

    def _step(self) -> int:
        if self._next >= self._end:
            self._next = self._limit = _FIRST
        if self._next == self._limit:
            self.mark_ahead()
        self._next += 1
        return self._next - 1

    @property
    def nearly_used(self) -> bool:
        """Whether it is time to mark more as given, before one that is not marked is needed."""
        return self._limit - self._next <= self._stride // 2

    def mark_ahead(self) -> None:
        """Write down that the next addresses may be given. Blocks on the shared file system. Raises OSError."""
        limit = min(self._limit + self._stride, self._end)
        following = limit if limit < self._end else _FIRST
        write_json(self._mark, {"range": str(self._network), "next": following})
        self._limit = limit
