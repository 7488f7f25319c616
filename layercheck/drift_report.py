"""[pure] What the ranks measured in one step, as all of them see it."""

from dataclasses import dataclass
from math import isfinite

from layercheck.layers import LayerStep


@dataclass(frozen=True, slots=True)
class DriftReport:
    """What the one all-reduce of a step says; identical on every rank.

    Attributes:
        step: optimizer step that was measured.
        delta: layer -> this step's normalised update (see `tracking/drift.py` for the norms).
        lr: largest learning rate over the groups of this step.
        committed_step: newest step of this attempt known to be committed, -1 for none.
        committed_part: part number of that newest event.
        lost_steps: events that were declared lost since the last report.
        backlog: bytes that the slowest rank still has to write.
        fenced: a newer attempt has taken over.
        demoted: a layer whose newest version has rotted, with the step that counts instead; one a report.
        errors: number of ranks that cannot go on: a non-finite loss or gradient norm, or a wait that is over.
        grace_s: seconds until some rank will be ended from outside (preemption); 0 for none.
        displacement: layer -> distance from its newest version; None where `drift.kind` is `path`.
        step_s: seconds of the step itself, mean over the ranks.
        stall_s: seconds for which training waited for saves since the last report, mean over the ranks.
        left_out: copies in memory that ranks had no room for since the last report, over all ranks.
    """

    step: int
    delta: dict[str, float]
    lr: float
    committed_step: int = -1
    committed_part: int = 0
    lost_steps: tuple[int, ...] = ()
    backlog: float = 0.0
    fenced: bool = False
    demoted: LayerStep | None = None
    errors: int = 0
    displacement: dict[str, float] | None = None
    step_s: float = 0.0
    stall_s: float = 0.0
    grace_s: float = 0.0
    left_out: int = 0

    @property
    def is_clean(self) -> bool:
        """False if the state of this step must never be committed (I13)."""
        return not self.errors and all(map(isfinite, self.delta.values()))
