"""[pure] The runs: settings of the tier, what is killed, when."""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.measure.memory.spec import KilledRun, What

SEED = 11
LATE = (0.6, 0.9)
"""Parts of a step by which everything of the step before has reached the memory."""
UNDISTURBED, WORKER, EVERY, CASCADE = "undisturbed", "worker", "worker-every-step", "cascade"
NODE, CLUSTER = "node", "cluster"


@dataclass(frozen=True, slots=True)
class Extent:
    """How long the runs are.

    Attributes:
        warmup_steps: nothing is in memory alone before their end.
        kills: of workers; `few` of a cascade, of nodes and of the cluster.
        gap: steps from one kill of a worker to the next.
    """

    warmup_steps: int
    kills: int
    few: int
    gap: int

    @property
    def steps(self) -> int:
        """Of each run; behind the last kill there is room for another gap."""
        return self.warmup_steps + (self.kills + 1) * self.gap


FULL = Extent(warmup_steps=40, kills=8, few=3, gap=24)
QUICK = Extent(warmup_steps=16, kills=3, few=1, gap=16)


def killed_runs(extent: Extent) -> dict[str, KilledRun]:
    """All runs by name, that without a failure first. `memory.k_ratio` is the default unless it is named."""
    on = {"enabled": True}
    every, kept = on | {"k_ratio": 0}, on | {"replicas": 1}
    runs = [
        _run(extent, UNDISTURBED, {}),
        _run(extent, WORKER, {"memory": on}, extent.kills),
        _run(extent, EVERY, {"memory": every}, extent.kills),
        _run(extent, CASCADE, {"memory": every}, max(3, extent.few), moment=LATE),
        _run(extent, NODE, {"memory": kept}, extent.few, "node"),
        _run(extent, CLUSTER, {"memory": on, "residual": {"enabled": True}}, extent.few, "cluster"),
    ]
    return {run.name: run for run in runs}


def _run(
    extent: Extent,
    name: str,
    settings: Mapping[str, Any],
    kills: int = 0,
    what: What = "worker",
    moment: tuple[float, float] = (0.0, 1.0),
) -> KilledRun:
    return KilledRun(
        name=name,
        what=what,
        kills=kill_steps(extent, kills),
        moment=moment,
        steps=extent.steps,
        checkpoint={**checkpoint_of(extent.warmup_steps), **settings},
        seed=SEED,
    )


def kill_steps(extent: Extent, kills: int) -> tuple[int, ...]:
    """One in the middle half of each of equal parts of what follows the warm-up; the last part has none.

    So the copies have come to their usual ages, and the run gets on between two kills.
    """
    part = (extent.steps - extent.warmup_steps) / (kills + 1)
    draw = random.Random(SEED)
    begin = extent.warmup_steps + 0.25 * part
    return tuple(round(begin + (number + 0.5 * draw.random()) * part) for number in range(kills))


def checkpoint_of(warmup_steps: int) -> dict[str, Any]:
    """Settings of all runs. Thresholds are the defaults (a version every 100 steps); `tiny` has others.

    `failure_aware` would lower K after so many failures, and with it what is lost.
    """
    return {
        "warmup_steps": warmup_steps,
        "warmup_full_every": warmup_steps // 2,
        "target_interval": 100,
        "s_max": 400,
        "embedding_factor": 10,
        "full_every": 0,
        "failure_aware": False,
    }
