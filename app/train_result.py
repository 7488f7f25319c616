"""How a run ended: what the train function hands to its launcher."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["completed", "preempted", "fenced", "refused", "failed"]
"""`preempted`: its end was announced and it saved first, a new submission goes on; `refused`: an error that a
restart would meet again; `failed`: the restarts are used up."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How one life of a worker ended.

    Attributes:
        status: see `Status`.
        steps: number of the last step of the run.
        final_loss: loss of that step.
        ran: steps that this life ran; 0 where the run was complete before.
        step_s: median seconds of these.
        message: for a person, where the run did not complete.
        model: folder or URI of the Hugging Face model that Ray keeps as the run's Checkpoint.
    """

    status: Status
    steps: int = 0
    final_loss: float | None = None
    ran: int = 0
    step_s: float | None = None
    message: str = ""
    model: str | None = None
