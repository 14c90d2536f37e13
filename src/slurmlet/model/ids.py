"""Names that must not be mixed up."""

from __future__ import annotations

from typing import NewType

PodUid = NewType("PodUid", str)
JobId = NewType("JobId", str)
NodeName = NewType("NodeName", str)
