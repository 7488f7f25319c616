"""Loss curves of an experiment (paper, figure 5), and what the recovered runs have above the others."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from app.measure.fidelity.spec import Outcome
from simulations.pictures import draw_lines, draw_stacks

_LABELS = ("step", "held-out loss, mean over seeds")


def draw(content: Mapping[str, Any], curves: Mapping[str, Sequence[Outcome]], out: Path) -> None:
    """Draws `loss`, `deviation` and `final`, as .png and .svg.

    Args:
        content: of `fidelity.json`.
        curves: the runs without failures first, then those of each arm; in the order of the seeds.
        out: folder.
    """
    free, *others = curves
    same = [name for name in others if curves[name][0].spec.model == curves[free][0].spec.model]
    lines = {name: mean_curve(curves[name]) for name in (free, *same)}
    draw_lines(lines, out / "loss", _LABELS, log="")
    _, base = lines[free]
    gaps = {name: (lines[name][0], _relative(lines[name][1], base)) for name in same}
    draw_lines(gaps, out / "deviation", ("step", "held-out loss above that without failures (%)"), log="")
    bars = {
        name: {"final loss above that without failures (%)": 100 * arm["mean_deviation"]}
        for name, arm in content["arms"].items()
    }
    draw_stacks({"mean over seeds": bars}, out / "final", "%")


def mean_curve(runs: Sequence[Outcome]) -> tuple[list[float], list[float]]:
    """Steps and the mean held-out loss over the runs; all evaluate at the same steps."""
    steps = [float(step) for step, _ in runs[0].evaluations]
    losses = zip(*([loss for _, loss in run.evaluations] for run in runs), strict=True)
    return steps, [mean(each) for each in losses]


def _relative(losses: Sequence[float], base: Sequence[float]) -> list[float]:
    return [100 * (one / other - 1) for one, other in zip(losses, base, strict=True)]
