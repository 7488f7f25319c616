"""What to do with a first moment that is older than the weights it will move: keep it, scale it, drop it."""

from collections.abc import Mapping
from typing import Any

from app.measure.fidelity.spec import Moment
from layercheck.zero3 import Zero3Engine

_FIRST = "exp_avg"


def treat_moments(engine: Any, ages: Mapping[str, int], how: Moment) -> None:
    """Changes this rank's first moments in place.

    Args:
        engine: has just recovered.
        ages: layer -> steps since its version.
        how: `scale` multiplies by beta1^age, what is left of a gradient of that age.
    """
    if how == "keep":
        return
    zero3 = Zero3Engine(engine)
    for layer, slices in zero3.slices.items():
        for part in slices:
            moment = zero3.tensors(part).get(_FIRST)
            if moment is not None:
                group = zero3.optimizer.param_groups[zero3.sub_groups[part.sub_group].group]
                moment.mul_(group["betas"][0] ** ages[layer] if how == "scale" else 0.0)
