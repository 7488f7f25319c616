"""From a run's own folder to a block: `summary.json`, metrics, commits and the step log; no text of a log.

LayerCheck's commits name each version, so its measured steps are counted exactly. Of the others the metrics
say per step what became durable; an event that was begun before the measured steps counts where it ended.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from app.measure.timed_runs import TimedRun
from app.step_log import LoggedStep
from layercheck.errors import LayerCheckError
from simulations.comparison.arms import REFERENCE, Arm
from simulations.comparison.block import Block, LayerInterval, Recovered, Written
from simulations.trace import OF_RHYTHM, Recorded, read_recorded

_LAST = "last"
"""Kind of a baseline's final save."""
_DIFFERENTIAL = {"lowdiff_topk": "lowdiff", "lowdiff_dense": "lowdiff"}
"""Methods that write differentials, and the folder of each."""


def read_block(arm: Arm, number: int, run: TimedRun, t_iter_s: float) -> Block:
    """The block of a completed run.

    Args:
        arm: what was run.
        number: which repeat of it.
        run: it.
        t_iter_s: seconds of a step without saving, to tell what a first step takes longer; of killed runs.

    Raises:
        LayerCheckError: measured steps are missing, or a killed run did not recover exactly once.
    """
    summary = json.loads((run.folder / "summary.json").read_text())
    if arm.kill_step is not None:
        return _killed(arm, number, run, summary, t_iter_s)
    steps = _measured(arm, run)
    times: dict[str, Any] = {
        "step_s": tuple(step.end_s - step.begin_s for step in steps),
        "stall_s": tuple(step.stall_s for step in steps),
        "elapsed_s": steps[-1].end_s - steps[0].begin_s,
    }
    about: dict[str, Any] = {"arm": arm.name, "method": arm.method, "regimes": arm.regimes, "number": number}
    if arm.method == REFERENCE:
        return Block(**about, **times)
    rows = _rows(run.folder, arm)
    about["mean_age"] = sum(row["weighted_age"] for row in rows) / len(rows)
    about["footprint_bytes"] = _nbytes(run.folder / _DIFFERENTIAL.get(arm.method, arm.method))
    if arm.method == "layercheck":
        recorded = read_recorded(str(run.folder))
        layers = _layers(recorded, arm)
        full_bytes = sum(recorded.version_bytes)
        return Block(
            **about, **times, written=_ours(recorded, arm), full_bytes=full_bytes, layers=layers, facts={}
        )
    facts = summary["method_costs"]
    written = _differentials(summary, arm) if arm.method in _DIFFERENTIAL else _full_states(rows, summary)
    return Block(**about, **times, written=written, full_bytes=_full_bytes(arm, facts, summary), facts=facts)


def _measured(arm: Arm, run: TimedRun) -> list[LoggedStep]:
    steps = [step for life in run.lives for step in life if arm.settle < step.step <= arm.steps]
    if [step.step for step in steps] != list(range(arm.settle + 1, arm.steps + 1)):
        raise LayerCheckError(
            f"{arm.name}: the step log has not each of the steps {arm.settle + 1} to {arm.steps} once "
            f"({len(steps)} are there, in {len(run.lives)} worker groups): the run was disturbed"
        )
    return steps


def _rows(folder: Path, arm: Arm) -> list[dict[str, Any]]:
    """Rows of the metrics of the measured steps."""
    columns = ["step", "layers_written", "bytes_written", "weighted_age"]
    parts = [pq.read_table(path, columns=columns) for path in sorted((folder / "metrics").glob("*.parquet"))]
    rows = [row for part in parts for row in part.to_pylist() if arm.settle < row["step"] <= arm.steps]
    if len(rows) != arm.window:
        raise LayerCheckError(f"{arm.name}: {len(rows)} of {arm.window} steps are in the metrics")
    return rows


