"""Makes the runs that are missing, and from all of them `residuals.json`, tables and pictures."""

import json
import os
import platform
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

from app.measure.fine_tuned import make_base
from app.measure.residuals.lives import run_lives
from app.measure.residuals.notes import Notes, notes_of, read_samples
from app.measure.residuals.regime import run_config
from app.measure.residuals.spec import KilledRun, Recovered
from layercheck.commands.store import open_both
from layercheck.errors import ConfigError
from layercheck.report.tables import read_parts, read_writes
from simulations.replay_policy import compare
from simulations.residuals.arms import (
    BYTES,
    FULL,
    MORE_BYTES,
    QUICK,
    WITHOUT,
    Extent,
    chosen,
    killed_runs,
    trace_run,
)
from simulations.residuals.figures import LOST, LOST_LESS, Written, arm_figures, needed, verdicts
from simulations.residuals.frontier import frontier, movement
from simulations.residuals.pictures import draw
from simulations.residuals.result import markdown
from simulations.tables import write_parquet
from simulations.trace import Trace, read_trace

AT_ONCE = 3
_LOSS_STEPS = 100
Say = Callable[[str], None]
Rows = Sequence[dict[str, Any]]


def measure_residuals(out: Path, quick: bool, say: Say) -> dict[str, Any]:
    """Measures; returns the content of `<out>/residuals.json` without the frontier's rows.

    (1) A run without a failure is recorded, with samples of its weights. (2) By replay: the frontier.
    (3) Three of its points and the run without residuals really run, each killed after the same steps, once
    for each seed of these steps.

    Raises:
        ConfigError: the folder cannot be made.
    """
    extent = QUICK if quick else FULL
    runs = out / "runs"
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {runs}: {error.strerror}", path=str(runs)) from None
    recorded = trace_run(extent)
    (store,) = _made(runs, [recorded, *killed_runs(extent, WITHOUT)], say)[:1]
    trace, samples = read_trace(str(store)), read_samples(notes_of(runs, recorded))
    rows = frontier(trace, samples, extent, lambda done, of: say(f"replayed {done}/{of}"))
    write_parquet(rows, out / "frontier.parquet")
    points = (WITHOUT, *chosen(rows[1:]))
    specs = {point.name: killed_runs(extent, point) for point in points}
    _made(runs, [spec for of in specs.values() for spec in of], say)
    recoveries = {name: _recoveries(runs, of) for name, of in specs.items()}
    written = {name: _written(runs, of, extent) for name, of in specs.items()}
    content = {
        **_real(recoveries, written),
        "predicted": {name: _predicted(rows, of[0]) for name, of in specs.items()},
        "movement": movement(trace, samples),
        "needed": {str(part): needed(rows[1:], part) for part in (LOST, LOST_LESS)},
        "loss": _losses(str(store), extent),
        "check": asdict(compare(trace)),
        "recoveries": {name: [one.model_dump() for one in found] for name, found in recoveries.items()},
        "conditions": _conditions(trace, extent, specs),
        "frontier": rows,
    }
    (out / "residuals.json").write_text(json.dumps(content, indent=2) + "\n")
    (out / "residuals.md").write_text(markdown(content))
    draw(content, out)
    return {name: content[name] for name in ("verdicts", "arms", "needed")}


def _made(runs: Path, specs: Iterable[KilledRun], say: Say) -> list[Path]:
    """The folders of the runs, in the order of the specs."""
    specs = list(specs)
    make_base(runs, specs[0].tuning)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(lambda spec: run_lives(runs, spec, say), specs))


def _recoveries(runs: Path, specs: Sequence[KilledRun]) -> list[Recovered]:
    """Those of one point, run after run."""
    return [one for spec in specs for one in Notes(notes_of(runs, spec)).recoveries()]


def _written(runs: Path, specs: Sequence[KilledRun], extent: Extent) -> Written:
    """By all runs of one point."""
    of = [written_by(run_config(runs.absolute(), spec).run.folder, extent) for spec in specs]
    return Written(sum(one.versions for one in of), sum(one.residuals for one in of))


def written_by(store: str, extent: Extent) -> Written:
    """What a run committed after its base up to its last step, full events aside.

    Args:
        store: the run folder.
        extent: of the run.
    """
    opened = open_both(store)
    facts = opened.facts()
    writes = [
        one
        for one in read_writes(opened.layercheck, facts, [])
        if extent.warmup_steps < one.event.step <= extent.steps and one.reason != "full"
    ]
    residuals = sum(one.nbytes for one in writes if one.reason == "residual")
    return Written(sum(one.nbytes for one in writes) - residuals, residuals)


def _real(recoveries: dict[str, list[Recovered]], written: dict[str, Written]) -> dict[str, Any]:
    base, base_written = recoveries[WITHOUT.name], written[WITHOUT.name]
    arms = {name: arm_figures(found, written[name], base, base_written) for name, found in recoveries.items()}
    with_residuals = {name: one for name, one in arms.items() if name != WITHOUT.name}
    return {
        "verdicts": verdicts(with_residuals, {BYTES: LOST, MORE_BYTES: LOST_LESS}),
        "arms": {name: asdict(one) for name, one in arms.items()},
    }


def _predicted(rows: Rows, spec: KilledRun) -> dict[str, Any]:
    """The row of the frontier at the settings of a run."""
    settings = spec.checkpoint.get("residual", {})
    wanted = (settings.get("bits", 0), spec.checkpoint["target_interval"], settings.get("k_ratio", 0.0))
    return next(row for row in rows if (row["bits"], row["version"], row["k_ratio"]) == wanted)


def _losses(store: str, extent: Extent) -> dict[str, float]:
    """Mean training loss of the first and of the last steps after the base."""
    metrics = read_parts(open_both(store).run, "metrics", ("step", "loss"), [], [])
    after = metrics.where(metrics["step"] > extent.warmup_steps)["loss"].tolist()
    return {"first": mean(after[:_LOSS_STEPS]), "last": mean(after[-_LOSS_STEPS:])}


def _conditions(trace: Trace, extent: Extent, specs: dict[str, list[KilledRun]]) -> dict[str, Any]:
    return {
        "ranks": 1,
        "parameters": sum(layer.numel for layer in trace.layer_map.trainable),
        "layers": {layer.name: layer.numel for layer in trace.layer_map.trainable},
        "base_steps": extent.base_steps,
        "steps": extent.steps,
        "warmup_steps": extent.warmup_steps,
        "interval": extent.interval,
        "s_max": extent.checkpoint["s_max"],
        "kills": extent.kills,
        "kill_seeds": extent.kill_seeds,
        "checkpoint": {name: of[0].checkpoint for name, of in specs.items()},
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
