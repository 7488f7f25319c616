"""[pure] What one fine-tuning run is asked to do, and what it came to; both have a JSON form."""

from typing import Any, Literal

import xxhash
from pydantic import Field

from app.section import Section

ModelKind = Literal["llama", "wide_embedding"]
Moment = Literal["keep", "scale", "zero"]
"""What happens to the stale first moment of a layer at a recovery: nothing, times beta1^age, gone."""
_VERSION = 1


class Length(Section):
    """How long the runs are; all numbers but the rows are optimizer steps.

    Attributes:
        base_steps: of the model that is fine-tuned, trained from scratch.
        steps: of the fine-tuning.
        every: between two evaluations of the held-out loss.
        last_every: the same for the last `num_last` evaluations, which give the final loss.
        train_rows: rows to fine-tune on, at most; `held_out_rows` those that are evaluated.
    """

    base_steps: int
    steps: int
    every: int
    last_every: int
    num_last: int
    train_rows: int
    held_out_rows: int

    @classmethod
    def of_killed(cls, base_steps: int, steps: int) -> "Length":
        """Of a run whose processes are killed, and which nothing evaluates before its end."""
        return cls(
            base_steps=base_steps,
            steps=steps,
            every=steps,
            last_every=1,
            num_last=1,
            train_rows=6000,
            held_out_rows=100,
        )

    def is_evaluated(self, step: int) -> bool:
        """True if the held-out loss is taken after this step."""
        left = self.steps - step
        if left < self.num_last * self.last_every:
            return left % self.last_every == 0
        return step % self.every == 0


class RunSpec(Section):
    """One fine-tuning run.

    Attributes:
        model: what is fine-tuned.
        seed: of the order of the data.
        checkpoint: settings of the session, see `LayerCheckConfig`.
        failures: after each of these steps everything in memory is lost.
        moment: what is done to the first moments at each recovery.
        lr_decay: learning rate of a layer over that of the next one above it; 1 for one rate.
    """

    model: ModelKind = "llama"
    seed: int
    length: Length
    checkpoint: dict[str, Any]
    failures: tuple[int, ...] = ()
    moment: Moment = "keep"
    lr_decay: float = Field(1.0, gt=0)

    @property
    def key(self) -> str:
        """Names the run: equal for equal specs."""
        return str(xxhash.xxh3_64_hexdigest(f"{_VERSION}{self.model_dump_json()}".encode()))


class Recovery(Section):
    """One recovery.

    Attributes:
        step: the last step before the failure.
        lost_steps: optimizer steps lost, size-weighted; ages likewise, in steps.
        loss_before: held-out loss of the state that was lost; `loss_after` of the composite.
    """

    step: int
    lost_steps: float
    weighted_age: float
    max_age: int
    nbytes: int
    loss_before: float
    loss_after: float


class Outcome(Section):
    """What a run came to.

    Attributes:
        evaluations: (step, held-out loss), the first of step 0.
        weighted_age: size-weighted age after each step, from step 1 on; steps run once.
        accuracy: part of the held-out questions whose right answer was the likeliest.
        bytes_written: of the events after the base.
        step_s: median seconds of a step, the save included.
    """

    spec: RunSpec
    evaluations: tuple[tuple[int, float], ...]
    weighted_age: tuple[float, ...]
    recoveries: tuple[Recovery, ...]
    accuracy: float
    bytes_written: int
    num_parameters: int
    step_s: float
