"""Judges tests that failed in their lane and passed when they were run once more: `python -m tests.e2e.repetitions BEFORE
AFTER KNOWN`, where BEFORE and AFTER are pytest's lists of failures (`lastfailed`) and KNOWN is `known-flaky`.

They are always told. With CI=true each of them is a failure (exit code 1), unless KNOWN lists it with a reason and a date:
a test that needs a second try hides a defect of the test or of the product.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Known:
    reason: str
    since: datetime.date


def read_known(text: str) -> dict[str, Known]:
    """By test id. Raises ValueError for a line without a reason or a date."""
    found = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = [part.strip() for part in line.split(" | ")]
        if len(parts) != 3 or not all(parts):
            raise ValueError(f"line {number}: expected `test id | reason | date`, found {line!r}")
        found[parts[0]] = Known(parts[1], datetime.date.fromisoformat(parts[2]))
    return found


def failures(path: Path) -> set[str]:
    """Test ids that failed; none where pytest wrote no list, because nothing failed."""
    try:
        return set(json.loads(path.read_text()))
    except FileNotFoundError:
        return set()


def judge(repeated: set[str], known: Mapping[str, Known], ci: bool) -> tuple[list[str], bool]:
    """(what to say, whether the run has failed by it) for tests that failed and then passed."""
    lines, failed = [], False
    for test in sorted(repeated):
        entry = known.get(test)
        if entry is not None:
            lines.append(f"e2e: known to be flaky since {entry.since} ({entry.reason}): {test}")
        elif ci:
            failed = True
            lines.append(f"e2e: FAILED at first and passed when repeated, which is a failure in CI: {test}")
        else:
            lines.append(f"e2e: failed at first and passed when repeated; in CI this is a failure: {test}")
    return lines, failed


def main(arguments: list[str]) -> int:
    before, after, listed = map(Path, arguments)
    try:
        known = read_known(listed.read_text())
    except ValueError as error:
        print(f"{listed}: {error}", file=sys.stderr)
        return 2
    lines, failed = judge(failures(before) - failures(after), known, os.environ.get("CI") == "true")
    print("\n".join(lines), end="\n" if lines else "")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
