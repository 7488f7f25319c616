"""The drawings of the page: SVG text, no script and no colours in it; both come from the style sheet."""

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from layercheck.report.data import REASONS, Curves
from layercheck.report.tables import Floats

LEFT, RIGHT, WIDTH = 118, 12, 960
"""All drawings share their left and right edge, so that one step is one vertical line through all of them."""
LEVELS = 8
"""Shades below D/K = 1; the last class of cells is `due`."""
_HEIGHT, _TOP, _BOTTOM = 132, 10, 20


def x_of(column: float, count: int) -> float:
    """Left edge of a column."""
    return LEFT + (WIDTH - LEFT - RIGHT) * column / count


def row_height(layers: int) -> int:
    """Many layers get thin rows."""
    return 18 if layers <= 24 else 13 if layers <= 48 else 10


def svg(name: str, title: str, height: float, body: str, follows: bool = False) -> str:
    """One drawing. `follows`: its axis is the steps of this run, and a cursor line goes with the control."""
    kind, cursor = "", ""
    if follows:
        kind = ' class="steps"'
        cursor = f'<line class="cursor" x1="-9" x2="-9" y1="0" y2="{height:g}"/>'
    return (
        f'<svg id="{escape(name)}"{kind} viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title)}">{body}{cursor}</svg>'
    )


# ---------------------------------------------------------------- heat map


def heat_map(curves: Curves, layers: Sequence[str], breaks: Sequence[int]) -> str:
    """D/K, one row a layer; a tick where a version was taken. `breaks`: columns at which an attempt began."""
    height, count = row_height(len(layers)), len(curves.first)
    body = [_axis(curves, len(layers) * height + 4)]
    for row, name in enumerate(layers):
        top = row * height
        body.append(
            f'<text class="name" x="{LEFT - 8}" y="{top + height / 2 + 3.5:g}" '
            f'style="font-size:{min(11.5, height)}px">{escape(name)}</text>'
        )
        body += _cells(curves.ratio[row], top, height)
    body.append(_ticks(curves, height))
    body += [_break(x_of(column, count), len(layers) * height) for column in breaks]
    body.append(
        f'<rect class="pick" x="{LEFT}" y="-99" width="{WIDTH - LEFT - RIGHT}" height="{height - 1}"/>'
    )
    title = f"Drift over threshold of {len(layers)} layers over the steps"
    return svg("heat", title, len(layers) * height + 26, "".join(body), follows=True)


def level(ratio: float) -> str:
    """Class of a cell."""
    if math.isnan(ratio):
        return "none"
    return "due" if ratio > 1 else f"h{min(LEVELS - 1, int(ratio * LEVELS))}"


def _cells(ratio: Floats, top: float, height: float) -> list[str]:
    """One path for each shade: runs of equal cells are one rectangle in it."""
    paths: dict[str, list[str]] = {}
    count, begin = len(ratio), 0
    for column in range(1, count + 1):
        shade = level(float(ratio[begin]))
        if column < count and level(float(ratio[column])) == shade:
            continue
        left, right = x_of(begin, count), x_of(column, count)
        paths.setdefault(shade, []).append(
            f"M{left:.1f} {top:g}h{right - left:.1f}v{height - 1:g}H{left:.1f}z"
        )
        begin = column
    return [f'<path class="{shade}" d="{"".join(runs)}"/>' for shade, runs in paths.items()]


def _ticks(curves: Curves, height: float) -> str:
    layers, count = curves.written.shape
    marks = [
        f"M{x_of(column + 0.5, count):.1f} {row * height + 2:g}v{height - 5:g}"
        for row in range(layers)
        for column in range(count)
        if curves.written[row, column]
    ]
    thin = ' style="stroke-width:1"' if count > 120 else ""
    return f'<path class="saved"{thin} d="{"".join(marks)}"/>'


# ---------------------------------------------------------------- curves and bars


