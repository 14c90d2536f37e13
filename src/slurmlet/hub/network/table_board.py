"""The tables of docs/network.md as they are now, encoded once for all who follow them.

Changes become frames in a log; whoever knows a place in the log needs what follows it, whoever is new needs a snapshot
and what follows that. Nothing is kept per follower, so slow ones cost nothing: who falls off the log's end starts anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from slurmlet.protocol import wire
from slurmlet.protocol.network_tables import Network

PODS, SERVICES, NODE_PORTS = "pods", "services", "node_ports"
_TABLES = (PODS, SERVICES, NODE_PORTS)
_MAX_ENTRIES = 1000
_MAX_LOG_BYTES = 8 << 20
# A snapshot is made anew when the log since the last one is longer than it, but not for less than this.
_SMALL_BYTES = 64 << 10


class Board:
    def __init__(self) -> None:
        self._tables: dict[str, dict[str, Any]] = {name: {} for name in _TABLES}
        self._changed: dict[str, set[str]] = {name: set() for name in _TABLES}
        self._log: deque[bytes] = deque()
        self._log_bytes = 0
        # Place in the log of its first frame that is kept.
        self._first = 0
        self._snapshot: list[bytes] | None = None
        self._snapshot_at = 0
        self._since_bytes = 0
        self._listeners: list[Callable[[], None]] = []
        # Called before something is told: for whoever computes entries late.
        self.before_tell: list[Callable[[], None]] = []

    def subscribe(self, changed: Callable[[], None]) -> None:
        """`changed` is called when something is to be told."""
        self._listeners.append(changed)

    def announce(self) -> None:
        for changed in self._listeners:
            changed()

    def put(self, table: str, key: str, value: Any) -> None:
        """None: gone."""
        known = self._tables[table]
        if known.get(key) == value:
            return
        if value is None:
            del known[key]
        else:
            known[key] = value
        self._changed[table].add(key)
        self.announce()

    def get(self, table: str, key: str) -> Any:
        return self._tables[table].get(key)

    def size(self, table: str) -> int:
        return len(self._tables[table])

    @property
    def end(self) -> int:
        return self._first + len(self._log)

    def tell(self) -> None:
        """Put all changes into the log."""
        for prepare in self.before_tell:
            prepare()
        changes = {
            name: {key: self._tables[name].get(key) for key in keys} for name, keys in self._changed.items()
        }
        for keys in self._changed.values():
            keys.clear()
        for frame in _frames(changes):
            self._log.append(frame)
            self._log_bytes += len(frame)
            self._since_bytes += len(frame)
        while self._log_bytes > _MAX_LOG_BYTES and len(self._log) > 1:
            self._log_bytes -= len(self._log.popleft())
            self._first += 1

    def snapshot(self) -> tuple[list[bytes], int]:
        """(frames that tell everything, the place in the log that follows them). They may be old: with the log up to its end
        they are what is known now, and only then may COMPLETE follow."""
        size = sum(map(len, self._snapshot or ()))
        stale = self._snapshot_at < self._first or self._since_bytes > max(size, _SMALL_BYTES)
        if self._snapshot is None or stale:
            self._snapshot = list(_frames(self._tables, whole=True))
            # What is not in the log yet is in here already; to be told twice does no harm.
            self._snapshot_at, self._since_bytes = self.end, 0
        return self._snapshot, self._snapshot_at

    def frame(self, place: int) -> bytes | None:
        """The frame at a place, None at the log's end. LookupError: it is no longer kept."""
        if place < self._first:
            raise LookupError(place)
        return self._log[place - self._first] if place < self.end else None


# All has been told: what an earlier hub had told, and this one has not, is gone.
COMPLETE = wire.control({"type": "network", "reset": False, "complete": True})


def _frames(tables: Mapping[str, Mapping[str, Any]], *, whole: bool = False) -> list[bytes]:
    """Of at most _MAX_ENTRIES each. `whole`: the first says so, and all of them that COMPLETE is to follow."""
    entries = [(name, key, value) for name, table in tables.items() for key, value in table.items()]
    pieces = [entries[start : start + _MAX_ENTRIES] for start in range(0, len(entries), _MAX_ENTRIES)]
    if whole and not pieces:
        pieces = [[]]
    frames = []
    for number, piece in enumerate(pieces):
        message: Network = {"type": "network", "reset": whole and number == 0}
        if whole:
            message["complete"] = False
        for name, key, value in piece:
            # By name: a piece may have entries of each table.
            message.setdefault(name, {})[key] = value  # type: ignore[misc]
        frames.append(wire.control(message))
    return frames
