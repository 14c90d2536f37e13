"""Panels of lines that go in steps, one below the other over the same time, as an SVG written by hand.

For counts that change at an instant and stay: machines, jobs. Of more points than the picture has dots, the highest of each
dot is kept: a peak must not vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _PANEL, _GAP = 760, 150, 46
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 150, 44, 34
_COLOURS = ("#1f6feb", "#d1495b", "#bf8700", "#2da44e", "#8250df", "#6e7781")
_DOTS = 600

Points = Sequence[tuple[float, float]]  # (seconds, value from then on)


@dataclass(frozen=True)
class Panel:
    title: str
    series: Sequence[tuple[str, Points]]  # (label, points)


def step_chart(title: str, panels: Sequence[Panel], last_s: float) -> str:
    height = _TOP + len(panels) * (_PANEL + _GAP) - _GAP + _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        f'<text x="10" y="18" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, _TOP + number * (_PANEL + _GAP), last_s or 1.0)
    unit, per_s = ("h", 3600.0) if last_s < 4 * 86_400 else ("d", 86_400.0)
    unit, per_s = ("min", 60.0) if last_s < 4 * 3600 else (unit, per_s)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        parts.append(
            f'<text x="{x:.0f}" y="{height - 10}" text-anchor="middle" fill="#555">'
            f"{share * last_s / per_s:.3g} {unit}</text>"
        )
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float, last_s: float) -> list[str]:
    width = _WIDTH - _LEFT - _RIGHT
    most = max((y for _, points in panel.series for _, y in points), default=0.0) * 1.05 or 1.0
    parts = [f'<text x="{_LEFT}" y="{top - 6:.0f}" fill="#333">{escape(panel.title)}</text>']
    for share in (0.0, 0.5, 1.0):
        y = top + _PANEL * (1 - share)
        parts.append(f'<line x1="{_LEFT}" x2="{_LEFT + width}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end" fill="#555">{share * most:.3g}</text>'
        )
    for number, (label, points) in enumerate(panel.series):
        colour = _COLOURS[number % len(_COLOURS)]
        way = " ".join(
            f"{_LEFT + x / last_s * width:.1f},{top + _PANEL * (1 - y / most):.1f}"
            for x, y in _steps(points, last_s)
        )
        parts.append(f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        y = top + 12 + number * 16
        parts.append(f'<text x="{_LEFT + width + 10}" y="{y:.0f}" fill="{colour}">{escape(label)}</text>')
    return parts


def _steps(points: Points, last_s: float) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for x, y in _thinned([point for point in points if point[0] <= last_s], last_s):
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    if found:
        found.append((last_s, found[-1][1]))
    return found


def _thinned(points: Points, last_s: float) -> Points:
    if len(points) <= _DOTS:
        return points
    highest: dict[int, tuple[float, float]] = {}
    for x, y in points:
        dot = int(x / last_s * _DOTS)
        if dot not in highest or y > highest[dot][1]:
            highest[dot] = (x, y)
    return list(highest.values())
