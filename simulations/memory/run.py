"""Makes the runs that are missing, and from all of them `memory.json` and its tables; the overhead apart."""

import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.measure.memory.killed import outcome_of
from app.measure.memory.places import NUM_WORKERS
from app.measure.memory.spec import Outcome
from layercheck.config import MemoryConfig
from layercheck.errors import ConfigError
from simulations.memory.arms import FULL, QUICK, UNDISTURBED, WORKER, Extent, killed_runs
from simulations.memory.figures import arm_figures, both, by_layer, verdicts
from simulations.memory.result import markdown, tuned_markdown
from simulations.memory.tuned import FULL as TUNED
from simulations.memory.tuned import GAP, Pairs, tuned_figures, tuned_pairs, tuned_verdicts
from simulations.memory.tuned import QUICK as TUNED_QUICK

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
    content = content_of(outcomes, _made_pairs(runs, quick, say), extent)
    (out / "memory.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "memory.md").write_text(markdown(content))
    return {name: content[name] for name in ("verdicts", "arms")} | {"tuned": content["tuned"]["figures"]}


def measure_tuned(out: Path, quick: bool, say: Say) -> dict[str, Any]:
    """Makes the fine-tuning runs alone, as `measure_memory` would; returns the figures of `<out>/tuned.json`.

    Raises:
        ConfigError: the folder cannot be made.
    """
    content = tuned_content(_made_pairs(make_folder(out / "runs"), quick, say))
    (out / "tuned.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "tuned.md").write_text(tuned_markdown(content))
    return {name: content[name] for name in ("verdicts", "figures")}


def _made_pairs(runs: Path, quick: bool, say: Say) -> Pairs:
    specs = tuned_pairs(TUNED_QUICK if quick else TUNED)
    return [(outcome_of(runs, one, say), outcome_of(runs, other, say)) for one, other in specs]


def content_of(outcomes: Mapping[str, Outcome], pairs: Pairs, extent: Extent) -> dict[str, Any]:
    """All that `memory.json` holds."""
    arms = {name: arm_figures(run, outcomes[UNDISTURBED]) for name, run in outcomes.items()}
    fine_tuned = tuned_content(pairs)
    return {
        "verdicts": both(verdicts(arms, outcomes), fine_tuned["verdicts"]),
        "arms": {name: asdict(arm) for name, arm in arms.items()},
        "by_layer": by_layer(outcomes[WORKER]),
        "conditions": _conditions(outcomes, extent),
        "runs": _noted(outcomes),
        "tuned": fine_tuned,
    }


def tuned_content(pairs: Pairs) -> dict[str, Any]:
    """All that `tuned.json` holds."""
    figures = tuned_figures(pairs)
    first = pairs[0][0]
    return {
        "verdicts": tuned_verdicts(figures),
        "figures": asdict(figures),
        "conditions": {
            "ranks": NUM_WORKERS,
            "parameters": sum(first.layers.values()),
            "layers": first.layers,
            "base_steps": first.run.base_steps,
            "steps": first.run.steps,
            "gap": GAP,
            "checkpoint": first.run.checkpoint,
            "k_ratio": MemoryConfig().k_ratio,
            **_machine(),
        },
        "runs": _noted({run.run.name: run for pair in pairs for run in pair}),
    }


def _noted(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    kept = {"run", "recoveries", "losses", "held_out"}
    return {name: run.model_dump(include=kept) for name, run in outcomes.items()}


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
        "ranks": NUM_WORKERS,
        "parameters": sum(undisturbed.layers.values()),
        "layers": undisturbed.layers,
        "steps": extent.steps,
        "loss_steps": len(undisturbed.losses),
        "warmup_steps": extent.warmup_steps,
        "target_interval": undisturbed.run.checkpoint["target_interval"],
        "k_ratio": MemoryConfig().k_ratio,
        **_machine(),
    }


def _machine() -> dict[str, Any]:
    return {"machine": platform.platform(), "cores": len(os.sched_getaffinity(0))}
