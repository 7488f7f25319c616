"""The memory tier end to end without Ray: two ranks die, and what they sealed comes back from memory."""

import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layercheck.coordination import journal
from layercheck.coordination.status import summarize
from layercheck.manifest import MEMORY_PART, EventId
from layercheck.memory import folders, segment
from layercheck.memory.held import Held
from layercheck.persistence.storage import open_storage
from tests import micro
from tests.fakes import flip_bit
from tests.harness import run_ranks
from tests.integration.ranks import KILL_AT, STEPS, note_state, open_session, train, train_without_session

EVERY = {"memory": {"enabled": True, "k_ratio": 0}}
RARELY = {"memory": {"enabled": True, "k_ratio": 0.3}}


def shm() -> list[str]:
    return sorted(glob.glob(f"{folders.PLACE}/layercheck-*"))


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test did, the machine's memory is as it was: those that end a run say so themselves."""
    before = shm()
    yield
    left = [folder for folder in shm() if folder not in before]
    for key in {Path(folder).name.split("-")[1] for folder in left}:
        folders.sweep(run=key)
    assert [folder for folder in shm() if folder not in before] == []


def _die(storage: str, shadow: str, settings: dict[str, Any], kill_at: int = KILL_AT) -> None:
    """Trains, notes every state, and is killed once the newest step is in memory."""

    def each(session: Any, step: int) -> None:
        note_state(shadow, session, step)
        if step == kill_at:
            session._open.writer.drain(30)

    train(storage, STEPS, kill_at=kill_at, settings=settings, each_step=each)


def _die_at_once(storage: str, shadow: str, settings: dict[str, Any]) -> None:
    train(
        storage,
        STEPS,
        kill_at=KILL_AT,
        settings=settings,
        each_step=lambda session, step: note_state(shadow, session, step),
    )


def _resume(storage: str, settings: dict[str, Any], until: int = 0, how: str = "failed") -> dict[str, Any]:
    """The receipt, this rank's state and RSS at the resume; then some steps more."""
    engine = micro.build(99)
    session = open_session(engine, storage, **settings)
    point = session.resume()
    zero3 = session._zero3
    state = {
        f"{part.spec.name}/{key}": (part.layer, tensor.clone().numpy())
        for parts in zero3.slices.values()
        for part in parts
        for key, tensor in zero3.tensors(part).items()
    }
    losses = {}
    for step in range(point.step, until + 1):
        losses[step] = micro.train_step(engine, step)
        session.after_step(step, {"loss": losses[step]})
    session.close(how)
    return {"receipt": point.receipt.model_dump(), "state": state, "losses": losses, "first": point.step}


def _assert_true(results: list[dict[str, Any]], shadow: Path, ranks: int = 2) -> None:
    """Every byte is that of the step that the receipt names."""
    steps = {layer["name"]: layer["step"] for layer in results[0]["receipt"]["layers"]}
    for name, (layer, _) in results[0]["state"].items():
        live = np.concatenate([result["state"][name][1] for result in results])
        true = np.concatenate([np.load(shadow / f"{steps[layer]}-{r}.npz")[name] for r in range(ranks)])
        np.testing.assert_array_equal(live, true, err_msg=name)


def _sources(results: list[dict[str, Any]]) -> set[str]:
    return {layer["source"] for layer in results[0]["receipt"]["layers"]}


def test_i10_after_a_kill_all_comes_from_memory_at_age_0_and_in_the_end_nothing_is_left(
    tmp_path: Path,
) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    before = shm()
    assert run_ranks(2, tmp_path, _die, storage, str(shadow), EVERY) == [None, None]
    assert len(shm()) == len(before) + 2
    results = run_ranks(2, tmp_path, _resume, storage, EVERY, KILL_AT + 2, "completed")
    receipt = results[0]["receipt"]
    assert (receipt["t_fail"], receipt["max_age"], receipt["lost_steps"]) == (KILL_AT, 0, 0.0)
    assert (receipt["mode"], results[0]["first"]) == ("composite", KILL_AT + 1)
    assert _sources(results) == {"memory"}
    _assert_true(results, shadow)
    assert shm() == before


@pytest.mark.slow
def test_i10_after_three_kills_the_run_is_bit_identical_to_one_without(tmp_path: Path) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    reference = run_ranks(2, tmp_path, train_without_session, STEPS)[0]
    for kill_at in (13, 20, KILL_AT):
        assert run_ranks(2, tmp_path, _die, storage, str(shadow), EVERY, kill_at) == [None, None]
    results = run_ranks(2, tmp_path, _resume, storage, EVERY, STEPS, "completed")
    assert results[0]["receipt"]["max_age"] == 0
    assert results[0]["losses"] == {s: loss for s, loss in reference.items() if s > KILL_AT}


@pytest.mark.slow
def test_i15_a_kill_at_any_moment_costs_at_most_a_step_and_events_in_flight_are_committed(
    tmp_path: Path,
) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _die_at_once, storage, str(shadow), EVERY) == [None, None]
    sealed = [held.event for held in _held() if not held.event.in_memory]
    by_both = [event for event in sealed if sealed.count(event) == 2]
    results = run_ranks(2, tmp_path, _resume, storage, EVERY)
    receipt = results[0]["receipt"]
    assert receipt["t_fail"] in (KILL_AT - 1, KILL_AT)
    assert receipt["max_age"] <= 1
    _assert_true(results, shadow)
    committed = [commit.event for commit in journal.load_commits(open_storage(storage, "run"))[0]]
    assert max(event.step for event in committed) >= max(event.step for event in by_both)
    assert not any(event.in_memory for event in committed)


