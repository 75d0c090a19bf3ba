"""A simulation over time as a small SVG: throughput above, who holds the weakest block below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from lilliput.cli.simulate.world import Result
from lilliput.errors import BadRequest

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 720, 150, 56, 28, 58
_COLOURS = ("#1f6feb", "#d1570b", "#1a7f37", "#8250df", "#9a6700", "#cf222e")
Points = Sequence[tuple[float, float]]


def write_plot(file: Path, results: Sequence[tuple[str, Result]]) -> None:
    """Draw named results into `file`. Raises `BadRequest` if it cannot be written."""
    try:
        file.write_text(draw(results), encoding="utf-8")
    except OSError as e:
        raise BadRequest(f"cannot write the plot to {file}: {e.strerror or e}") from e


def draw(results: Sequence[tuple[str, Result]]) -> str:
    """The SVG's text."""
    throughput = [[(hour, 100 * share) for hour, share, _ in result.throughput] for _, result in results]
    holders = [[(hour, float(count)) for hour, _, count in result.held] for _, result in results]
    panels = [
        _panel(0, "throughput, % of the optimum", throughput, 100.0, ""),
        _panel(1, "servers of the block that fewest serve (square root)", holders, None, "hours"),
    ]
    legend = "".join(
        f'<text x="{_LEFT + number * 165}" y="14" fill="{_COLOURS[number % len(_COLOURS)]}">{escape(name)}</text>'
        for number, (name, _) in enumerate(results)
    )
    height = _TOP + 2 * (_HEIGHT + _GAP)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 16} {height}" '
        'font-family="sans-serif" font-size="11">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>{legend}{"".join(panels)}</svg>\n'
    )


def _panel(number: int, title: str, lines: Sequence[Points], most: float | None, below: str) -> str:
    """One diagram. Without `most`, its scale is that of the square root up to the largest value."""
    top = _TOP + number * (_HEIGHT + _GAP) + 14
    hours = max((x for points in lines for x, _ in points), default=0.0) or 1.0
    largest = most or max((y for points in lines for _, y in points), default=1.0) or 1.0
    power = 1.0 if most else 0.5

    def place(x: float, y: float) -> str:
        return f"{_LEFT + x / hours * _WIDTH:.1f},{top + _HEIGHT * (1 - (y / largest) ** power):.1f}"

    parts = [f'<text x="{_LEFT}" y="{top - 5}" fill="#57606a">{escape(title)}</text>']
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = largest * share ** (1 / power)
        _, y = place(0, value).split(",")
        parts.append(f'<path d="M{_LEFT} {y}h{_WIDTH}" stroke="#d0d7de" stroke-width="0.7"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y}" dy="4" text-anchor="end" fill="#57606a">{value:.0f}</text>')
    for tick in range(5):
        x = hours * tick / 4
        at = place(x, 0).split(",")[0]
        parts.append(
            f'<text x="{at}" y="{top + _HEIGHT + 14}" text-anchor="middle" fill="#57606a">{x:.3g} {below}</text>'
        )
    for points, colour in zip(lines, _COLOURS * len(lines), strict=False):
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.2"/>')
    return "".join(parts)
