"""What the training loop calls, and what differs between the methods that LayerCheck is compared with.

The loop holds a `MethodSession` and does not know which one. LayerCheck's own session is one; so is
`BaselineSession` (`session.py`), which does for every baseline what is the same for all of them and leaves
the rest to a `Baseline`.
"""

from dataclasses import dataclass
from typing import Protocol

from layercheck.manifest import TrainerState
from layercheck.partition import SubGroup
from layercheck.receipt import ResumePoint
from layercheck.step_report import StepReport


class MethodSession(Protocol):
    """How a run is protected. All ranks call each method at the same step, but for `preempt`."""

    def resume(self) -> ResumePoint:
        """Starts the run or recovers it. Called once, before training."""
        ...

    def after_step(self, step: int, trainer_state: TrainerState | None = None, /) -> StepReport:
        """Called after every optimizer step; whether to save is decided here."""
        ...

    def save_now(self, trainer_state: TrainerState | None = None, /) -> None:
        """Saves everything and waits until it is durable."""
        ...

    def preempt(self, grace_s: float | None = None, /) -> None:
        """Says that this rank will be ended soon. Any rank, any thread."""
        ...

    def close(self, how: str = "completed", /) -> None:
        """Waits for what is being saved, and ends. Safe to call twice, and after any error."""
        ...


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a method brought back: the state after `step`.

    Attributes:
        trainer_state: of that step.
        plan_s: seconds to find what to load.
        load_s: seconds of reading and checking it.
        reconstruct_s: seconds from these bytes to a state that can be trained on.
        nbytes: bytes that were read, all ranks.
        source: where they came from, for people (`storage step 40`, `host of rank 1`).
        passed_over: newer commits that were damaged.
    """

    step: int
    trainer_state: TrainerState
    plan_s: float
    load_s: float
    reconstruct_s: float
    nbytes: int
    source: str
    passed_over: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a method did and cost since it was last asked.

    Attributes:
        stall_s: seconds for which training waited outside of `after_step` and `before_update`.
        nbytes: bytes that became durable in the storage, all ranks.
        events: commits that became durable; `layer_writes` the layers in them.
        protected_step: newest step that a failure now would come back to; 0 for none.
        alerts: what a person should know.
    """

    stall_s: float = 0.0
    nbytes: int = 0
    events: int = 0
    layer_writes: int = 0
    protected_step: int = 0
    alerts: tuple[str, ...] = ()


class Baseline(Protocol):
    """What is particular to one method. Driven by `BaselineSession`; all calls are collectives.

    A save that fails never ends training: it becomes an alert, and the next one is tried.
    """

    def recover(self) -> Recovered | None:
        """Brings the newest state back into the engine, counters and scheduler aside; None: nothing is there.

        Raises:
            NoPlanError: something is there and none of it is whole.
            StorageError: the storage does not answer.
        """
        ...

    def begin(self, attempt: int, step: int) -> None:
        """Training begins after `step`, as attempt number `attempt` (from 1)."""
        ...

    def after_step(self, step: int, state: TrainerState) -> None:
        """The optimizer has taken `step`. May begin a save; the seconds in here are stall."""
        ...

    def before_update(self, group: SubGroup, lr: float) -> None:
        """One partition is about to be updated: the place to wait for a copy of it. No collective, no raise.

        The seconds in here are stall, too.
        """
        ...

    def save_now(self, step: int, state: TrainerState) -> None:
        """Saves the state of `step` and waits until it is durable, unless it is already.

        Raises:
            StorageError: it could not be saved.
        """
        ...

    def take_cost(self) -> StepCost:
        """What was done since the last call. No collective."""
        ...

    def facts(self) -> dict[str, float]:
        """Figures of this method alone, such as the interval that it chose; units in the names."""
        ...

    def close(self, *, wait: bool) -> None:
        """Ends the threads; with `wait` what is on its way becomes durable first, else nobody may wait."""
        ...
