"""Draws the figures as one SVG, alone or in an HTML page: no other file, no script, light and dark."""

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from serve_app.cli.bench.figures import Figures
from serve_app.cli.failure import CommandFailed

WIDTH, HEIGHT, MARGIN = 440, 280, 56
FORMATS = (".svg", ".html")
STYLE = """
:root { color-scheme: light dark; }
.page { fill: #ffffff; } text { font: 12px system-ui, sans-serif; fill: #5b6472; }
.title { font-weight: 600; font-size: 13px; fill: #171a1f; } .grid { stroke: #e3e6eb; }
.line { fill: none; stroke-width: 2; } .s0 { stroke: #2563c9; fill: #2563c9; } .s1 { stroke: #b4531a; fill: #b4531a; }
.s2 { stroke: #a3308f; fill: #a3308f; } .line.s0, .line.s1, .line.s2 { fill: none; }
@media (prefers-color-scheme: dark) {
  .page { fill: #161a20; } text { fill: #97a1b0; } .title { fill: #e8ebf0; } .grid { stroke: #2b323c; }
  .s0 { stroke: #6ea8ff; fill: #6ea8ff; }
  .s1 { stroke: #f59a5f; fill: #f59a5f; } .s2 { stroke: #e583d3; fill: #e583d3; }
}
"""
SHOWN = (50, 95, 99)

Series = dict[str, list[float | None]]


def check_format(path: Path) -> None:
    """Raises CommandFailed for a name that is neither, and for one in no folder: before all the work, not after it."""
    if path.suffix not in FORMATS:
        raise CommandFailed(f"{path} is no plot; name a file that ends in {' or '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise CommandFailed(f"{path} cannot be written: there is no folder {path.absolute().parent}; make it first")


def write_plot(figures: Sequence[Figures], path: Path, *, title: str) -> None:
    """Writes throughput and latencies over the levels."""
    drawing = draw(figures, title=title)
    if path.suffix == ".html":
        drawing = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>{drawing}</html>'
    try:
        path.write_text(drawing)
    except OSError as error:
        raise CommandFailed(f"the plot cannot be written to {path}: {error.strerror}") from error


def draw(figures: Sequence[Figures], *, title: str) -> str:
    """Gives the SVG: four panels."""
    by_rate = figures[0].level.endswith("a second")
    levels = [figure.number for figure in figures]
    panels: list[tuple[str, Series]] = [
        ("Throughput, tokens a second", {"": [figure.tokens_per_s for figure in figures]}),
        ("First token, ms", _latencies([figure.first_token_s for figure in figures])),
        ("Time per later token, ms", _latencies([figure.token_s for figure in figures])),
        ("Whole answer, ms", _latencies([figure.total_s for figure in figures])),
    ]
    axis = "requests a second" if by_rate else "requests at once"
    drawn = [
        _panel(name, series, levels, axis, left=(index % 2) * WIDTH, top=40 + (index // 2) * HEIGHT)
        for index, (name, series) in enumerate(panels)
    ]
    width, height = 2 * WIDTH, 40 + 2 * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><style>{STYLE}</style>'
        f'<rect class="page" width="{width}" height="{height}"/>'
        f'<text class="title" x="{MARGIN}" y="26">{escape(title)}</text>{"".join(drawn)}</svg>'
    )


def _latencies(by_level: Sequence[dict[int, float]]) -> Series:
    return {
        f"p{percent}": [1000 * found[percent] if percent in found else None for found in by_level] for percent in SHOWN
    }


def _panel(title: str, series: Series, levels: Sequence[float], axis: str, *, left: int, top: int) -> str:
    step = nice_step(max((value for values in series.values() for value in values if value is not None), default=1.0))
    highest = max((value for values in series.values() for value in values if value is not None), default=1.0)
    num_steps = max(1, math.ceil(highest / step))
    bottom, right = top + HEIGHT - MARGIN, left + WIDTH - 20
    span = right - left - MARGIN

    def x(index: int) -> float:
        return left + MARGIN + span * (index + 0.5) / len(levels)

    def y(value: float) -> float:
        return bottom - (HEIGHT - 2 * MARGIN) * value / (step * num_steps)

    parts = [f'<text class="title" x="{left + MARGIN}" y="{top + 24}">{title}</text>']
    for number in range(num_steps + 1):
        at = y(number * step)
        parts.append(f'<line class="grid" x1="{left + MARGIN}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{left + MARGIN - 8}" y="{at + 4:.1f}" text-anchor="end">{number * step:g}</text>')
    for index, level in enumerate(levels):
        parts.append(f'<text x="{x(index):.1f}" y="{bottom + 18}" text-anchor="middle">{level:g}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 36}" text-anchor="end">{axis}</text>')
    for number, (name, values) in enumerate(series.items()):
        places = [(x(index), y(value)) for index, value in enumerate(values) if value is not None]
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in places)
        parts.append(f'<polyline class="line s{number}" points="{points}"/>')
        parts.extend(f'<circle class="s{number}" cx="{a:.1f}" cy="{d:.1f}" r="3"/>' for a, d in places)
        if name:
            across = right - 44 * (len(series) - number)
            parts.append(f'<circle class="s{number}" cx="{across}" cy="{top + 20}" r="4"/>')
            parts.append(f'<text x="{across + 8}" y="{top + 24}">{name}</text>')
    return "".join(parts)


def nice_step(highest: float) -> float:
    """Gives 1, 2 or 5 times a power of ten, of which four to ten make the highest value."""
    if highest <= 0:
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(highest / 4))
    return max(factor * power for factor in (1, 2, 5) if factor * power <= highest / 4)