@pytest.mark.slow
def test_at_a_threshold_layers_come_from_the_newest_of_memory_and_storage(tmp_path: Path) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _die, storage, str(shadow), RARELY) == [None, None]
    results = run_ranks(2, tmp_path, _resume, storage, RARELY)
    _assert_true(results, shadow)
    newest: dict[str, int] = {}
    for commit in journal.load_facts(open_storage(storage, "run")).commits:
        newest |= dict.fromkeys(commit.whole_layers, commit.event.step)
    planned = {layer["name"]: layer["step"] for layer in results[0]["receipt"]["layers"]}
    assert all(planned[name] >= step for name, step in newest.items())
    assert sum(planned[name] > step for name, step in newest.items()) >= 2


def _stop(storage: str, settings: dict[str, Any]) -> None:
    """Trains and fails in good order, so that the journal has the newest word."""
    engine = micro.build()
    session = open_session(engine, storage, **settings)
    session.resume()
    for step in range(1, KILL_AT + 1):
        session.after_step(step, {"loss": micro.train_step(engine, step)})
    session.close("failed")


def test_what_status_says_of_a_dead_worker_is_what_the_next_start_finds(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    run_ranks(2, tmp_path, _stop, storage, RARELY)
    value = summarize(journal.load_facts(open_storage(storage, "run")))
    said = {row["name"]: row["if_dies"]["worker"] for row in value["layers"]}
    assert any(row["tier"] == "memory" for row in said.values())
    assert value["if_dies"]["worker"]["lost_steps"] < value["if_dies"]["cluster"]["lost_steps"]
    receipt = run_ranks(2, tmp_path, _resume, storage, RARELY)[0]["receipt"]
    for layer in receipt["layers"]:
        # Copies of the last step are on their way when it is told: a recovery may find more, never less.
        assert layer["step"] >= said[layer["name"]]["step"]
        assert layer["lost"] <= said[layer["name"]]["lost"]
    assert receipt["lost_steps"] <= value["if_dies"]["worker"]["lost_steps"]


def _held() -> list[Held]:
    """What lies sealed in the memory of this machine."""
    paths = [os.path.join(folder, name) for folder in shm() for name in folders.segments(folder)]
    return [held for path in paths if (held := segment.read_held(path)) is not None]


def _flip_newest() -> int:
    """One byte of one rank's newest segment that is for memory alone; returns its step."""
    held = max((h for h in _held() if h.event.in_memory and h.rank == 1), key=lambda h: h.order)
    name = folders.segment_name(held.event, held.rank)
    (path,) = (Path(folder, name) for folder in shm() if Path(folder, name).exists())
    flip_bit(path, 8 * (segment.DATA_AT + held.records[0].begin + 1))
    return held.event.step


@pytest.mark.slow
def test_i6_a_bad_byte_in_memory_costs_that_layer_an_older_copy_and_is_said(tmp_path: Path) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _die, storage, str(shadow), EVERY) == [None, None]
    step = _flip_newest()
    results = run_ranks(2, tmp_path, _resume, storage, EVERY)
    receipt = results[0]["receipt"]
    assert step == KILL_AT
    assert {bad["file"] for bad in receipt["bad"]} == {
        EventId(step=step, attempt=1, part=MEMORY_PART).shard_file(1)
    }
    assert (receipt["t_fail"], results[0]["first"]) == (KILL_AT, KILL_AT + 1)
    _assert_true(results, shadow)


@pytest.mark.slow
def test_other_ranks_than_before_read_the_storage_where_memory_is_out_of_reach(tmp_path: Path) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _die, storage, str(shadow), EVERY) == [None, None]
    results = run_ranks(3, tmp_path, _resume, storage, EVERY)
    assert results[0]["receipt"]["t_fail"] == KILL_AT
    _assert_true(results, shadow)


@pytest.mark.slow
def test_residuals_and_memory_live_side_by_side(tmp_path: Path) -> None:
    """After a recovery from memory no residual is taken before the next version; then they go on."""
    both = RARELY | {"residual": {"enabled": True, "k_ratio": 0.2}, "target_interval": 8, "s_max": 30}
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _die, storage, str(shadow), both) == [None, None]
    run_ranks(2, tmp_path, _resume, storage, both, STEPS)
    results = run_ranks(2, tmp_path, _resume, storage, both)
    assert results[0]["receipt"]["t_fail"] == STEPS
    assert results[0]["receipt"]["bad"] == ()


@pytest.mark.slow
def test_off_nothing_is_in_shared_memory_and_no_receipt_speaks_of_it(
    killed_once: Path, tmp_path: Path
) -> None:
    before, storage = shm(), tmp_path / "store"
    shutil.copytree(killed_once, storage)
    results = run_ranks(2, tmp_path, _resume, str(storage), {})
    assert shm() == before
    assert all("source" not in layer for layer in results[0]["receipt"]["layers"])
