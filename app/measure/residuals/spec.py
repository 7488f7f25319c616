"""[pure] A run that is killed, and what each of its recoveries lost; both have a JSON form."""

from typing import Any

from app.measure.fidelity.spec import Length, RunSpec
from app.section import Section


class KilledRun(Section):
    """A fine-tuning run whose process ends by SIGKILL right after some steps.

    Attributes:
        name: of the run, and of its folders.
        base_steps: of the model that is fine-tuned, trained from scratch.
        checkpoint: settings of the session, see `LayerCheckConfig`.
        kills: steps after which the process is killed; increasing.
        sampled: write down a part of the weights after each step, of a run without kills.
    """

    name: str
    seed: int
    base_steps: int
    steps: int
    checkpoint: dict[str, Any]
    kills: tuple[int, ...] = ()
    sampled: bool = False

    @property
    def tuning(self) -> RunSpec:
        """The same as a run of the fidelity experiments, whose model and text it takes; never evaluated."""
        length = Length.of_killed(self.base_steps, self.steps)
        return RunSpec(seed=self.seed, length=length, checkpoint=self.checkpoint)


class Recovered(Section):
    """One recovery: the truth, and what the receipt says.

    Attributes:
        killed_at: the last step before the SIGKILL.
        distance: mean |weight lost - weight restored| over all parameters, fp32; `by_layer` over a layer's.
        t_fail, lost_steps, lost_drift, max_age, weighted_age, nbytes: of the receipt.
    """

    killed_at: int
    distance: float
    by_layer: dict[str, float]
    t_fail: int
    resume_step: int
    lost_steps: float
    lost_drift: float | None
    max_age: int
    weighted_age: float
    nbytes: int
