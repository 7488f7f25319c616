"""[pure] What `after_step` tells the training loop."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one step cost and how fresh the store is.

    Attributes:
        stall_s: seconds for which training waited for a save; that of an accelerator is told a step or two
            later, when it is known without asking for it.
        layers_written: versions that were taken; `bytes_written` counts residuals too.
        tracking_s: seconds of `after_step` without the save.
        still_layers: trainable layers whose measured movement has been zero for a whole rotation: an alarm.
        preempted: the end of this run was announced and the last save is over: end the loop, close the
            session. Another step would raise.
        alerts: what a person should know since the last step; the coordinator's come on rank 0.
    """

    step: int
    stall_s: float = 0.0
    tracking_s: float = 0.0
    layers_written: int = 0
    bytes_written: int = 0
    max_age: int = 0
    weighted_age: float = 0.0
    still_layers: tuple[str, ...] = ()
    preempted: bool = False
    alerts: tuple[str, ...] = ()
