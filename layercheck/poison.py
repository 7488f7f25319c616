"""Is the state after a step finite? What is not is never saved (I13)."""

import math

from layercheck.attempt import Attempt
from layercheck.errors import NonFiniteStateError
from layercheck.manifest import DriftReport, TrainerState
from layercheck.zero3 import Zero3Engine


def is_poisoned(opened: Attempt, zero3: Zero3Engine, state: TrainerState) -> bool:
    """True if this rank's loss or gradient norm is not finite after a step that was not skipped."""
    if zero3.skipped > opened.skipped:
        opened.skipped = zero3.skipped
        return False
    values = (state.get("loss"), zero3.grad_norm())
    return any(value is not None and not math.isfinite(value) for value in values)


def poison_in(opened: Attempt, report: DriftReport) -> NonFiniteStateError | None:
    """The error that all ranks are to raise alike, if any of them reported one."""
    layer = opened.ledger.non_finite(report)
    if layer is None and not report.errors:
        return None
    what = (
        f"layer {layer} moved by a non-finite amount" if layer else "the loss or gradient norm is not finite"
    )
    return NonFiniteStateError(
        f"step {report.step}: {what}; nothing of this step was saved, collection is frozen",
        step=report.step,
        layer=layer,
    )
