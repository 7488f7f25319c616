"""[pure] How a recovery ended: what it did, and where training goes on."""

from dataclasses import dataclass, field
from typing import Any

from layercheck.manifest import BadShard, FailSource, PlanMode, Record, TrainerState

RECOVERY_PHASES = ("detect_s", "reschedule_s", "wait_s", "plan_s", "fetch_s", "install_s", "first_step_s")
"""The seconds in a receipt, in the order in which they pass."""


class Receipt(Record):
    """What one recovery did: the plan in numbers, seconds by phase, checksum results.

    `lost_steps` and `lost_drift` are its lost progress, in steps and in weight space; `measure` says in which
    norm, and whether as a bound (see `layercheck/lost.py`).
    """

    attempt: int
    mode: PlanMode
    t_fail: int
    t_fail_source: FailSource
    resume_step: int
    world_size: int
    max_age: int
    weighted_age: float
    lost_steps: float
    lost_drift: float | None = None
    measure: str = ""
    nbytes: int
    layers: tuple[dict[str, Any], ...]
    """Per layer: name, step, attempt, age (of its moments), residual (step of its weights where they are
    newer, else None), lost, lost_drift, reason, nbytes, fallback; with a memory tier also source (memory,
    peer or storage: the farthest that any rank read from)."""
    bad: tuple[BadShard, ...] = ()
    detect_s: float | None = None
    reschedule_s: float | None = None
    wait_s: float = 0.0
    """For which another submission's attempt was watched before it was taken over (`takeover_s`)."""
    plan_s: float = 0.0
    fetch_s: float = 0.0
    install_s: float = 0.0
    first_step_s: float | None = None
    rng: str = "keyed"
    loss_20_steps_later: float | None = None


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where training goes on, and as which attempt. `step` is the first step to run: 1 on a fresh run."""

    step: int
    trainer_state: TrainerState = field(default_factory=dict)
    receipt: Receipt | None = None
    attempt: int = 0
