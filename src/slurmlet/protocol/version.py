"""Which versions of the protocol a hub understands: its own, and one minor version older.

So `pip install -U` and `slurmlet up` keep the pods that run: their runners are of the old version until they end. Fields
that a version added are `total=False` in the types, with a default at their reader, until no understood version lacks them.
"""

from __future__ import annotations

from typing import Any, Mapping, Tuple

from slurmlet.protocol.wire import MAJOR, MINOR

OLDER_MINORS = 1


def version_of(hello: Mapping[str, Any]) -> Tuple[int, int]:
    """(major, minor) of who says this hello; (0, 0) when it names none. 1.0 said its major version alone."""
    major, minor = hello.get("protocol"), hello.get("minor", 0)
    if isinstance(major, int) and isinstance(minor, int):
        return major, minor
    return 0, 0


def refusal(version: Tuple[int, int], own: Tuple[int, int] = (MAJOR, MINOR)) -> str:
    """Why a hub does not take a peer of this version; "" when it does."""
    major, minor = version
    oldest = max(0, own[1] - OLDER_MINORS)
    if major == own[0] and oldest <= minor <= own[1]:
        return ""
    understood = f"{own[0]}.{own[1]}" if oldest == own[1] else f"{own[0]}.{oldest} to {own[0]}.{own[1]}"
    return f"it speaks protocol {major}.{minor}; this hub understands {understood}"
