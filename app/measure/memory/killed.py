"""Runs one run to its end through all its kills, and reads what became of it.

A kill comes at a random moment of a step: what was copied at its beginning may be whole by then or not. The
next one waits until the run has got beyond where it was.
"""

import glob
import json
import random
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from app.measure.memory.places import Place
from app.measure.memory.spec import KilledRun, Outcome, Recovered
from app.measure.memory.tuned_run import held_out, prepared
from app.measure.waits import LIMIT_S, wait_for, wait_for_end
from app.step_log import LoggedStep, read_lives
from cluster.coordinator import normal_storage
from cluster.locks import prepare_extensions
from layercheck.commands.store import open_both
from layercheck.coordination.facts import StoreFacts
from layercheck.errors import LayerCheckError
from layercheck.memory import folders
from layercheck.report.tables import read_parts

CONFIG = "tiny"
NUM_LOSSES = 10
"""Fewer steps than any run makes after its last kill: rows of a life that was killed may be missing."""
_STEP_LIMIT_S = 15.0
_LOOK_S = 0.02
_COMMON: dict[str, Any] = {
    "cluster.max_failures": -1,
    "cluster.health_check_s": 0.2,
    "logging.tensorboard": False,
}
Say = Callable[[str], None]


def outcome_of(folder: Path, spec: KilledRun, say: Say) -> Outcome:
    """The outcome of a run, which is made unless that was done.

    Args:
        folder: of all runs; that of the model that they fine-tune as well.
        spec: what is asked for.
        say: told each kill.

    Raises:
        LayerCheckError: it ended by itself, or something took longer than its limit.
    """
    place = folder.absolute() / spec.name
    known = folder / f"{spec.name}.json"
    if known.exists():
        found = Outcome.model_validate_json(known.read_text())
        if found.run == spec:
            return found
    shutil.rmtree(place, ignore_errors=True)
    try:
        outcome = _run(place, spec, say)
    finally:
        folders.sweep(run=_key(place, spec))
    known.write_text(outcome.model_dump_json(indent=1) + "\n")
    shutil.rmtree(place)
    return outcome


def settings_of(spec: KilledRun, log: Path) -> tuple[str, ...]:
    """The `--set` items of a run."""
    chosen = {
        **_COMMON,
        "train.steps": spec.steps,
        "faults.step_log": log,
        **{f"checkpoint.settings.{path}": value for path, value in _flat(spec.checkpoint)},
    }
    return tuple(f"{path}={json.dumps(value, default=str)}" for path, value in chosen.items())


def _run(folder: Path, spec: KilledRun, say: Say) -> Outcome:
    log, draw = folder / "steps", random.Random(spec.seed)
    prepare_extensions(folder / "storage" / spec.name)
    config = CONFIG if spec.tuning is None else prepared(folder, spec.tuning)
    with Place(folder, spec.name, config, settings_of(spec, log), spec.what, spec.seed) as place:
        killed_at = [_kill(place, log, step, draw.uniform(*spec.moment), say) for step in spec.kills]
        wait_for_end(place.run, LIMIT_S + _STEP_LIMIT_S * spec.steps)
    steps = [step for life in read_lives(log) for step in life]
    store = folder / "storage" / spec.name
    facts = open_both(str(store)).facts()
    receipts = [receipt for _, receipt in sorted(facts.receipts.items())]
    if len(receipts) != len(spec.kills):
        raise LayerCheckError(f"run {spec.name}: {len(receipts)} recoveries after {len(spec.kills)} kills")
    return Outcome(
        run=spec,
        layers={layer.name: layer.numel for layer in facts.run.layer_map.trainable},
        recoveries=tuple(Recovered.of(at, one) for at, one in zip(killed_at, receipts, strict=True)),
        losses=_losses(str(store), spec.steps),
        state=_state(facts, spec.steps),
        left=len(glob.glob(f"{folders.PLACE}/layercheck-{_key(folder, spec)}-*")),
        median_step_s=median(step.end_s - step.begin_s for step in steps),
        held_out=None if spec.tuning is None else held_out(folder.parent, store, spec.tuning),
    )


def _kill(place: Place, log: Path, step: int, moment: float, say: Say) -> int:
    """Kills after a step, at a moment of the next; returns the last step. Waits for one of a new life."""
    limit_s = LIMIT_S + _STEP_LIMIT_S * step
    wait_for(place.run, lambda: _newest(log).step >= step - 3, f"step {step - 3}", limit_s)
    place.prepare()
    wait_for(place.run, lambda: _newest(log).step >= step, f"step {step}", limit_s, _LOOK_S)
    took_s = median(one.end_s - one.begin_s for one in read_lives(log)[-1][1:] or read_lives(log)[-1])
    time.sleep(max(0.0, _newest(log).end_s + moment * took_s - time.monotonic()))
    lives = len(read_lives(log))
    place.kill()
    last = _newest(log).step
    say(f"{place.run.name}: killed after step {last}")
    wait_for(place.run, lambda: len(read_lives(log)) > lives, "a step after the kill")
    return last


def _newest(log: Path) -> LoggedStep:
    """The newest step of the newest life; step 0 before the first."""
    lives = read_lives(log)
    return lives[-1][-1] if lives else LoggedStep(0, 0.0, 0.0)


# ------------------------------------------------------------------ what it left


def _losses(store: str, steps: int) -> tuple[float, ...]:
    """Of the last steps; a step that was run again counts as it was run last."""
    table = read_parts(open_both(store).run, "metrics", ("step", "loss"), [], [])
    by_step = dict(zip(table["step"].tolist(), table["loss"].tolist(), strict=True))
    return tuple(by_step[step] for step in range(steps - NUM_LOSSES + 1, steps + 1))


def _state(facts: StoreFacts, step: int) -> dict[str, str]:
    """What the full event at the end holds, which the app takes when all steps are done."""
    commits = [commit for commit in facts.commits if commit.event.step == step]
    full = [row for commit in commits for row in commit.records if row.reason == "full"]
    return {f"{row.layer}/{row.rank}": row.xxh3_128 for row in full}


def _flat(section: Mapping[str, Any], above: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in section.items():
        path = f"{above}{name}"
        found += _flat(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return found


def _key(folder: Path, spec: KilledRun) -> str:
    return folders.run_key(spec.name, normal_storage(str(folder / "storage")))
