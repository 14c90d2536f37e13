"""Groups of bars as an SVG, written by hand: each group has a scale of its own, each bar its number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _BAR, _GAP, _HEAD = 720, 18, 14, 40
_LABEL_WIDTH, _NUMBER_WIDTH = 150, 80
_COLOURS = ("#6e7781", "#1f6feb", "#2da44e", "#8250df", "#d1495b", "#bf8700")


def bars(title: str, groups: Mapping[str, Sequence[tuple[str, float]]]) -> str:
    """{group: [(label, value), …]}"""
    parts: list[str] = []
    top = _HEAD
    for name, values in groups.items():
        parts.append(f'<text x="10" y="{top + 12}" font-weight="bold">{escape(name)}</text>')
        top += _BAR + 2
        most = max((value for _, value in values), default=0.0) or 1.0
        for number, (label, value) in enumerate(values):
            parts += _bar(top, label, value, value / most, _COLOURS[number % len(_COLOURS)])
            top += _BAR
        top += _GAP
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{top}" fill="white"/>',
        f'<text x="10" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    return "\n".join([*head, *parts, "</svg>", ""])


def _bar(top: int, label: str, value: float, share: float, colour: str) -> list[str]:
    width = share * (_WIDTH - _LABEL_WIDTH - _NUMBER_WIDTH)
    return [
        f'<text x="{_LABEL_WIDTH - 8}" y="{top + 13}" text-anchor="end" fill="#555">{escape(label)}</text>',
        f'<rect x="{_LABEL_WIDTH}" y="{top + 2}" width="{width:.1f}" height="{_BAR - 4}" fill="{colour}"/>',
        f'<text x="{_LABEL_WIDTH + width + 6:.1f}" y="{top + 13}">{value:.4g}</text>',
    ]
