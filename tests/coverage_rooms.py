"""Coverage by room, of what `make unit` measured: a list of 400 files tells nobody whether the core is tested.

Reads the data that `coverage combine` left. Ends with 1 where a room is below its floor.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from coverage import Coverage

SOURCE = Path(__file__).parents[1] / "src" / "slurmlet"
# Percent of lines and branches together. A room gets its floor once it has been reached, and never loses it. Rooms whose
# tests start processes are given some points: one that is killed leaves no figures, and when that happens is chance.
FLOORS: dict[str, float] = {
    "agent": 93,
    "entrypoint": 93,
    "hub": 86.5,
    "images": 94.5,
    "kube": 98,
    "model": 97,
    "operators": 92,
    "podnet": 87,
    "protocol": 97.5,
    "runner": 88,
    "slurm": 90,
}


def rooms() -> dict[str, list[int]]:
    """Lines, those covered, branches, those covered. Every module of a room counts, also one that no test has imported."""
    measured = Coverage()
    measured.load()
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for path in SOURCE.glob("*/**/*.py"):
        _, lines, _, missing, _ = measured.analysis2(str(path))
        branches = measured.branch_stats(str(path)).values()
        counts = (
            len(lines),
            len(lines) - len(missing),
            sum(exits for exits, _ in branches),
            sum(taken for _, taken in branches),
        )
        room = found[path.relative_to(SOURCE).parts[0]]
        room[:] = [before + more for before, more in zip(room, counts, strict=True)]
    return dict(found)


def percent(covered: int, all_: int) -> float:
    return 100 * covered / all_ if all_ else 100.0


def main() -> int:
    print(f"{'room':<14} {'lines':>7} {'covered':>8} {'branches':>9} {'covered':>8} {'together':>9}")
    below: list[str] = []
    for room, (lines, covered_lines, branches, covered_branches) in sorted(rooms().items()):
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
    sys.exit(main())
