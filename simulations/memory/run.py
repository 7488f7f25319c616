"""Makes the runs that are missing, and from all of them `memory.json` and its tables; the overhead apart."""

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.measure.memory.killed import outcome_of
from app.measure.memory.spec import Outcome
from layercheck.config import MemoryConfig
from layercheck.errors import ConfigError
from simulations.memory.arms import FULL, QUICK, UNDISTURBED, WORKER, Extent, killed_runs
from simulations.memory.figures import arm_figures, by_layer, verdicts
from simulations.memory.result import markdown

Say = Callable[[str], None]


def measure_memory(out: Path, quick: bool, say: Say) -> dict[str, Any]:
    """Measures; returns the figures of `<out>/memory.json` without the recoveries.

    Each run is kept as soon as it is over: what is known is not run again.

    Raises:
        ConfigError: the folder cannot be made.
    """
    extent = QUICK if quick else FULL
    runs = make_folder(out / "runs")
    outcomes: dict[str, Outcome] = {}
    for name, spec in killed_runs(extent).items():
        outcomes[name] = outcome_of(runs, spec, say)
        say(f"{name}: done")
    content = content_of(outcomes, extent)
    (out / "memory.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "memory.md").write_text(markdown(content))
    return {name: content[name] for name in ("verdicts", "arms")}


def content_of(outcomes: Mapping[str, Outcome], extent: Extent) -> dict[str, Any]:
    """All that `memory.json` holds."""
    arms = {name: arm_figures(run, outcomes[UNDISTURBED]) for name, run in outcomes.items()}
    return {
        "verdicts": verdicts(arms, outcomes),
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "by_layer": by_layer(outcomes[WORKER]),
        "conditions": _conditions(outcomes, extent),
        "runs": {
            name: run.model_dump(include={"run", "recoveries", "losses"}) for name, run in outcomes.items()
        },
    }


def make_folder(folder: Path) -> Path:
    """Makes it unless it is there.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {folder}: {error.strerror}", path=str(folder)) from None
    return folder


def _conditions(outcomes: Mapping[str, Outcome], extent: Extent) -> dict[str, Any]:
    undisturbed = outcomes[UNDISTURBED]
    return {
        "ranks": 2,
        "parameters": sum(undisturbed.layers.values()),
        "layers": undisturbed.layers,
        "steps": extent.steps,
        "loss_steps": len(undisturbed.losses),
        "warmup_steps": extent.warmup_steps,
        "target_interval": undisturbed.run.checkpoint["target_interval"],
        "k_ratio": MemoryConfig().k_ratio,
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
