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

from app.measure.arms import Samples, steps_inside
from app.measure.hosts import host_processes
from app.measure.memory.keepers import Keepers
from app.measure.memory.overhead import EVERY_STEP, USUAL, Settings, measure_cost
from app.measure.peers import Peers
from app.measure.ranks import run_on_ranks
from app.measure.regime import CHECKPOINT, FULL, QUICK, WORLD_SIZE, Regime
from layercheck.config import parse_config
from simulations.comparison.arms import REFERENCE
from simulations.memory.peers import USUAL_PEERS, base_of, peers_of
from simulations.memory.result import overhead_markdown
from simulations.memory.run import make_folder
from simulations.saving import figures
from simulations.saving.written import Written, written_in

LIMIT_S = 3600.0
SHORT = Regime(num_steps=60, num_write_pairs=0)
"""Enough for a first look where each step has an event."""


def measure_overhead(
    out: Path, quick: bool, every_step: bool, methods: Sequence[str] | None = None
) -> dict[str, Any]:
    """Measures, writes `<out>/overhead.json` or `<out>/every-step.json` and its table; returns its content.

    Args:
        out: folder of the results.
        quick: fewer steps.
        every_step: arms that save at every step, other methods among them.
        methods: which; None for the usual ones.

    Raises:
        ConfigError: the folder cannot be made, or there is no such method.
        LayerCheckError: a rank failed.
    """
    if every_step:
        peers = peers_of(USUAL_PEERS if methods is None else methods)
        return overhead(make_folder(out), "every-step", EVERY_STEP, peers, SHORT if quick else QUICK)
    return overhead(make_folder(out), "overhead", USUAL, {}, QUICK if quick else FULL)


def overhead(out: Path, file: str, settings: Settings, peers: Peers, regime: Regime) -> dict[str, Any]:
    """The same with arms and a length of one's own."""
    with tempfile.TemporaryDirectory(prefix="overhead-", dir=out.absolute()) as folder, ExitStack() as stack:
        kept = {}
        for name, own in settings.items():
            keepers = stack.enter_context(Keepers(f"{folder}/{name}", parse_config(CHECKPOINT | own)))
            kept[name] = keepers.coordinator, keepers.vaults
        names = [f"host-{rank}" for rank in range(WORLD_SIZE)] if peers else []
        hosts = stack.enter_context(host_processes(names))
        ranks = run_on_ranks(WORLD_SIZE, LIMIT_S, measure_cost, folder, regime, settings, kept, peers, hosts)
        stores = {name: written_in(f"{folder}/{name}/run", regime.last_step) for name in settings}
    arms = {name: [rank[name] for rank in ranks] for name in (*settings, *peers)}
    content = content_of(arms, regime, settings, peers, stores)
    (out / f"{file}.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / f"{file}.md").write_text(overhead_markdown(content))
    return content


def content_of(
    arms: Mapping[str, Sequence[Samples]],
    regime: Regime,
    settings: Settings,
    peers: Peers,
    stores: Mapping[str, Written],
) -> dict[str, Any]:
    """All that `overhead.json` holds.

    Args:
        arms: name -> samples of each rank.
        regime: how long they ran.
        settings: of LayerCheck's arms; the others of these are compared with the first.
        peers: the arms of other methods.
        stores: what LayerCheck's arms have stored.
    """
    first = next(iter(settings))
    bases = dict.fromkeys(settings, first) | {name: base_of(name) for name in peers}
    inside = steps_inside(int(CHECKPOINT["warmup_steps"]), regime.last_step)
    rows = {name: _row(arms, name, base, inside) for name, base in bases.items()}
    for name in settings:
        rows[name] |= _threads(arms[name]) | {"bytes_stored": stores[name].nbytes}
    return {
        "arms": rows,
        "conditions": {
            "ranks": WORLD_SIZE,
            "parameters": stores[first].full_bytes // 12,
            "steps": regime.num_steps,
            "settings": {name: CHECKPOINT | own for name, own in settings.items()},
            "methods": {name: list(items) for name, items in peers.items()},
            "machine": platform.platform(),
            "cores": len(os.sched_getaffinity(0)),
        },
    }


def _row(
    arms: Mapping[str, Sequence[Samples]], name: str, base: str, inside: Sequence[int]
) -> dict[str, Any]:
    ranks = arms[name]
    row = {
        "base": base,
        "step_s": float(np.median(figures.step_s(ranks))),
        **_ratio("ratio", figures.ab_ratio(ranks, arms[base])),
        **_ratio("ratio_inside", figures.ab_ratio(ranks, arms[base], inside)),
        "stall_s": float(np.mean([rank.stall_s or [0.0] for rank in ranks])),
        "max_age": None if name == REFERENCE else max(rank.max_age for rank in ranks),
        "bytes_stored": ranks[0].bytes_written,
    }
    if REFERENCE in arms:
        row |= _ratio("ratio_to_none", figures.ab_ratio(ranks, arms[REFERENCE]))
    return row


def _ratio(name: str, ratio: figures.Ratio) -> dict[str, Any]:
    return {name: ratio.value, name.replace("ratio", "ci95"): [ratio.low, ratio.high]}


def _threads(ranks: Sequence[Samples]) -> dict[str, float]:
    """Of LayerCheck alone: the threads of the others come and go with their commits."""
    steps = len(ranks[0].train_s)
    return {
        "overhead_ratio": figures.overhead_ratio(ranks),
        "threads_s": sum(rank.thread_cpu_s for rank in ranks) / steps / len(ranks),
    }
