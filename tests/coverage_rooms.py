"""Coverage by room, of what `make coverage` measured: a list of 400 files tells nobody whether the core is tested.

Usage: coverage_rooms.py coverage.json. Ends with 1 where a room is below its floor.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path

# Percent of lines and branches together. A room gets its floor once it has been reached, and never loses it.
FLOORS: dict[str, float] = {
    "hub": 83,
    "kube": 97,
    "model": 96,
    "podnet": 83,
    "protocol": 96,
    "runner": 73,
    "slurm": 88,
}
_COUNTS = ("num_statements", "covered_lines", "num_branches", "covered_branches")


def rooms_of(measured: Path) -> dict[str, dict[str, int]]:
    rooms: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_COUNTS, 0))
    for name, file in json.loads(measured.read_text())["files"].items():
        below = Path(name).parts[Path(name).parts.index("slurmlet") + 1 :]
        if len(below) > 1:
            for count in _COUNTS:
                rooms[below[0]][count] += file["summary"][count]
    return dict(rooms)


def percent(covered: int, all_: int) -> float:
    return 100 * covered / all_ if all_ else 100.0


def main(measured: str) -> int:
    print(f"{'room':<14} {'lines':>7} {'covered':>8} {'branches':>9} {'covered':>8} {'together':>9}")
    below: list[str] = []
    for room, counts in sorted(rooms_of(Path(measured)).items()):
        lines, covered_lines, branches, covered_branches = (counts[each] for each in _COUNTS)
        together = percent(covered_lines + covered_branches, lines + branches)
        print(
            f"{room:<14} {lines:>7} {percent(covered_lines, lines):>7.1f}% "
            f"{branches:>9} {percent(covered_branches, branches):>7.1f}% {together:>8.1f}%"
        )
        if together < FLOORS.get(room, 0):
            below.append(f"{room}: {together:.1f} % is covered, and its floor is {FLOORS[room]} %")
    for each in below:
        print(each, file=sys.stderr)
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
