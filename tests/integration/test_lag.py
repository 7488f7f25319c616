"""As on an accelerator: decisions one step later, copies as late as is allowed (see `late.py`)."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from tests import micro
from tests.harness import RankFailedError, run_ranks
from tests.integration.ranks import (
    CONFIG,
    assert_live_bytes,
    note_state,
    open_session,
    shards,
    train,
    train_without_session,
)

STEPS, SAVED_AT, KILLED_AT = 32, 13, 22


def _train_and_keep(storage: str, shadow: str) -> dict[str, Any]:
    """Trains without a session, then late; `shadow` gets a copy of the live state of every step."""
    off = train_without_session(STEPS)
    held_back = []

    def keep(session: Any, step: int) -> None:
        note_state(shadow, session, step)
        held_back.append(session._overlap.copier.held_back)

    result = train(storage, STEPS, each_step=keep, late=True)
    return result | {"held_back": held_back[-1], "off": off}


@pytest.fixture(scope="module")
def late_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A whole run with a lag: its folder, with the live states in `shadow`, and the results of its ranks."""
    tmp = tmp_path_factory.mktemp("late")
    (tmp / "shadow").mkdir()
    return tmp, run_ranks(2, tmp, _train_and_keep, str(tmp / "store"), str(tmp / "shadow"))


def test_i14_i1_with_a_lag_losses_are_those_without_a_session_and_ages_stay_bounded(
    late_run: Any,
) -> None:
    for result in late_run[1]:
        assert result["losses"] == result["off"]
        reports = [result["reports"][step] for step in range(CONFIG["warmup_steps"] + 1, STEPS + 1)]
        assert sum(report.layers_written for report in reports) > 5
        assert max(report.max_age for report in reports) <= CONFIG["s_max"]
        assert not any(report.alerts for report in reports)


def test_i4_a_version_holds_the_bytes_of_its_step_although_its_copy_is_made_at_the_next_one(
    late_run: Any,
) -> None:
    folder, results = late_run
    assert all(result["held_back"] >= 3 for result in results), "no copy was late"
    assert assert_live_bytes(folder / "store", folder / "shadow") > 100


def test_i3_with_a_lag_all_ranks_choose_the_same_layers(late_run: Any) -> None:
    chosen: dict[int, list[set[str]]] = {}
    for step, _, file in shards(late_run[0] / "store"):
        with safe_open(file, "np") as shard:
            layers = {json.loads(text)["layer"] for name, text in shard.metadata().items() if "." in name}
        chosen.setdefault(step, []).append(layers)
    assert all(len(sets) == 2 and sets[0] == sets[1] for sets in chosen.values())
    assert any(0 < len(sets[0]) < 5 for sets in chosen.values())


def test_with_a_lag_every_step_has_its_rows_and_the_last_step_its_heartbeat(late_run: Any) -> None:
    run = late_run[0] / "store/run"
    drift = pq.read_table(run / "drift").to_pylist()
    layers = {row["layer"] for row in drift}
    assert sorted((row["step"], row["layer"]) for row in drift) == sorted(
        (step, layer) for step in range(1, STEPS + 1) for layer in layers
    )
    assert all(row["delta"] > 0 for row in drift)
    metrics = pq.read_table(run / "metrics").to_pylist()
    assert sum(row["layers_written"] for row in metrics) == sum(row["nbytes"] > 0 for row in drift)
    progress = json.loads((run / "layercheck/attempts/a001.progress.json").read_text())
    assert (progress["step"], progress["trainer_state"]["step"]) == (STEPS, STEPS)


@pytest.mark.slow
def test_i10_with_a_lag_a_recovery_from_save_now_is_exact(tmp_path: Path, late_run: Any) -> None:
    storage = str(tmp_path / "store")
    die = partial(train, kill_at=SAVED_AT, save_at=SAVED_AT, late=True)
    assert run_ranks(2, tmp_path, die, storage, STEPS) == [None, None]
    for result in run_ranks(2, tmp_path, partial(train, seed=99, late=True), storage, KILLED_AT):
        assert result["receipt"]["max_age"] == 0
        exact = range(SAVED_AT + 1, KILLED_AT + 1)
        assert result["losses"] == {step: late_run[1][0]["losses"][step] for step in exact}


