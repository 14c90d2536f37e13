"""Python's `collections`: what is written in C."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections import deque
else:
    from _collections import deque

__all__ = ["deque"]
