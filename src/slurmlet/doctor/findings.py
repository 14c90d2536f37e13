"""One line of the doctor's answer. Each says what was looked at, what was found, what slurmlet will use, what is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "degraded", "missing"]

LOGIN, NODE = "login", "node"
ASK = "Ask the site's administrators"


@dataclass(frozen=True)
class Line:
    where: str
    what: str
    status: Status
    found: str
    uses: str
    without: str
    remedy: str = ""
    fatal: bool = False
