"""State written at one world size and recovered at others, bit for bit, padding never read."""

import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests import flat, micro
from tests.harness import run_ranks
from tests.integration.ranks import open_session, train

HIDDEN = 30
SETTINGS = {"embedding_factor": 20, "s_max": 30, "warmup_steps": 4, "warmup_full_every": 2}
"""The embedding keeps its version while the blocks are written every few steps."""
KILLED, KILLED_AGAIN = 11, 17


def _note(folder: str, session: Any, step: int) -> None:
    """After each step: all padding becomes NaN, and what DeepSpeed holds is noted."""
    zero3 = session._zero3
    flat.poison_padding(zero3.engine, zero3.rank)
    name = f"a{session._open.number}-s{step}-r{zero3.rank}.npz"
    np.savez(Path(folder, name), **flat.parts_of(zero3.engine))


def _recover(storage: str, save: bool = False) -> dict[str, Any]:
    engine = micro.build(99, hidden=HIDDEN)
    session = open_session(engine, storage, **SETTINGS)
    receipt = session.resume().receipt.model_dump()
    parts = flat.parts_of(engine)
    if save:
        session.save_now()
    session.close("failed")
    return {"receipt": receipt, "parts": parts}


def _noted(folder: Path, step: int, attempt: int) -> list[flat.Parts]:
    files = sorted(folder.glob(f"a{attempt}-s{step}-r*.npz"))
    return [dict(np.load(file)) for file in files]


def _layers(storage: Path) -> dict[str, list[str]]:
    run = json.loads((storage / "run/layercheck/run.json").read_text())
    return {layer["name"]: [spec["name"] for spec in layer["params"]] for layer in run["layer_map"]["layers"]}


def _assert_is_the_composite(storage: Path, notes: Path, results: list[dict[str, Any]]) -> None:
    """Every layer of every rank is what its version's step left in memory, at whatever world size."""
    live = [result["parts"] for result in results]
    layers = _layers(storage)
    for layer in results[0]["receipt"]["layers"]:
        then = _noted(notes, layer["step"], layer["attempt"])
        for name in layers[layer["name"]]:
            for key in ("fp32", "exp_avg", "exp_avg_sq"):
                now = flat.whole(live, f"{name}/{key}")
                np.testing.assert_array_equal(now, flat.whole(then, f"{name}/{key}"), err_msg=f"{name}/{key}")
            assert {float(parts[f"{name}/step"]) for parts in live} == {float(layer["step"])}


def _note_and_wait(folder: str, storage: str, session: Any, step: int) -> None:
    """No rank goes into its death before something of its attempt is committed."""
    _note(folder, session, step)
    events = Path(storage, "run/layercheck/events")
    deadline = time.monotonic() + 60
    while step == KILLED_AGAIN and not any(events.glob(f"*.a{session._open.number:03d}/commit.parquet")):
        assert time.monotonic() < deadline, "nothing was committed"
        time.sleep(0.05)


def _killed(tmp: Path) -> tuple[Path, Path]:
    """Two ranks, killed after step 11, of which all is saved; every step noted."""
    storage, notes = tmp / "store", tmp / "notes"
    notes.mkdir()
    _run(2, tmp, storage, partial(_note, str(notes)), kill_at=KILLED, save_at=KILLED)
    return storage, notes


def _run(world_size: int, tmp: Path, storage: Path, note: Callable[[Any, int], None], **ends: int) -> None:
    job = partial(train, each_step=note, settings=SETTINGS, hidden=HIDDEN, **ends)
    assert run_ranks(world_size, tmp, job, str(storage), 99) == [None] * world_size


def _world_sizes(storage: Path, receipt: dict[str, Any]) -> set[int]:
    sizes = set()
    for layer in receipt["layers"]:
        event = f"run/layercheck/events/step-{layer['step']:08d}.a{layer['attempt']:03d}/commit.parquet"
        sizes |= {row["world_size"] for row in pq.read_table(storage / event).to_pylist()}
    return sizes


def test_a_composite_of_two_world_sizes_is_recovered_at_either(tmp_path: Path) -> None:
    storage, notes = _killed(tmp_path)
    note = partial(_note_and_wait, str(notes), str(storage))
    _run(3, tmp_path, storage, note, kill_at=KILLED_AGAIN)
    padded = [
        np.isnan(parts[key]).sum()
        for parts in _noted(notes, KILLED_AGAIN, 2)
        for key in flat.tensor_keys(parts)
    ]
    assert sum(padded) > 0, "there is padding at 3 ranks and it is loud"
    results = run_ranks(2, tmp_path, _recover, str(storage))
    receipt = results[0]["receipt"]
    attempts = {layer["name"]: layer["attempt"] for layer in receipt["layers"]}
    assert set(attempts.values()) == {1, 2}, f"a full event between, or nothing saved after: {attempts}"
    assert _world_sizes(storage, receipt) == {2, 3}
    _assert_is_the_composite(storage, notes, results)


@pytest.mark.slow
def test_state_of_two_ranks_is_recovered_on_one_three_and_four_and_back(tmp_path: Path) -> None:
    killed, notes = _killed(tmp_path)
    for world_size in (1, 3, 4):
        storage = tmp_path / f"on-{world_size}"
        shutil.copytree(killed, storage)
        there = run_ranks(world_size, tmp_path, partial(_recover, save=True), str(storage))
        _assert_is_the_composite(storage, notes, there)
        back = run_ranks(2, tmp_path, _recover, str(storage))
        assert {layer["attempt"] for layer in back[0]["receipt"]["layers"]} == {2}
        for key in flat.tensor_keys(there[0]["parts"]):
            now = flat.whole([result["parts"] for result in back], key)
            np.testing.assert_array_equal(now, flat.whole([result["parts"] for result in there], key), key)