@pytest.mark.slow
def test_i1_with_a_lag_a_killed_run_goes_on_from_a_composite(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    die = partial(train, kill_at=KILLED_AT, late=True)
    assert run_ranks(2, tmp_path, die, storage, STEPS) == [None, None]
    for result in run_ranks(2, tmp_path, partial(train, seed=99, late=True), storage, STEPS):
        receipt = result["receipt"]
        assert CONFIG["warmup_steps"] < receipt["t_fail"] <= KILLED_AT
        assert result["first"] == receipt["t_fail"] + 1
        assert len({layer["step"] for layer in receipt["layers"]}) > 1, "a composite of one age shows nothing"
        assert 0 < receipt["max_age"] <= CONFIG["s_max"]
        assert max(report.max_age for report in result["reports"].values()) <= CONFIG["s_max"]


# ------------------------------------------------------------------------------------------ a poisoned state


POISONED_AT = 12


def _poison(storage: str, what: str) -> None:
    """Step 12 is bad and has an event; nothing happens until that is as durable as it will ever be."""
    import torch

    engine = micro.build()
    session = open_session(engine, storage, late=True, selection="full", target_interval=1)
    session.resume()
    zero3 = session._zero3
    for step in range(1, POISONED_AT + 1):
        is_bad = step == POISONED_AT
        if is_bad and what == "moment" and zero3.rank == 1:
            zero3.tensors(zero3.slices["layers.2"][0])["exp_avg"][0] = float("nan")
        loss = micro.train_step(engine, step)
        session.after_step(step, {"loss": float("nan") if is_bad and what == "loss" else loss})
    assert session._open.writer.drain(30)
    torch.distributed.barrier()
    if what == "loss":
        session.close()
    session.after_step(POISONED_AT + 1, {"loss": micro.train_step(engine, POISONED_AT + 1)})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        pytest.param(
            "moment", "step 12: layer layers.2 moved by a non-finite amount", marks=pytest.mark.slow
        ),
        ("loss", "step 12: the loss or gradient norm is not finite"),
    ],
)
def test_i13_with_a_lag_a_non_finite_step_is_never_committed_although_its_event_was_taken(
    tmp_path: Path, what: str, words: str
) -> None:
    storage = str(tmp_path / "store")
    with pytest.raises(RankFailedError, match=f"NonFiniteStateError: {words}"):
        run_ranks(2, tmp_path, _poison, storage, what)
    events = Path(storage, "run/layercheck/events")
    assert (events / f"step-{POISONED_AT:08d}.a001/rank-00001.safetensors").exists(), "no event was taken"
    committed = {path.parent.name[5:13] for path in events.glob("*/commit.parquet")}
    assert f"{POISONED_AT - 1:08d}" in committed
    assert f"{POISONED_AT:08d}" not in committed
    progress = json.loads((events.parent / "attempts/a001.progress.json").read_text())
    assert (progress["step"], progress["ended"]) == (POISONED_AT - 1, "failed")


# ------------------------------------------------------------------------------------------ the meter alone


def _measure_late() -> dict[str, Any]:
    import torch

    from layercheck.config import DriftConfig
    from layercheck.tracking.drift import DriftMeter
    from layercheck.tracking.notices import RankNotices
    from layercheck.zero3 import Zero3Engine

    engine = micro.build()
    zero3 = Zero3Engine(engine)
    meters = [DriftMeter(zero3, DriftConfig(), lag) for lag in (0, 1)]
    now, late = [], []
    for step in range(1, 5):
        micro.train_step(engine, step)
        norm = torch.tensor(float("nan") if step == 3 and zero3.rank == 1 else 1.0)
        for meter, reports in zip(meters, (now, late), strict=True):
            reports.append(meter.exchange(step, RankNotices(grad_norm=norm)))
    late.append(meters[1].drain())
    return {"now": now, "late": late, "left": meters[1].newest_pending}


def test_with_a_lag_the_same_reports_come_one_step_later(tmp_path: Path) -> None:
    for result in run_ranks(2, tmp_path, _measure_late):
        assert [len(reports) for reports in result["now"]] == [1, 1, 1, 1]
        assert [len(reports) for reports in result["late"]] == [0, 1, 1, 1, 1]
        assert result["late"][1:] == result["now"]
        assert [report.errors for (report,) in result["now"]] == [0, 0, 1, 0]
        assert result["left"] is None
