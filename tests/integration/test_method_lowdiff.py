"""LowDiff: replay is the live run bit for bit, wherever the base lies and whatever was lost or skipped."""

import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.baselines.lowdiff.method import LowDiff
from app.baselines.session import BaselineSession
from app.baselines.settings import LowDiffSettings
from tests import micro
from tests.fakes import flip_bit
from tests.harness import RankFailedError, run_ranks
from tests.integration.methods import open_method, state_of, train

Case = tuple[dict[str, Any], dict[str, Any]]
"""Settings of the method, and how the model is built."""

BUILD = {"accumulation": 3, "sub_group_size": 300}
OVERFLOW = 4
STEPS = 7


def make(zero3: Any, committer: Any, **settings: Any) -> LowDiff:
    return LowDiff(zero3, committer, LowDiffSettings(**settings), wait_s=60)


def assert_same(left: dict[str, Any], right: dict[str, Any], where: str = "") -> None:
    assert left.keys() == right.keys(), where
    for name, value in left.items():
        np.testing.assert_equal(right[name], value, err_msg=f"{where}: {name}")


# ---------------------------------------------------------------- every step of a run, replayed


def _delay_next_copy(copier: Any, late_s: float = 0.6) -> None:
    """It begins long after the next backward would overwrite the gradient."""
    mark = copier.mark

    def late() -> Any:
        copier.mark = mark
        copier._thread.submit(time.sleep, late_s)
        return mark()

    copier.mark = late


def _replay_every_step(folder: str, settings: dict[str, Any], build: dict[str, Any]) -> dict[str, Any]:
    """Trains with a late copy and an overflow, then replays from the base of step 0 and looks each time."""
    live: dict[int, dict[str, Any]] = {}
    handles: list[Any] = []
    norms = []

    def look(session: BaselineSession, step: int) -> None:
        live[step] = state_of(session._zero3)
        norms.append(float(session._zero3.grad_norm()))
        if step == 1:
            _delay_next_copy(session.method._copier)
        while handles:
            handles.pop().remove()
        if step + 1 == OVERFLOW:
            weight = next(session._zero3.engine.module.parameters())
            handles.append(weight.register_hook(lambda gradient: gradient * float("inf")))

    made = partial(make, **settings)
    train(folder, made, STEPS, look=look, **build)
    engine = micro.build(seed=9, **build)
    session = open_method(engine, folder, made)
    replayed: list[dict[str, Any]] = []
    gradients = session.method._gradients
    replay = gradients.replay

    def replay_and_look(partitions: Any, consumed: Any) -> None:
        replay(partitions, consumed)
        replayed.append(state_of(session._zero3))

    gradients.replay = replay_and_look
    point = session.resume()
    session.close("failed")
    base = point.step - 1 - session.method._replayed.steps
    updates = [step for step in live if step != OVERFLOW and step > base]
    for step, state in zip(updates, replayed, strict=True):
        assert_same(live[step], state, f"step {step}")
    assert_same(live[STEPS], state_of(session._zero3), "the end")
    assert session._zero3.stale_parameter() is None
    assert max(norms) > 1, "nothing was ever clipped"
    return {"first": point.step, "state": point.trainer_state, "skipped": session._zero3.skipped}


CASES: list[Case] = [
    ({"mode": "dense", "base_every": 100}, {}),
    ({"mode": "topk", "base_every": 100, "batch": 3}, {}),
    ({"mode": "dense", "base_every": 100}, {"dtype": "fp32"}),
]
SLOW_CASES: list[Case] = [
    ({"mode": "topk", "base_every": 100}, {"dtype": "fp32"}),
    ({"mode": "topk", "base_every": 5, "rho": 0.2}, {"accumulation": 1, "sub_group_size": 10**9}),
]


def _replay_all(folder: str, cases: list[Case]) -> list[dict[str, Any]]:
    return [
        _replay_every_step(f"{folder}/{number}", settings, {**BUILD, **build})
        for number, (settings, build) in enumerate(cases)
    ]


