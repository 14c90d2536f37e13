"""All that the hub pushed, kept by the runner as it came: a new netd is told all of it again, also while the hub is away."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, Optional, Set, Tuple


if TYPE_CHECKING:
    from typing import Literal, Optional, Tuple

    from slurmlet.protocol.network_tables import Network, NetworkUpdate
    from slurmlet.protocol.pod_plan import Policy

_TABLES: Tuple[Literal["pods", "services", "node_ports"], ...] = ("pods", "services", "node_ports")
_MAX_ENTRIES = 1000


class TableLog:
    def __init__(self) -> None:
        self._tables: Dict[str, Dict[str, Any]] = {name: {} for name in _TABLES}
        self._policy: Optional[Policy] = None
        # Entries that a reset has yet to tell again, as in tables.py.
        self._old: Dict[str, Set[str]] = {name: set() for name in _TABLES}

    def apply(self, message: NetworkUpdate) -> None:
        if message.get("reset"):
            self._old = {name: set(table) for name, table in self._tables.items()}
            if "complete" not in message:
                self._forget_old()
        for name in _TABLES:
            table, told = self._tables[name], message.get(name) or {}
            for key, value in told.items():
                self._old[name].discard(key)
                if value is None:
                    table.pop(key, None)
                else:
                    table[key] = value
        if message.get("complete"):
            self._forget_old()
        if "policy" in message:
            self._policy = message["policy"]

    def _forget_old(self) -> None:
        for name, keys in self._old.items():
            for key in keys:
                del self._tables[name][key]
            keys.clear()

    def messages(self) -> Iterator[Network]:
        """What a netd that knows nothing is to be told."""
        reset: Network = {"type": "network", "reset": True}
        if self._policy is not None:
            reset["policy"] = self._policy
        yield reset
        for name in _TABLES:
            table = self._tables[name]
            keys = list(table)
            for first in range(0, len(keys), _MAX_ENTRIES):
                message: Network = {"type": "network"}
                message[name] = {key: table[key] for key in keys[first : first + _MAX_ENTRIES]}
                yield message
