"""Runs the arms of the overhead and writes `overhead.json`. The machine must do nothing else meanwhile."""

import json
import os
import platform
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from app.measure.arms import Samples
from app.measure.memory.keepers import Keepers
from app.measure.memory.overhead import ALONE, ARMS, measure_cost, settings_of
from app.measure.ranks import run_on_ranks
from app.measure.regime import FULL, QUICK, WORLD_SIZE, Regime
from layercheck.config import parse_config
from simulations.memory.result import overhead_markdown
from simulations.memory.run import make_folder
from simulations.saving import figures
from simulations.saving.written import written_in

LIMIT_S = 2400.0


def measure_overhead(out: Path, quick: bool) -> dict[str, Any]:
    """Measures, writes `<out>/overhead.json` and its table, and returns its content.

    Raises:
        ConfigError: the folder cannot be made.
        LayerCheckError: a rank failed.
    """
    return overhead(make_folder(out), QUICK if quick else FULL)


def overhead(out: Path, regime: Regime) -> dict[str, Any]:
    """The same with a length of one's own."""
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=out.absolute()) as folder, ExitStack() as stack:
        kept = {}
        for name in ARMS:
            keepers = stack.enter_context(Keepers(f"{folder}/{name}", parse_config(settings_of(name))))
            kept[name] = keepers.coordinator, keepers.vaults
        ranks = run_on_ranks(WORLD_SIZE, LIMIT_S, measure_cost, folder, regime, kept)
        parameters = written_in(f"{folder}/{ALONE}/run", regime.last_step).full_bytes // 12
    content = content_of({name: [rank[name] for rank in ranks] for name in ARMS}, regime, parameters)
    (out / "overhead.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "overhead.md").write_text(overhead_markdown(content))
    return content


def content_of(arms: dict[str, Sequence[Samples]], regime: Regime, parameters: int) -> dict[str, Any]:
    """All that `overhead.json` holds, from the samples of each rank."""
    return {
        "arms": {name: _figures(ranks, arms[ALONE]) for name, ranks in arms.items()},
        "conditions": {
            "ranks": WORLD_SIZE,
            "parameters": parameters,
            "steps": regime.num_steps,
            "settings": {name: settings_of(name) for name in ARMS},
            "machine": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
        },
    }


def _figures(ranks: Sequence[Samples], alone: Sequence[Samples]) -> dict[str, Any]:
    ratio = figures.ab_ratio(ranks, alone)
    steps = len(ranks[0].train_s)
    return {
        "step_s": float(np.median(figures.step_s(ranks))),
        "ratio": ratio.value,
        "ci95": [ratio.low, ratio.high],
        "overhead_ratio": figures.overhead_ratio(ranks),
        "stall_s": float(np.mean([rank.stall_s for rank in ranks])),
        "threads_s": sum(rank.thread_cpu_s for rank in ranks) / steps / len(ranks),
        "max_age": max(rank.max_age for rank in ranks),
    }