@pytest.mark.parametrize("cases", [CASES, pytest.param(SLOW_CASES, marks=pytest.mark.slow)])
def test_replay_is_the_live_state_bit_for_bit_at_every_step(tmp_path: Path, cases: list[Case]) -> None:
    for results in run_ranks(2, tmp_path, _replay_all, str(tmp_path), cases):
        for result in results:
            assert result["first"] == STEPS + 1
            assert result["skipped"] == result["state"]["skipped"] == 1


# ---------------------------------------------------------------- killed runs

KILL_AT, TO = 11, 14
KILLED = {"mode": "dense", "batch": 4, "base_every": 6}


def _settle(session: BaselineSession, step: int) -> None:
    """All that was begun is durable, so that the kill finds the same on every machine."""
    session.method._outbox.drain()
    session.method._note_base(session.method._bases.wait())


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both ranks were killed after step 11: bases 0 and 6, batches 1-4 and 5-8, steps 9-11 in memory."""
    tmp = tmp_path_factory.mktemp("killed")
    die = partial(train, kill_at=KILL_AT, look=_settle)
    assert run_ranks(2, tmp, die, str(tmp / "run"), partial(make, **KILLED), TO) == [None, None]
    return tmp / "run"


def test_a_kill_loses_less_than_a_batch_and_the_run_ends_as_the_uninterrupted_one(
    killed: Path, tmp_path: Path
) -> None:
    folder = str(shutil.copytree(killed, tmp_path / "run"))
    plain, losses = zip(*run_ranks(2, tmp_path, _uninterrupted, str(tmp_path / "plain")), strict=True)
    resumed = run_ranks(2, tmp_path, partial(train, seed=5), folder, partial(make, **KILLED), TO)
    for before, after in zip(plain, resumed, strict=True):
        assert after["first"] == 9
        assert after["costs"]["replayed_differentials"] == 2  # the base of step 6 holds steps 5 and 6
        assert after["losses"] == {step: before["losses"][step] for step in range(9, TO + 1)}
        assert_same(before["state"], after["state"])
    assert plain[0]["losses"] == losses[0], "dense bf16 changes training"


def _uninterrupted(folder: str) -> tuple[dict[str, Any], dict[int, float]]:
    """The same run without a kill, and the losses without any session."""
    engine = micro.build()
    losses = {step: micro.train_step(engine, step) for step in range(1, TO + 1)}
    return train(folder, partial(make, base_every=100), TO), losses


def _first_steps(folders: list[str]) -> list[tuple[int, int, list[str]]]:
    """Where a run in each folder goes on, how many differentials were replayed, and what batches remain."""
    found = []
    for folder in folders:
        session = open_method(micro.build(seed=3), folder, partial(make, **KILLED))
        point = session.resume()
        session.close("failed")
        left = sorted(path.name for path in Path(folder, "m/diffs").iterdir())
        found.append((point.step, session.method._replayed.steps, left))
    return found


@pytest.mark.slow
def test_a_damaged_batch_or_base_costs_the_steps_that_hang_on_it_on_all_ranks(
    killed: Path, tmp_path: Path
) -> None:
    folders = [shutil.copytree(killed, tmp_path / name) for name in ("missing", "flipped", "base", "both")]
    missing, flipped, base, both = folders
    newest = "m/diffs/steps-00000005-00000008/rank-00001.diff"
    Path(missing, newest).unlink()
    flip_bit(Path(flipped, newest), 8 * 4000)
    flip_bit(Path(base, "m/step-00000006/rank-00000.safetensors"), 8 * 5000)
    flip_bit(Path(both, "m/step-00000006/rank-00000.safetensors"), 8 * 5000)
    Path(both, newest).unlink()
    first, second = "steps-00000001-00000004", "steps-00000005-00000008"
    expected = [(7, 0, [first]), (7, 0, [first]), (9, 8, [first, second]), (5, 4, [first])]
    for found in run_ranks(2, tmp_path, _first_steps, [str(folder) for folder in folders]):
        assert found == expected


def test_another_number_of_ranks_is_one_clear_error(killed: Path, tmp_path: Path) -> None:
    folder = str(shutil.copytree(killed, tmp_path / "run"))
    with pytest.raises(
        RankFailedError, match=r"saved by 2 ranks and cannot be read by 1; set cluster\.workers=2"
    ):
        run_ranks(1, tmp_path, train, folder, partial(make, **KILLED), TO)


@pytest.mark.slow
def test_bases_and_differentials_that_nothing_needs_are_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    settings = partial(make, batch=2, base_every=3)
    results = run_ranks(2, tmp_path, partial(train, look=_settle), str(folder), settings, 10)
    names = sorted(path.name for path in (folder / "m").glob("step-*"))
    assert names == ["step-00000006", "step-00000009"]
    spans = sorted(path.name for path in (folder / "m/diffs").iterdir())
    assert spans == ["steps-00000007-00000008", "steps-00000009-00000010"]
    for result in results:
        costs = result["costs"]
        files = [path for path in folder.rglob("rank-*") if path.is_file()]
        assert (costs["diff_events"], costs["base_events"]) == (5, 4)
        assert costs["bytes"] == costs["diff_bytes"] + costs["base_bytes"]
        on_disk = sum(path.stat().st_size for path in files if path.suffix == ".diff")
        assert costs["diff_bytes"] * 2 / 5 == pytest.approx(on_disk, rel=0.02)


def _rhythm(folder: str) -> tuple[float, float]:
    auto = partial(make, batch="auto", base_every="auto", mtbf_h=0.01, profile_steps=5)
    costs = train(folder, auto, 8)["costs"]
    return costs["batch_steps"], costs["base_interval_steps"]


@pytest.mark.slow
def test_the_optimum_is_decided_once_for_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(2, tmp_path, _rhythm, str(tmp_path / "run"))
    assert first == second
    assert 1 <= first[0] <= first[1] < 10**6


# ---------------------------------------------------------------- the app


class _KillAfter:
    def __init__(self, step: int) -> None:
        self._step = step

    def maybe_kill(self, rank: int, step: int) -> None:
        if step == self._step:
            os.kill(os.getpid(), signal.SIGKILL)


def _app(storage: str, method: str, mode: str, kill_after: int = 0) -> tuple[float | None, int]:
    """The app's own loop; the last loss, and how many steps this life ran."""
    import torch.distributed as dist

    from app.config import parse
    from app.train_loop import train as train_app
    from tests.integration.test_app_train import SETTINGS

    baseline = {"lowdiff": {"mode": mode, "batch": 1, "base_every": 3}}
    changed = {
        "run": {"storage": storage},
        "checkpoint": {"method": method, "baseline": baseline},
        "model": SETTINGS["model"] | {"dropout": 0.1},
    }
    result = train_app(
        parse(SETTINGS | changed),
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        submission="one",
        faults=_KillAfter(kill_after),
    )
    return result.final_loss, result.ran


@pytest.mark.slow
def test_the_app_trains_on_under_lowdiff_after_a_kill_as_if_there_had_been_none(tmp_path: Path) -> None:
    losses = {}
    for method, mode in (("none", "dense"), ("lowdiff", "dense"), ("lowdiff", "topk")):
        losses[method, mode], ran = run_ranks(2, tmp_path, _app, str(tmp_path / method / mode), method, mode)[
            0
        ]
        assert ran == 8
    assert losses["lowdiff", "dense"] == losses["none", "dense"]
    assert losses["lowdiff", "topk"] != losses["none", "dense"]
    for mode in ("dense", "topk"):
        storage = str(tmp_path / "killed" / mode)
        assert run_ranks(2, tmp_path, _app, storage, "lowdiff", mode, 6) == [None, None]
        for loss, ran in run_ranks(2, tmp_path, _app, storage, "lowdiff", mode):
            assert ran < 8, "nothing was recovered"
            assert loss == losses["lowdiff", mode]