def _nbytes(folder: Path) -> int:
    return sum(
        os.path.getsize(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names
    )


# ---------------------------------------------------------------- what was written


def _ours(recorded: Recorded, arm: Arm) -> Written:
    chosen = [write for write in recorded.writes if arm.settle < write.event.step <= arm.steps]
    mine = [write for write in chosen if write.reason in OF_RHYTHM]
    aside = [write for write in recorded.writes if write.reason not in OF_RHYTHM]
    return Written(
        steps=arm.window,
        nbytes=sum(write.nbytes for write in mine),
        events=len({write.event for write in mine}),
        layer_writes=len(mine),
        aside_bytes=sum(write.nbytes for write in aside),
        aside_events=len({write.event for write in aside}),
    )


def _layers(recorded: Recorded, arm: Arm) -> tuple[LayerInterval, ...]:
    writes = Counter(
        write.layer
        for write in recorded.writes
        if arm.settle < write.event.step <= arm.steps and write.reason in OF_RHYTHM
    )
    layers = recorded.facts.run.layer_map.trainable
    return tuple(LayerInterval(layer.name, layer.numel, writes[layer.name]) for layer in layers)


def _full_states(rows: list[dict[str, Any]], summary: dict[str, Any]) -> Written:
    """Of a method whose every event holds every layer."""
    layer_writes = sum(row["layers_written"] for row in rows)
    per_event = summary["layer_writes"] // summary["events"] if summary["events"] else 1
    events = layer_writes // per_event
    last = summary["layer_writes_by_reason"].get(_LAST, 0) // per_event
    mean_bytes = summary["bytes_written"] / summary["events"] if summary["events"] else 0.0
    return Written(
        steps=len(rows),
        nbytes=sum(row["bytes_written"] for row in rows),
        events=events,
        layer_writes=layer_writes,
        aside_bytes=round(last * mean_bytes),
        aside_events=last,
    )


def _differentials(summary: dict[str, Any], arm: Arm) -> Written:
    """Of the whole run: its differentials all have the same size, and its bases stand aside."""
    facts = summary["method_costs"]
    return Written(
        steps=arm.steps,
        nbytes=int(facts["diff_bytes"]),
        events=int(facts["diff_events"]),
        # The summary counts commits: those are the bases.
        layer_writes=int(facts["layer_writes"]) - int(summary["layer_writes"]),
        aside_bytes=int(facts["base_bytes"]),
        aside_events=int(facts["base_events"]),
    )


def _full_bytes(arm: Arm, facts: dict[str, float], summary: dict[str, Any]) -> int:
    if arm.method in _DIFFERENTIAL:
        return int(facts["base_bytes"] / facts["base_events"]) if facts["base_events"] else 0
    return int(summary["bytes_written"] / summary["events"]) if summary["events"] else 0


# ---------------------------------------------------------------- what a recovery took


def _killed(arm: Arm, number: int, run: TimedRun, summary: dict[str, Any], t_iter_s: float) -> Block:
    lives = run.lives
    assert arm.kill_step is not None
    # Rank 1 dies after its step; rank 0 may then not have ended it yet.
    if len(lives) != 2 or not arm.kill_step - 1 <= lives[0][-1].step <= arm.kill_step:
        ends = [(life[0].step, life[-1].step) for life in lives]
        raise LayerCheckError(f"{arm.name}: not one kill after step {arm.kill_step}, but lives of {ends}")
    # Where nothing comes back nobody writes a receipt: the log knows when the two lives ended and began.
    recovered = Recovered(0.0, lives[1][0].begin_s - lives[0][-1].end_s, 0.0, 0.0, 0.0, 0.0, 0)
    if arm.method != REFERENCE:
        if len(summary["resumed"]) != 1:
            raise LayerCheckError(f"{arm.name}: {len(summary['resumed'])} recoveries, not one")
        recovered = recovery_of(summary["resumed"][0], t_iter_s)
    steps = lives[0]
    return Block(
        arm=arm.name,
        method=arm.method,
        regimes=(),
        number=number,
        step_s=tuple(step.end_s - step.begin_s for step in steps),
        stall_s=tuple(step.stall_s for step in steps),
        elapsed_s=steps[-1].end_s - steps[0].begin_s,
        facts=summary["method_costs"],
        recovered=recovered,
    )


def recovery_of(resumed: dict[str, Any], t_iter_s: float) -> Recovered:
    """The phases of one entry of `resumed`; `t_iter_s`: of a step of a run that nothing disturbs.

    A roll-back's `replay_s` has the first step in it, and so what that takes longer.
    """
    seconds = {key: float(value or 0.0) for key, value in resumed.items() if key.endswith("_s")}
    replayed = max(0, resumed["t_fail"] + 1 - resumed["resume_step"])
    first_s = max(0.0, seconds["first_step_s"] - t_iter_s)
    return Recovered(
        detect_s=seconds["detect_s"],
        reschedule_s=seconds["reschedule_s"],
        load_s=seconds["plan_s"] + seconds["fetch_s"],
        reconstruct_s=seconds["install_s"],
        replay_s=max(0.0, seconds["replay_s"] - first_s) if replayed else 0.0,
        first_step_s=first_s,
        replayed_steps=replayed,
    )