def lines(
    name: str,
    title: str,
    curves: Curves,
    series: Sequence[tuple[str, Floats]],
    breaks: Sequence[int],
    bound: tuple[float, str] | None = None,
    percent: bool = False,
    from_zero: bool = True,
    follows: bool = True,
) -> str:
    """Lines of one unit; gaps where nothing is known. `series`: (class, values); `bound`: (level, name)."""
    known = [float(v) for _, values in series for v in values if math.isfinite(v)]
    high = max([*known, bound[0] if bound else 0.0], default=0.0) or 1.0
    low = 0.0 if from_zero else min(known, default=0.0)
    scale = _Scale(low, high)
    body = [_axis(curves, _HEIGHT - _BOTTOM), scale.grid(percent)]
    if bound:
        y = scale.y(bound[0])
        body.append(
            f'<path class="bound" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            f'<text class="note" x="{WIDTH - RIGHT}" y="{y + 12:.1f}">{escape(bound[1])}</text>'
        )
    body += [f'<path class="line {kind}" d="{_path(values, scale)}"/>' for kind, values in series]
    body += [_break(x_of(column, len(curves.first)), _HEIGHT - _BOTTOM) for column in breaks]
    return svg(name, title, _HEIGHT, "".join(body), follows)


def bars(name: str, title: str, curves: Curves, full_bytes: int, breaks: Sequence[int]) -> str:
    """Committed bytes of each column by reason, stacked, as a part of the full state."""
    unit, count = max(full_bytes, 1), len(curves.first)
    tops = np.sum(list(curves.nbytes.values()), axis=0) / unit
    scale = _Scale(0.0, max(float(tops.max()), 0.01))
    body = [_axis(curves, _HEIGHT - _BOTTOM), scale.grid(percent=True)]
    below = np.zeros(count)
    for reason in REASONS:
        above = below + curves.nbytes[reason] / unit
        path = "".join(
            f"M{x_of(c + 0.1, count):.1f} {scale.y(below[c]):.1f}V{scale.y(above[c]):.1f}"
            f"H{x_of(c + 0.9, count):.1f}V{scale.y(below[c]):.1f}z"
            for c in range(count)
            if above[c] > below[c]
        )
        body.append(f'<path class="r-{reason}" d="{path}"/>')
        below = above
    body += [_break(x_of(column, count), _HEIGHT - _BOTTOM) for column in breaks]
    return svg(name, title, _HEIGHT, "".join(body), follows=True)


class _Scale:
    """Values to heights, over round grid lines."""

    def __init__(self, low: float, high: float) -> None:
        self.step = round_step((high - low) or abs(high) or 1.0)
        self.low = self.step * math.floor(low / self.step)
        self.high = max(self.step * math.ceil(high / self.step - 1e-9), self.low + self.step)

    def y(self, value: float) -> float:
        share = (float(value) - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - share * (_HEIGHT - _BOTTOM - _TOP)

    def grid(self, percent: bool) -> str:
        parts = []
        for number in range(round((self.high - self.low) / self.step) + 1):
            value = self.low + number * self.step
            label = f"{100 * value:.4g} %" if percent else f"{value:.4g}"
            parts.append(
                f'<path class="grid" d="M{LEFT} {self.y(value):.1f}H{WIDTH - RIGHT}"/>'
                f'<text class="name" x="{LEFT - 8}" y="{self.y(value) + 4:.1f}">{label}</text>'
            )
        return "".join(parts)


def round_step(span: float) -> float:
    """For grid lines: a step of 1, 2 or 5 times a power of ten that cuts a span into two to five parts."""
    power = 10.0 ** math.floor(math.log10(span / 2))
    return next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 4.5)


def _path(values: Floats, scale: _Scale) -> str:
    parts, draws = [], False
    for column, value in enumerate(values):
        if math.isfinite(value):
            x = x_of(column + 0.5, len(values))
            alone = not draws and (column + 1 == len(values) or not math.isfinite(values[column + 1]))
            parts.append(f"{'L' if draws else 'M'}{x:.1f} {scale.y(value):.1f}{'h0.1' if alone else ''}")
        draws = math.isfinite(value)
    return "".join(parts)


def _axis(curves: Curves, y: float) -> str:
    """Step numbers below a drawing."""
    last = curves.last(len(curves.first) - 1)
    step = max(1, round(round_step(last / 2.5)))
    parts = []
    for number in [1, *range(step, last + 1, step)]:
        x = x_of(curves.column(number) + 0.5, len(curves.first))
        if number == 1 or x - LEFT > 30:
            anchor = "end" if x > WIDTH - RIGHT - 24 else "middle"
            parts.append(
                f'<path class="grid" d="M{x:.1f} {y:g}v4"/>'
                f'<text class="step" x="{x:.1f}" y="{y + 16:g}" text-anchor="{anchor}">{number}</text>'
            )
    return "".join(parts)


def _break(x: float, height: float) -> str:
    return f'<path class="break" d="M{x:.1f} 0V{height:g}"/>'
