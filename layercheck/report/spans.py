"""Drawings whose axis is seconds: the timeline of a run, and bars of what a time is made of."""

from collections.abc import Sequence
from html import escape

from layercheck.report.charts import LEFT, RIGHT, WIDTH, round_step, svg
from layercheck.report.pieces import seconds_text

Part = tuple[str, float]
"""(cause, seconds)."""
_BAR, _TOP, _THINNEST = 26, 20, 0.3


def style_of(cause: str) -> str:
    """Class of a cause in the style sheet."""
    return f"t-{cause.replace(' ', '-')}"


def timeline(title: str, lives: Sequence[tuple[str, Sequence[Part], bool]]) -> str:
    """One bar, cut by attempts. A life is (name, its parts as they passed, whether it failed)."""
    total_s = sum(seconds for _, parts, _ in lives for _, seconds in parts)
    if total_s <= 0:
        return ""
    per_s, now, body = (WIDTH - LEFT - RIGHT) / total_s, float(LEFT), []
    for name, parts, failed in lives:
        begin = now
        for cause, seconds in parts:
            body.append(_part(cause, now, seconds * per_s))
            now += seconds * per_s
        if now - begin > 7 * len(name) + 14:
            body.append(f'<text class="step" x="{begin + 7:.1f}" y="{_TOP - 7}">{escape(name)}</text>')
        if failed:
            body.append(_cross(now, _TOP - 9))
    body.append(_seconds_axis(total_s, per_s, _TOP + _BAR + 2))
    label = f'<text class="name" x="{LEFT - 8}" y="{_TOP + 17}">time</text>'
    return svg("timeline", title, _TOP + _BAR + 24, label + "".join(body))


def share_bar(name: str, title: str, label: str, parts: Sequence[Part]) -> str:
    """One bar over the whole width: what a time is made of."""
    total_s = sum(seconds for _, seconds in parts)
    if total_s <= 0:
        return ""
    now, body = float(LEFT), [f'<text class="name" x="{LEFT - 8}" y="13">{escape(label)}</text>']
    for cause, seconds in parts:
        wide = (WIDTH - LEFT - RIGHT) * seconds / total_s
        body.append(_part(cause, now, wide, top=0, height=18))
        now += wide
    return svg(name, title, 20, "".join(body))


def _part(cause: str, x: float, width: float, top: int = _TOP, height: int = _BAR) -> str:
    if width < _THINNEST:
        return ""
    return f'<rect class="{style_of(cause)}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height}"/>'


def _cross(x: float, y: float) -> str:
    """A failure, told by shape and not by colour alone."""
    return f'<path class="failed" d="M{x - 4:.1f} {y - 4:g}l8 8m0 -8l-8 8"/>'


def _seconds_axis(total_s: float, per_s: float, y: float) -> str:
    step_s, parts = round_step(total_s / 2), []
    for number in range(int(total_s / step_s) + 1):
        x = LEFT + number * step_s * per_s
        anchor = "end" if x > WIDTH - RIGHT - 24 else "middle"
        parts.append(
            f'<path class="grid" d="M{x:.1f} {y:g}v4"/><text class="step" x="{x:.1f}" y="{y + 17:g}" '
            f'text-anchor="{anchor}">{seconds_text(number * step_s)}</text>'
        )
    return "".join(parts)
