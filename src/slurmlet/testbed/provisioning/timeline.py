"""What happened on a site, sampled: jobs, Slurm's nodes, Machines and replicas side by side, as text and as a picture.

The picture is the thesis's figure 6.15, continued to the end of the circle: from a job's submission over the machine that
was made for it to the moment at which neither Machine nor node record is left. Needs nothing of the operator: only what
anybody can see from outside goes into it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape

from slurmlet.testbed.config_files import SHAPE_PREFIX

ABSENT = ""
_COLOURS = {
    "PENDING": "#d9d9d9", "RUNNING": "#2b8a3e", "COMPLETING": "#8ce99a",
    "machine": "#ffe8cc", "injected": "#ffc078", "provisioned": "#fd7e14",
    "idle": "#a5d8ff", "busy": "#1971c2", "draining": "#e599f7", "drained": "#9c36b5", "down": "#e03131",
    "deleting": "#868e96",
}  # fmt: skip
_ROW, _LEFT, _WIDTH = 22, 210, 900


@dataclass(frozen=True)
class Sample:
    """One look. States of what is not there are missing."""

    time_s: float
    jobs: Mapping[str, str]
    nodes: Mapping[str, str]
    machines: Mapping[str, str]
    replicas: Mapping[str, int]

    def rows(self) -> dict[str, str]:
        """A machine and the node of its name are one row: what Slurm says of it wins once it has registered."""
        found = {f"job {name}": state for name, state in self.jobs.items()}
        for name in {*self.machines, *self.nodes}:
            machine, node = self.machines.get(name, ABSENT), self.nodes.get(name, ABSENT)
            gone = machine == "deleting" and node not in ("draining", "drained")
            found[name] = machine if gone or not node else node
        return found


@dataclass(frozen=True)
class Span:
    row: str
    state: str
    begin_s: float
    end_s: float


def sample(time_s: float, jobs: str, nodes: str, objects: Sequence[Mapping[str, Any]]) -> Sample:
    by_kind: dict[str, list[Mapping[str, Any]]] = {}
    for one in objects:
        by_kind.setdefault(one["kind"], []).append(one)
    injected = {
        name.removesuffix("-metadata")
        for secret in by_kind.get("Secret", ())
        if (name := secret["metadata"]["name"]).endswith("-metadata")
    }
    return Sample(
        time_s,
        {words[0]: words[1] for line in jobs.splitlines() if len(words := line.split()) == 2},
        {
            words[0]: node_state(words[1])
            for line in nodes.splitlines()
            if len(words := line.split()) == 2
            and not words[0].startswith(SHAPE_PREFIX)
            and not words[1].endswith("~")  # powered down
        },
        {one["metadata"]["name"]: _machine_state(one, injected) for one in by_kind.get("Machine", ())},
        {
            one["metadata"]["name"]: int(one["spec"].get("replicas", 0))
            for one in by_kind.get("MachineDeployment", ())
        },
    )


def node_state(word: str) -> str:
    """sinfo's long state in the few words of the picture."""
    plain = word.rstrip("*~#!%$@^-+")
    if plain in ("allocated", "mixed", "completing"):
        return "busy"
    return plain if plain in ("idle", "draining", "drained") else "down"


def _machine_state(machine: Mapping[str, Any], injected: set[str]) -> str:
    if machine["metadata"].get("deletionTimestamp"):
        return "deleting"
    initialization = (machine.get("status") or {}).get("initialization") or {}
    if initialization.get("infrastructureProvisioned"):
        return "provisioned"
    reference = (machine["spec"].get("infrastructureRef") or {}).get("name", "")
    return "injected" if reference in injected else "machine"


def spans(samples: Sequence[Sample]) -> list[Span]:
    """What each row was, from when to when; rows in the order in which they came."""
    opened: dict[str, tuple[str, float]] = {}
    made: list[Span] = []
    for one in samples:
        rows = one.rows()
        for row in {*opened, *rows}:
            state = rows.get(row, ABSENT)
            before = opened.get(row)
            if before is not None and before[0] != state:
                made.append(Span(row, before[0], before[1], one.time_s))
                opened.pop(row)
            if state and row not in opened:
                opened[row] = (state, one.time_s)
    end_s = samples[-1].time_s if samples else 0.0
    made += [Span(row, state, begin, end_s) for row, (state, begin) in opened.items()]
    return sorted(made, key=lambda span: (span.begin_s, span.row))


