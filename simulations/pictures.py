"""Pictures of a sweep, PNG and SVG; the only file that loads matplotlib, and only when it draws."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layercheck.errors import ConfigError
from simulations.sweep import Outcome
from simulations.tables import CAUSES, crossovers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#1b6ca8", "#d1495b", "#3b8b5a", "#8d5ba6", "#c98a1b", "#5f6b73", "#20a4a4", "#a0522d")
PAPER_LINE = {"layercheck": 0.923, "lowdiff": 0.888, "gemini": 0.845}
"""What the paper reports at 0.5 h: a reference, not an expected value."""
PAPER_MTBF_H = 0.5


def draw_curves(
    outcomes: Sequence[Outcome], path: Path, over_gpus: bool = False, paper: bool = False
) -> None:
    """ETTR against MTBF (paper, figure 8) or cluster size, a panel for each protocol.

    Dashed: with lost progress charged. Crosses: what the paper reports. Dotted: crossovers.
    """
    protocols = list(dict.fromkeys(one.point.protocol for one in outcomes))
    figure, panels = _figure(len(protocols), 5.2, 4.2)
    for panel, protocol in zip(panels, protocols, strict=True):
        mine = [one for one in outcomes if one.point.protocol == protocol]
        for name, colour in _coloured(outcomes):
            _curve(panel, [one for one in mine if one.point.method.name == name], name, colour, over_gpus)
            if paper and not over_gpus and name in PAPER_LINE:
                panel.plot(PAPER_MTBF_H, PAPER_LINE[name], "x", color=colour)
        for one in crossovers(mine):
            if not one.charged and not over_gpus:
                panel.axvline(one.mtbf_s / 3600, color="#999999", linewidth=0.6, linestyle=":")
        panel.set_title(protocol.replace("_", " "))
        panel.set_xscale("log")
        panel.set_ylim(0, 1)
        panel.set_xlabel("GPUs" if over_gpus else "mean time between failures (h)")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("effective training time ratio")
    panels[0].legend(fontsize=7)
    _save(figure, path)


def _curve(panel: "Axes", outcomes: list[Outcome], name: str, colour: str, over_gpus: bool) -> None:
    places = [float(one.point.gpus) if over_gpus else one.mtbf_s / 3600 for one in outcomes]
    panel.plot(places, [one.ettr for one in outcomes], color=colour, label=name)
    low, high = ([one.ettr + sign * one.ettr_ci for one in outcomes] for sign in (-1, 1))
    panel.fill_between(places, low, high, color=colour, alpha=0.2)
    if any(one.point.tiers for one in outcomes):
        charged = [one.charged for one in outcomes]
        panel.plot(places, charged, color=colour, linestyle="--", label=f"{name}, lost progress charged")


def draw_breakdown(outcomes: Sequence[Outcome], path: Path, mtbf_h: float = 0.5) -> None:
    """Lost time by cause at the MTBF nearest to `mtbf_h`, one bar for each method."""
    protocols = list(dict.fromkeys(one.point.protocol for one in outcomes))
    figure, panels = _figure(len(protocols), 4.8, 4.2)
    nearest = min({one.mtbf_s for one in outcomes}, key=lambda mtbf_s: abs(mtbf_s / 3600 - mtbf_h))
    for panel, protocol in zip(panels, protocols, strict=True):
        mine = [one for one in outcomes if one.point.protocol == protocol and one.mtbf_s == nearest]
        names, bottom = [one.point.method.name for one in mine], [0.0] * len(mine)
        for cause, colour in zip(CAUSES, _COLOURS, strict=True):
            heights = [one.shares[cause] for one in mine]
            label = cause.removesuffix("_s").replace("_", " ")
            panel.bar(names, heights, bottom=bottom, color=colour, label=label)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        panel.set_title(f"{protocol.replace('_', ' ')}, MTBF {nearest / 3600:.3g} h")
        panel.tick_params(axis="x", labelrotation=20)
    panels[0].set_ylabel("part of the time that was lost")
    panels[-1].legend(fontsize=7)
    _save(figure, path)


def draw_stacks(panels: Mapping[str, Mapping[str, Mapping[str, float]]], path: Path, label: str) -> None:
    """Stacked bars.

    Args:
        panels: title -> bar -> part -> height; all bars of a panel have the same parts.
        path: without suffix; `.png` and `.svg` are written.
        label: of the heights.
    """
    figure, axes = _figure(len(panels), 5.2, 4.2)
    for panel, (title, bars) in zip(axes, panels.items(), strict=True):
        bottom = [0.0] * len(bars)
        for part, colour in zip(next(iter(bars.values())), _COLOURS, strict=False):
            heights = [bar[part] for bar in bars.values()]
            panel.bar(list(bars), heights, bottom=bottom, color=colour, label=part.replace("_", " "))
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
        panel.set_title(title.replace("_", " "))
        panel.tick_params(axis="x", labelrotation=30)
    axes[0].set_ylabel(label)
    axes[-1].legend(fontsize=7)
    _save(figure, path)


def draw_lines(
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    path: Path,
    labels: tuple[str, str],
    log: str,
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
) -> None:
    """Plain curves.

    Args:
        lines: label -> (x, y).
        path: without suffix; `.png` and `.svg` are written.
        labels: of the axes.
        log: axes with a logarithmic scale, such as `x` or `xy`.
        points: label -> (x, y), drawn as markers over the curves.
    """
    figure, (panel,) = _figure(1, 6.0, 4.2)
    for index, (label, (x, y)) in enumerate(lines.items()):
        again, colour = divmod(index, len(_COLOURS))
        panel.plot(x, y, "--" if again else "-", color=_COLOURS[colour], label=label)
    for (label, (x, y)), marker in zip((points or {}).items(), cycle("osD^v")):
        panel.plot(x, y, marker, color="black", label=label)
    if "x" in log:
        panel.set_xscale("log")
    if "y" in log:
        panel.set_yscale("log")
    panel.set_xlabel(labels[0])
    panel.set_ylabel(labels[1])
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)
    _save(figure, path)


def draw_heat_map(values: Any, rows: Sequence[str], path: Path, first_step: int) -> None:
    """A row for each layer, a column for each step (paper, figure 2); each row relative to its largest value.

    Args:
        values: shape (rows, steps), 0 or larger.
        rows: their names.
        path: without suffix; `.png` and `.svg` are written.
        first_step: of the first column.
    """
    largest = values.max(axis=1, keepdims=True)
    figure, (panel,) = _figure(1, 8.0, 1.2 + 0.28 * len(rows))
    image = panel.imshow(
        values / largest.clip(min=1e-300),
        aspect="auto",
        cmap="viridis_r",
        interpolation="nearest",
        extent=(first_step - 0.5, first_step - 0.5 + values.shape[1], len(rows) - 0.5, -0.5),
    )
    panel.set_yticks(range(len(rows)), rows, fontsize=7)
    panel.set_xlabel("step")
    figure.colorbar(image, ax=panel, label="drift / its largest value")
    _save(figure, path)


# ---------------------------------------------------------------- matplotlib


def _coloured(outcomes: Sequence[Outcome]) -> list[tuple[str, str]]:
    names = list(dict.fromkeys(one.point.method.name for one in outcomes))
    return [(name, _COLOURS[index % len(_COLOURS)]) for index, name in enumerate(names)]


def _figure(panels: int, width: float, height: float) -> tuple["Figure", list["Axes"]]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "pictures need matplotlib: install layercheck[sim], or pass --no-pictures"
        ) from None
    figure = Figure(figsize=(width * panels, height), layout="constrained")
    axes: Any = figure.subplots(1, panels, sharey=True, squeeze=False)
    return figure, list(axes[0])


def _save(figure: "Figure", path: Path) -> None:
    figure.savefig(path.with_suffix(".png"), dpi=150)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
