"""[pure] The experiments: their arms, where each arm fails, and the runs that follow from both.

All runs of one model and one seed are the same training until something fails: a session changes nothing. So
a run without failures under the settings of an arm (its scout) says when that arm's versions are oldest. The
scout has the first seed, and the runs of all seeds fail after its steps: the versions of another seed may be
oldest some steps off.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.measure.fidelity.spec import Length, ModelKind, Moment, Outcome, RunSpec

CHECKPOINT: dict[str, Any] = {
    "warmup_steps": 20,
    "warmup_full_every": 10,
    "target_interval": 4,
    "s_max": 16,
    "full_every": 0,
    "failure_aware": False,
    "metrics_flush_s": 5,
}
"""The intervals of the defaults, 100 and 400 steps, scaled as the run is: 300 steps for the 7,122 of an epoch
of OpenThoughts-114k at 16 sequences a step. `failure_aware` would write more often after a failure."""
FULL = Length(
    base_steps=1000, steps=300, every=15, last_every=3, num_last=20, train_rows=6000, held_out_rows=100
)
QUICK = Length(
    base_steps=200, steps=100, every=20, last_every=2, num_last=6, train_rows=2000, held_out_rows=40
)
SEEDS, QUICK_SEEDS = 5, 2
OLDER = 10
"""How much older the versions of the positive control are."""
WINDOWS = ((0.30, 0.42), (0.50, 0.60), (0.68, 0.76))
"""Parts of a run in each of which one failure comes."""
_SELECTION = CHECKPOINT | {"target_interval": 20, "s_max": 80}
"""Older than usual, so that the modes have something to differ in."""
_LR_DECAY = 0.6

When = Literal["three_oldest", "one_oldest", "three_drawn"]


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to save and to recover.

    Attributes:
        checkpoint: settings of the session.
        when: failures come at the greatest size-weighted age of each window, of all of them, or anywhere;
            the age is that of the scout.
        equal_bytes_to: arm whose bytes this one is to write, by its `target_interval`.
    """

    name: str
    checkpoint: Mapping[str, Any] = field(default_factory=lambda: CHECKPOINT)
    model: ModelKind = "llama"
    lr_decay: float = 1.0
    when: When = "three_oldest"
    moment: Moment = "keep"
    equal_bytes_to: str | None = None

    @property
    def training(self) -> tuple[ModelKind, float]:
        """Arms that have this in common differ in nothing but what they save and lose."""
        return self.model, self.lr_decay

    def spec(self, seed: int, length: Length, failures: tuple[int, ...]) -> RunSpec:
        """A run of this arm; without failures it is its scout."""
        return RunSpec(
            model=self.model,
            seed=seed,
            length=length,
            checkpoint=dict(self.checkpoint),
            failures=failures,
            moment=self.moment if failures else "keep",
            lr_decay=self.lr_decay,
        )


def _times(factor: float) -> dict[str, Any]:
    """Other intervals. The age limit grows with them, or it would decide; the warm-up needs the usual one."""
    return CHECKPOINT | {
        "target_interval": CHECKPOINT["target_interval"] * factor,
        "s_max": round(CHECKPOINT["s_max"] * max(1, factor)),
    }


def _selection(model: ModelKind, lr_decay: float) -> tuple[Arm, ...]:
    title = model if lr_decay == 1 else f"{model}, LR x {lr_decay:g} a layer"
    modes = ("drift", "round_robin", "random")
    return tuple(
        Arm(
            f"{mode} ({title})",
            _SELECTION | {"selection": mode},
            model,
            lr_decay,
            "three_drawn",
            equal_bytes_to=None if mode == "drift" else f"drift ({title})",
        )
        for mode in modes
    )


_COMPOSITE = Arm("composite")
_CONTROL = Arm(f"control, ages x {OLDER}", _times(OLDER))
ARMS: dict[str, tuple[Arm, ...]] = {
    "cascade": (_COMPOSITE, _CONTROL),
    "thresholds": tuple(
        Arm(name, _times(factor), when="one_oldest")
        for name, factor in (("K", 1), ("K / 4", 0.25), ("4 K", 4))
    ),
    "benchmarks": (_COMPOSITE, Arm("composite (wide_embedding)", model="wide_embedding")),
    "selection": (*_selection("wide_embedding", 1.0), *_selection("llama", _LR_DECAY)),
    "moments": (_COMPOSITE, Arm("scale", moment="scale"), Arm("zero", moment="zero")),
}
"""The first arm of each is the one whose figures stand at the top of `fidelity.json`."""


def failures_of(arm: Arm, scout: Outcome, seed: int) -> tuple[int, ...]:
    """The steps after which a run of this arm loses everything; the seed matters to drawn ones alone."""
    steps = scout.spec.length.steps
    windows = [range(round(begin * steps), round(end * steps) + 1) for begin, end in WINDOWS]
    if arm.when == "three_drawn":
        draw = random.Random(seed)
        return tuple(draw.choice(window) for window in windows)
    if arm.when == "one_oldest":
        windows = [range(windows[0].start, windows[-1].stop)]
    return tuple(max(window, key=lambda step: scout.weighted_age[step - 1]) for window in windows)


def equalised(arms: Sequence[Arm], scouts: Mapping[str, Outcome]) -> tuple[Arm, ...]:
    """The arms, their intervals changed so that they would write as much as the arm they are measured by."""
    return tuple(_equalised(arm, scouts) for arm in arms)


def _equalised(arm: Arm, scouts: Mapping[str, Outcome]) -> Arm:
    if arm.equal_bytes_to is None:
        return arm
    ratio = scouts[arm.name].bytes_written / scouts[arm.equal_bytes_to].bytes_written
    interval = min(arm.checkpoint["target_interval"] * ratio, arm.checkpoint["s_max"])
    return replace(arm, checkpoint={**arm.checkpoint, "target_interval": round(interval, 2)})
