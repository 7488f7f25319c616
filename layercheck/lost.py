"""[pure] Lost progress over the layers of a model, in steps or in the measure of the drift.

A measure is what `tracking/calibrate.measure_name` says: `mean_abs` for the path in this norm, which is the
most that the weights can have moved, or `displacement mean_abs` for the distance itself. A sum of distances
is a path. The rounding of a residual is in neither.
"""

from collections.abc import Iterable
from math import sqrt

DISPLACEMENT = "displacement "


def over_all(measure: str, layers: Iterable[tuple[int, float]]) -> float:
    """One figure for (numel, value) of all layers, weighted by size.

    For `mean_abs` and `rms` it is the norm over the whole model. A relative norm of the whole would need the
    weights' norms; there it is the mean of the layers' values.
    """
    pairs = list(layers)
    total = max(1, sum(numel for numel, _ in pairs))
    if measure.removeprefix(DISPLACEMENT) == "rms":
        return sqrt(sum(numel * value**2 for numel, value in pairs) / total)
    return sum(numel * value for numel, value in pairs) / total


def in_words(lost_drift: float | None, measure: str, residuals: bool = False) -> str:
    """`at most 0.0021 (mean_abs)`; without `at most` where the distance itself was measured.

    Nor with `residuals` among what comes back: their weights are rounded, which no drift measures. How
    coarsely is known to the writer alone, once it has the scale of each block.
    """
    if lost_drift is None:
        return "unknown"
    rest = " beside the rounding of residuals" if residuals else ""
    if lost_drift == 0:
        return f"0{rest}"
    bound = "" if residuals or measure.startswith(DISPLACEMENT) else "at most "
    return f"{bound}{lost_drift:.3g} ({measure.removeprefix(DISPLACEMENT)}){rest}"
