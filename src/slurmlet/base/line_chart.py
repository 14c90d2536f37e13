"""Two lines over time as an SVG, written by hand: no plotting library for one picture."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 720, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 64, 40, 40
_COLOURS = ("#1f6feb", "#d1495b")

Points = Sequence[tuple[float, float]]


def chart(title: str, first: tuple[str, Points], second: tuple[str, Points]) -> str:
    """(label, points) each; the first has its scale on the left, the second on the right."""
    last_s = max((x for _, points in (first, second) for x, _ in points), default=0.0) or 1.0
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    for number, (label, points) in enumerate((first, second)):
        parts += _series(label, points, last_s, _COLOURS[number], on_the_right=bool(number))
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
        parts.append(
            f'<text x="{x:.0f}" y="{_HEIGHT - 14}" text-anchor="middle" fill="#555">{share * last_s:.0f} s</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _series(label: str, points: Points, last_s: float, colour: str, *, on_the_right: bool) -> list[str]:
    top = max((y for _, y in points), default=0.0) * 1.1 or 1.0
    inner_width, inner_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    line = " ".join(
        f"{_LEFT + x / last_s * inner_width:.1f},{_TOP + inner_height - y / top * inner_height:.1f}"
        for x, y in points
    )
    edge, anchor = (_WIDTH - _RIGHT + 6, "start") if on_the_right else (_LEFT - 6, "end")
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>']
    for share in (0.0, 0.5, 1.0):
        y = _TOP + inner_height * (1 - share)
        parts.append(
            f'<text x="{edge}" y="{y + 4:.0f}" text-anchor="{anchor}" fill="{colour}">{share * top:.3g}</text>'
        )
        if not on_the_right:
            parts.append(
                f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.0f}" y2="{y:.0f}" stroke="#ddd"/>'
            )
    side, where = ("end", _WIDTH - _RIGHT) if on_the_right else ("start", _LEFT)
    parts.append(f'<text x="{where}" y="35" text-anchor="{side}" fill="{colour}">{escape(label)}</text>')
    return parts