def phases(samples: Sequence[Sample], submitted_s: float | None = None) -> list[tuple[str, float]]:
    """From the first job's submission to its start, as the thesis's figure 6.15: what happened, and seconds since then.

    What was over between two looks is missing. Without `submitted_s`, the first look that saw a job counts.
    """
    if not samples:
        return []
    first = samples[0].replicas
    seen: dict[str, Callable[[Sample], bool]] = {
        "replicas raised": lambda one: sum(one.replicas.values()) > sum(first.values()),
        "Machine created": lambda one: bool(one.machines),
        "metadata rendered": lambda one: bool({"injected", "provisioned"} & set(one.machines.values())),
        "slurmd registered": lambda one: bool(one.nodes),
        "job started": lambda one: "RUNNING" in one.jobs.values(),
        "machine provisioned": lambda one: "provisioned" in one.machines.values(),
        "first node drained": lambda one: bool({"draining", "drained"} & set(one.nodes.values())),
    }
    seen_s = next((one.time_s for one in samples if one.jobs), samples[0].time_s)
    begin_s = seen_s if submitted_s is None else submitted_s
    found = [
        (name, next((one.time_s - begin_s for one in samples if is_so(one)), None))
        for name, is_so in seen.items()
    ]
    return sorted(((name, at_s) for name, at_s in found if at_s is not None), key=lambda pair: pair[1])


def rows_of(found: Sequence[Span]) -> list[str]:
    return list(dict.fromkeys(span.row for span in found))


def text(samples: Sequence[Sample], submitted_s: float | None = None) -> str:
    """The moments of the first job, then one line for each change, in seconds since the first sample."""
    if not samples:
        return ""
    begin_s = samples[0].time_s
    lines = [
        f"{span.begin_s - begin_s:7.1f} s  {span.row:<28} {span.state.lower()} for {span.end_s - span.begin_s:.1f} s"
        for span in spans(samples)
    ]
    moments = [f"{at_s:7.1f} s  {name}" for name, at_s in phases(samples, submitted_s)]
    return "\n".join(["Since the first job was submitted:", *moments, "", "All of it:", *lines]) + "\n"


def picture(samples: Sequence[Sample], title: str) -> str:
    """An SVG: a row for each job and each machine, and the replicas asked for above them."""
    found = spans(samples)
    rows = rows_of(found)
    begin_s = samples[0].time_s
    length_s = max(samples[-1].time_s - begin_s, 1.0)

    def x(time_s: float) -> float:
        return _LEFT + (time_s - begin_s) / length_s * _WIDTH

    top = 40 + _ROW * 3
    height = top + _ROW * len(rows) + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="22" font-size="15">{escape(title)}</text>',
        *_replicas(samples, x, 40, _ROW * 3 - 10),
    ]
    for number, row in enumerate(rows):
        y = top + number * _ROW
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row)}</text>')
        for span in found:
            if span.row == row:
                width = max(x(span.end_s) - x(span.begin_s), 1.0)
                words = f"{span.row}: {span.state.lower()}, {span.end_s - span.begin_s:.1f} s"
                parts.append(
                    f'<rect x="{x(span.begin_s):.1f}" y="{y + 2}" width="{width:.1f}" height="{_ROW - 5}" '
                    f'fill="{_COLOURS.get(span.state, "#495057")}"><title>{escape(words)}</title></rect>'
                )
    parts += _axis(length_s, top + _ROW * len(rows) + 4)
    parts += _legend({span.state for span in found}, height - 22)
    return "\n".join([*parts, "</svg>\n"])


def _replicas(samples: Sequence[Sample], x: Callable[[float], float], top: float, height: float) -> list[str]:
    totals = [sum(one.replicas.values()) for one in samples]
    most = max([*totals, 1])
    points = [
        f"{x(one.time_s):.1f},{top + height - value / most * height:.1f}"
        for before, one, total in zip([totals[0], *totals], samples, totals, strict=False)
        for value in dict.fromkeys((before, total))
    ]
    return [
        f'<text x="{_LEFT - 8}" y="{top + height}" text-anchor="end">replicas (most {most})</text>',
        f'<polyline points="{" ".join(points)}" fill="none" stroke="#c92a2a" stroke-width="1.5"/>',
    ]


def _axis(length_s: float, y: float) -> list[str]:
    step_s = next((step for step in (5, 10, 20, 30, 60, 120, 300) if length_s / step <= 12), 600)
    made = []
    for tick in range(0, int(length_s) + 1, step_s):
        x = _LEFT + tick / length_s * _WIDTH
        made.append(f'<line x1="{x:.1f}" y1="{y}" x2="{x:.1f}" y2="{y + 4}" stroke="black"/>')
        made.append(f'<text x="{x:.1f}" y="{y + 17}" text-anchor="middle">{tick} s</text>')
    return made


def _legend(states: set[str], y: float) -> list[str]:
    made, x = [], 10.0
    for state in [one for one in _COLOURS if one in states]:
        made.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_COLOURS[state]}"/>')
        made.append(f'<text x="{x + 16}" y="{y + 11}">{state.lower()}</text>')
        x += 26 + 7.5 * len(state)
    return made
