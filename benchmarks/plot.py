"""Plots throughput and delays against the number of clients, as a self-contained SVG file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from xml.sax.saxutils import escape

from benchmarks.results import rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Report, Row

_PANELS: Final = (
    ("tok/s", ("generation", "decode only")),
    ("ITL p50, ms", ("ITL p50",)),
    ("TTFT p50, ms", ("TTFT p50",)),
)
_COLORS: Final = ("#1f6feb", "#d29922", "#2da44e", "#bf3989")
_WIDTH: Final = 360
_HEIGHT: Final = 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 16, 40, 44
_TICKS: Final = 4


@dataclass(frozen=True, slots=True)
class Line:
    """One side's medians: pairs of clients and value."""

    label: str
    points: tuple[tuple[int, float], ...]


def svg(report: Report) -> str:
    """Draw a report whose points differ in the number of clients."""
    panels = [(title, _lines(report, names)) for title, names in _PANELS]
    filled = [(title, lines) for title, lines in panels if any(line.points for line in lines)]
    drawn = [_panel(title, lines, left=index * _WIDTH) for index, (title, lines) in enumerate(filled)]
    legend = "".join(
        f'<text x="{_LEFT + index * 140}" y="16" fill="{_colour(index)}">{escape(side.facts.name)}</text>'
        for index, side in enumerate(report.sides)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH * len(filled)}" height="{_HEIGHT}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>'
        f"{legend}{''.join(drawn)}</svg>\n"
    )


def _lines(report: Report, names: Sequence[str]) -> list[Line]:
    shown = next((name for name in names for row in rows(report) if row.name == name), names[0])
    chosen = [row for row in rows(report) if row.name == shown]
    return [Line(side.facts.name, _points(chosen, index)) for index, side in enumerate(report.sides)]


def _points(chosen: Sequence[Row], side: int) -> tuple[tuple[int, float], ...]:
    return tuple((row.parameters[0].value, found.median) for row in chosen if (found := row.spreads[side]) is not None)


def _panel(title: str, lines: Sequence[Line], *, left: int) -> str:
    clients = sorted({x for line in lines for x, _ in line.points})
    top = max((y for line in lines for _, y in line.points), default=0.0) or 1.0
    width, height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    # One place a number of clients: they usually double, and so are as far apart as on a logarithmic axis.
    across = {x: left + _LEFT + width * (index + 0.5) / len(clients) for index, x in enumerate(clients)}

    def down(value: float) -> float:
        return _TOP + height * (1 - value / top)

    parts = [f'<text x="{left + _LEFT}" y="{_TOP - 8}">{escape(title)}</text>']
    for tick in range(_TICKS + 1):
        value = top * tick / _TICKS
        parts += [
            f'<line x1="{left + _LEFT}" x2="{left + _LEFT + width}" y1="{down(value):.1f}" y2="{down(value):.1f}" '
            'stroke="#ddd"/>',
            f'<text x="{left + _LEFT - 4}" y="{down(value) + 4:.1f}" text-anchor="end">{_tick(value)}</text>',
        ]
    parts += [
        f'<text x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{x}</text>' for x, at in across.items()
    ]
    parts.append(f'<text x="{left + _LEFT + width / 2}" y="{_HEIGHT - 8}" text-anchor="middle">clients</text>')
    for index, line in enumerate(lines):
        path = " ".join(f"{across[x]:.1f},{down(y):.1f}" for x, y in line.points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_colour(index)}" stroke-width="2"/>')
        parts += [
            f'<circle cx="{across[x]:.1f}" cy="{down(y):.1f}" r="3" fill="{_colour(index)}"/>' for x, y in line.points
        ]
    return "".join(parts)


def _tick(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _colour(index: int) -> str:
    return _COLORS[index % len(_COLORS)]
