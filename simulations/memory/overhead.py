"""Runs the arms of the overhead and writes `overhead.json`. The machine must do nothing else meanwhile."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from app.measure.arms import Samples
from app.measure.memory.keepers import Keepers
from app.measure.memory.overhead import EVERY_STEP, USUAL, Settings, measure_cost
from app.measure.ranks import run_on_ranks
from app.measure.regime import CHECKPOINT, FULL, QUICK, WORLD_SIZE, Regime
from layercheck.config import parse_config
from simulations.memory.result import overhead_markdown
from simulations.memory.run import make_folder
from simulations.saving import figures
from simulations.saving.written import Written, written_in

LIMIT_S = 2400.0


SHORT = Regime(num_steps=60, num_write_pairs=0)
"""Enough for a first look where each step has an event."""


def measure_overhead(out: Path, quick: bool, every_step: bool) -> dict[str, Any]:
    """Measures, writes `<out>/overhead.json` or `<out>/every-step.json` and its table; returns its content.

    Raises:
        ConfigError: the folder cannot be made.
        LayerCheckError: a rank failed.
    """
    if every_step:
        return overhead(make_folder(out), "every-step", EVERY_STEP, SHORT if quick else QUICK)
    return overhead(make_folder(out), "overhead", USUAL, QUICK if quick else FULL)


def overhead(out: Path, file: str, settings: Settings, regime: Regime) -> dict[str, Any]:
    """The same with arms and a length of one's own."""
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=out.absolute()) as folder, ExitStack() as stack:
        kept = {}
        for name, own in settings.items():
            keepers = stack.enter_context(Keepers(f"{folder}/{name}", parse_config(CHECKPOINT | own)))
            kept[name] = keepers.coordinator, keepers.vaults
        ranks = run_on_ranks(WORLD_SIZE, LIMIT_S, measure_cost, folder, regime, settings, kept)
        stores = {name: written_in(f"{folder}/{name}/run", regime.last_step) for name in settings}
    content = content_of(
        {name: [rank[name] for rank in ranks] for name in settings}, regime, settings, stores
    )
    (out / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / f"{file}.md").write_text(overhead_markdown(content))
    return content


def content_of(
    arms: dict[str, Sequence[Samples]], regime: Regime, settings: Settings, stores: Mapping[str, Written]
) -> dict[str, Any]:
    """All that `overhead.json` holds, from the samples of each rank and what the arms have stored."""
    first = next(iter(arms))
    return {
        "arms": {
            name: _figures(ranks, arms[first]) | {"bytes_stored": stores[name].nbytes}
            for name, ranks in arms.items()
        },
        "conditions": {
            "ranks": WORLD_SIZE,
            "parameters": stores[first].full_bytes // 12,
            "steps": regime.num_steps,
            "settings": {name: CHECKPOINT | own for name, own in settings.items()},
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
