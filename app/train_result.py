"""How a run ended: what the train function hands to its launcher."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["completed", "fenced", "refused", "failed"]
"""`refused`: an error that a restart would meet again; `failed`: the restarts are used up."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How one life of a worker ended. `step_s` is the median over the steps it ran."""

    status: Status
    steps: int = 0
    final_loss: float | None = None
    step_s: float | None = None
    message: str = ""
