"""Line charts for HTML reports: plain SVG, no scripts, no outside resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 460, 240, 56, 36, 28, 12
_COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
STYLE = """
:root { color-scheme: light dark; --ink: #1f2937; --dim: #6b7280; --line: #d1d5db; --back: #fff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e5e7eb; --dim: #9ca3af; --line: #374151; --back: #111827; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back);
  max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
th, td { text-align: right; padding: .3rem .6rem; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.charts { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0; }
svg { max-width: 100%; height: auto; }
svg text { fill: var(--dim); font-size: 11px; }
svg .title { fill: var(--ink); font-size: 13px; font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; }
pre { overflow-x: auto; padding: 1rem; border: 1px solid var(--line); }
"""
"""CSS of a page with charts, tables (in `.scroll`) and settings (in `pre`)."""

Points = Sequence[tuple[float, float]]


def chart(title: str, x_unit: str, y_unit: str, lines: Sequence[tuple[str, Points]]) -> str:
    """Return a line chart as SVG; both axes start at 0."""
    points = [point for _, line in lines for point in line]
    top_x = max(x for x, _ in points) or 1.0
    top_y = max(y for _, y in points) or 1.0
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(point: tuple[float, float]) -> str:
        x, y = LEFT + inner_w * point[0] / top_x, TOP + inner_h * (1 - point[1] / top_y)
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(title)}"><text class="title" x="{LEFT}" y="16">{escape(title)}</text>'
    ]
    for step in range(5):
        share = step / 4
        y, x = TOP + inner_h * (1 - share), LEFT + inner_w * share
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_tick(top_y * share)}</text>'
        )
        anchor = "end" if step == 4 else "middle"
        label = _tick(top_x * share) + (f" {x_unit}" if step == 4 else "")
        parts.append(
            f'<text x="{x}" y="{HEIGHT - 16}" text-anchor="{anchor}">{escape(label)}</text>'
        )
    for number, (name, line) in enumerate(lines):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(place(point) for point in line)
        parts.append(
            f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}">'
            f"<title>{escape(name)}</title></polyline>"
        )
        if name and len(lines) > 1:
            y = TOP + 14 + 14 * number
            parts.append(
                f'<text x="{LEFT + 8}" y="{y}" style="fill:{colour}">{escape(name)}</text>'
            )
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 2}">{escape(y_unit)}</text></svg>')
    return "".join(parts)


def _tick(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 10 or value == 0 else f"{value:.2g}"
