"""What the suite said, out of ginkgo's JSON reports; which specs to run together. Pure.

A spec is known by its full text, such as "[sig-node] Pods should … [Conformance]".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

SERIAL = "[Serial]"
PASSED, FAILED, SKIPPED, UNKNOWN = "passed", "failed", "skipped", "unknown"


@dataclass(frozen=True)
class Outcome:
    """How one spec ended. `message` is the first line of what went wrong, `where` the line of the suite."""

    name: str
    state: str
    seconds: float = 0.0
    message: str = ""
    where: str = ""


def outcomes(report: Any) -> list[Outcome]:
    """Every spec of a report that was meant to run; ginkgo's skips by focus are left out."""
    specs = [spec for suite in report or () for spec in suite.get("SpecReports") or ()]
    return [_outcome(spec) for spec in specs if spec["LeafNodeType"] == "It" and not _out_of_focus(spec)]


def suite_problem(report: Any) -> str:
    """Why the suite as a whole could not run (its BeforeSuite failed …); empty when it could."""
    for suite in report or ():
        for spec in suite.get("SpecReports") or ():
            if spec["LeafNodeType"] != "It" and spec["State"] not in ("passed", "pending", "skipped"):
                return _outcome(spec).message
    return ""


def names(report: Any) -> list[str]:
    """The specs of a dry run, in the suite's order."""
    return [outcome.name for outcome in outcomes(report)]


def slices(specs: Sequence[str], size: int) -> list[list[str]]:
    """Groups that run side by side; a serial spec is a group of its own, and comes last."""
    apart = [[name] for name in specs if SERIAL in name]
    together = [name for name in specs if SERIAL not in name]
    return [together[at : at + size] for at in range(0, len(together), size)] + apart


def focus(specs: Iterable[str]) -> str:
    """The regular expression that picks exactly these specs."""
    return "|".join(re.escape(name) for name in specs)


def merged(found: Iterable[Outcome], meant: Iterable[str]) -> list[Outcome]:
    """One outcome per spec that was meant to run; a spec nobody reported is unknown."""
    by_name = {outcome.name: outcome for outcome in found}
    return [by_name.get(name, Outcome(name, UNKNOWN, message="no report: cut off")) for name in meant]


def summary(found: Sequence[Outcome]) -> dict[str, int]:
    return {state: sum(o.state == state for o in found) for state in (PASSED, FAILED, SKIPPED, UNKNOWN)}


def _outcome(spec: Any) -> Outcome:
    name = " ".join([*(spec.get("ContainerHierarchyTexts") or ()), spec["LeafNodeText"]])
    state = spec["State"]
    if state in ("panicked", "timedout", "aborted", "interrupted"):
        state = FAILED
    failure = spec.get("Failure") or {}
    place = failure.get("Location") or {}
    where = f"{place['FileName'].rsplit('/', 1)[-1]}:{place['LineNumber']}" if place.get("FileName") else ""
    message = " ".join(str(failure.get("Message", "")).split())[:400]
    return Outcome(name, state, round(spec.get("RunTime", 0) / 1e9, 1), message, where)


def _out_of_focus(spec: Any) -> bool:
    # A spec that skips itself says why; one that the focus left out says nothing.
    return spec["State"] == SKIPPED and not (spec.get("Failure") or {}).get("Message")
