"""No protection: the same loop with an object that saves nothing; a `MethodSession`."""

from layercheck.manifest import TrainerState
from layercheck.receipt import ResumePoint
from layercheck.step_report import StepReport


class NoSession:
    """Every call of a session, none of which does anything: a run that fails begins again at step 1."""

    def resume(self) -> ResumePoint:
        """Always a fresh run."""
        return ResumePoint(step=1)

    def after_step(self, step: int, trainer_state: TrainerState | None = None) -> StepReport:
        """Nothing is written; ages mean nothing."""
        return StepReport(step)

    def save_now(self, trainer_state: TrainerState | None = None) -> None:
        """Nothing is written."""

    def preempt(self, grace_s: float | None = None) -> None:
        """Nothing can be saved before the end."""

    def close(self, how: str = "completed") -> None:
        """Nothing is open."""
