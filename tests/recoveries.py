"""Outcomes of killed runs that are known by hand."""

from collections.abc import Sequence
from typing import Any

from app.measure.memory.spec import KilledRun, Outcome, Recovered
from simulations.memory.tuned import QUICK, Extent, Pairs, tuned_pairs

STATE = {"a/0": "11", "b/0": "22"}


def recovered(killed_at: int = 20, source: str = "memory", **more: Any) -> Recovered:
    """One recovery of the layers a and b, which lost 3 steps of each parameter."""
    values = {
        "killed_at": killed_at, "t_fail": killed_at, "t_fail_source": "live", "resume_step": killed_at + 1,
        "lost_steps": 3.0, "max_age": 4, "weighted_age": 3.0, "ages": {"a": 4, "b": 2},
        "lost": {"a": 4.0, "b": 2.0}, "sources": {"a": source, "b": "memory" if source == "peer" else source},
        "residuals": (), "bad": 0, "seconds": {"plan_s": 0.1, "fetch_s": 0.2, "install_s": 0.3},
    }  # fmt: skip
    return Recovered.model_validate(values | more)


def outcome(run: KilledRun, *recoveries: Recovered, **more: Any) -> Outcome:
    """A run that went well."""
    values = {
        "run": run, "layers": {"a": 30, "b": 10}, "recoveries": recoveries, "losses": (2.0, 1.0),
        "state": STATE, "left": 0, "median_step_s": 0.5,
    }  # fmt: skip
    return Outcome.model_validate(values | more)


def pairs(
    undisturbed: Sequence[float] = (3.96, 4.04),
    killed: Sequence[float] = (3.96, 4.04),
    recoveries: Sequence[Recovered] = (),
) -> Pairs:
    """Fine-tuning runs with these final losses, one of each for each seed."""
    specs = tuned_pairs(Extent(QUICK.base_steps, QUICK.warmup_steps, QUICK.steps, len(undisturbed)))
    return [
        (outcome(one, held_out=(5.0, loss)), outcome(other, *recoveries, held_out=(5.0, after)))
        for (one, other), loss, after in zip(specs, undisturbed, killed, strict=True)
    ]
