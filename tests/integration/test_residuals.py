"""Residuals end to end: two ranks die, and weights come back as version plus residual, bit by bit."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

from layercheck.coordination import journal
from layercheck.coordination.facts import saves_of
from layercheck.persistence.quantise import Code, dequantise, quantise
from layercheck.persistence.storage import open_storage
from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, KILL_AT, STEPS, note_state, open_session, train

ON = {"enabled": True, "k_ratio": 0.2, "exclude": ["norm"]}
COMMITTED_S = 0.2
"""Pause after each step: a layer that has anything in flight gets no residual."""
SETTINGS: dict[str, Any] = {"residual": ON, "target_interval": 12, "s_max": 30, "max_event_share": 0.5}


def _train_and_die(storage: str, shadow: str, settings: dict[str, Any], late: bool = False) -> None:
    def each_step(session: Any, step: int) -> None:
        note_state(shadow, session, step)
        time.sleep(COMMITTED_S)

    train(storage, STEPS, kill_at=KILL_AT, settings=settings, late=late, each_step=each_step)


def _resume(storage: str, settings: dict[str, Any], until: int = 0) -> dict[str, Any]:
    """The receipt, and this rank's state at the resume; then some steps more."""
    engine = micro.build(99)
    session = open_session(engine, storage, **settings)
    point = session.resume()
    zero3 = session._zero3
    state = {
        f"{part.spec.name}/{key}": (part.layer, part.offset, tensor.clone().numpy())
        for parts in zero3.slices.values()
        for part in parts
        for key, tensor in zero3.tensors(part).items()
    }
    for step in range(point.step, until + 1):
        session.after_step(step, {"loss": micro.train_step(engine, step)})
        time.sleep(COMMITTED_S)
    copies = session._bases._copies if session._bases is not None else {}
    kept = sum(copy.nbytes for of_layer in copies.values() for copy in of_layer.values())
    session.close("failed")
    return {"receipt": point.receipt.model_dump(), "state": state, "kept": kept}


def _shadows(shadow: Path, step: int, name: str, ranks: int = 2) -> list[np.ndarray]:
    return [np.load(shadow / f"{step}-{rank}.npz")[name] for rank in range(ranks)]


def _assert_restored(results: list[dict[str, Any]], shadow: Path, code: Code) -> int:
    """Weights: the true ones at the version + the quantised true distance at the residual; older moments."""
    planned = {layer["name"]: layer for layer in results[0]["receipt"]["layers"]}
    added = 0
    for name in results[0]["state"]:
        layer = planned[results[0]["state"][name][0]]
        live = np.concatenate([result["state"][name][2] for result in results])
        parts = _shadows(shadow, layer["step"], name)
        if name.endswith("/fp32") and layer["residual"] is not None:
            added += 1
            newer = _shadows(shadow, layer["residual"], name)
            for index, (old, new) in enumerate(zip(parts, newer, strict=True)):
                parts[index] = old + dequantise(*quantise(new - old, code), old.size, code)
            distance = np.abs(np.concatenate(newer) - live).max()
            assert distance < 0.02 * np.abs(np.concatenate(newer)).max(), "and it is near the newer weights"
        np.testing.assert_array_equal(live, np.concatenate(parts), err_msg=name)
    return added


def _assert_bounded(results: list[dict[str, Any]], shadow: Path) -> None:
    """`lost_drift` is no less than what the layer moved between its newest save and the failure.

    It is None where the journal does not reach beyond that save: at most for the steps of the last second.
    """
    receipt = results[0]["receipt"]
    assert receipt["measure"] == "mean_abs"
    known = [layer for layer in receipt["layers"] if layer["lost_drift"] is not None]
    assert all(layer["lost"] * COMMITTED_S <= 2 for layer in receipt["layers"] if layer not in known)
    assert len(known) >= 2
    for layer in known:
        names = [
            n for n, (of, *_) in results[0]["state"].items() if n.endswith("/fp32") and of == layer["name"]
        ]
        saved = layer["step"] if layer["residual"] is None else layer["residual"]
        pairs = [
            pair
            for name in names
            for pair in zip(
                _shadows(shadow, saved, name), _shadows(shadow, receipt["t_fail"], name), strict=True
            )
        ]
        moved = sum(float(np.abs(new.astype(float) - old).sum()) for old, new in pairs)
        assert moved / sum(old.size for old, _ in pairs) <= 1.0001 * layer["lost_drift"]
        assert (layer["lost_drift"] == 0) == (layer["lost"] == 0)


def _assert_residuals_help(results: list[dict[str, Any]]) -> None:
    receipt = results[0]["receipt"]
    assert receipt["mode"] == "composite"
    with_residual = [layer for layer in receipt["layers"] if layer["residual"] is not None]
    assert len(with_residual) >= 3
    assert all(layer["lost"] < layer["age"] and layer["name"] != "norm" for layer in with_residual)
    assert receipt["lost_steps"] < receipt["weighted_age"]


def _residual_files(storage: str) -> list[Path]:
    store = open_storage(storage, "run")
    facts = journal.load_facts(store)
    saves = [save for commit in facts.commits for save in saves_of(commit) if save.base is not None]
    newest = {save.layer: save for save in saves}
    return [Path(storage, "run/layercheck", save.shards[1].file) for save in newest.values()]


def test_weights_come_back_as_version_plus_residual_and_torn_ones_cost_themselves(tmp_path: Path) -> None:
    """First at another world size, so that nothing is shown of who wrote them; then with torn files."""
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _train_and_die, storage, str(shadow), SETTINGS) == [None, None]
    results = run_ranks(3, tmp_path, _resume, storage, SETTINGS)
    _assert_residuals_help(results)
    _assert_bounded(results, shadow)
    assert _assert_restored(results, shadow, Code(8, 64)) >= 3
    for path in set(_residual_files(storage)):
        with safe_open(path, "pt") as shard:
            kinds = {str(shard.get_tensor(name).dtype) for name in shard.keys()}  # noqa: SIM118 (not a dict)
        assert kinds >= {"torch.int8", "torch.bfloat16"}
        path.write_bytes(path.read_bytes()[:-1])
    results = run_ranks(2, tmp_path, _resume, storage, SETTINGS)
    receipt = results[0]["receipt"]
    names = {layer["name"] for layer in receipt["layers"] if layer["fallback"]}
    assert len(names) >= 3
    assert {bad["layer"] for bad in receipt["bad"]} >= names
    _assert_restored(results, shadow, Code(8, 64))


@pytest.mark.slow
@pytest.mark.parametrize(("bits", "late"), [(8, False), (4, True)])
def test_an_attempt_adds_to_the_versions_that_it_recovered(tmp_path: Path, bits: int, late: bool) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    settings = SETTINGS | {"residual": ON | {"bits": bits}}
    shadow.mkdir()
    assert run_ranks(2, tmp_path, _train_and_die, storage, str(shadow), settings, late) == [None, None]
    results = run_ranks(2, tmp_path, _resume, storage, settings, KILL_AT + 4)
    _assert_residuals_help(results)
    assert _assert_restored(results, shadow, Code(bits, 64)) >= 3
    numel = sum(state[2].size for name, state in results[0]["state"].items() if name.endswith("/fp32"))
    norm = results[0]["state"]["model.norm.weight/fp32"][2].size
    assert results[0]["kept"] == 4 * (numel - norm), "an excluded layer takes no memory"
    again = run_ranks(2, tmp_path, _resume, storage, settings)
    later = [layer["residual"] for layer in again[0]["receipt"]["layers"] if layer["residual"]]
    assert max(later) > KILL_AT
    of_both = [layer for layer in again[0]["receipt"]["layers"] if (layer["residual"] or 0) > KILL_AT]
    assert min(layer["attempt"] for layer in of_both) == 1, "the version is of the attempt before"


def test_off_is_the_default_and_then_nothing_of_it_is_in_the_store(killed_once: Path) -> None:
    assert "residual" not in CONFIG
    facts = journal.load_facts(open_storage(str(killed_once), "run"))
    assert not any(commit.bases for commit in facts.commits)
    for path in killed_once.glob("run/layercheck/events/*/*"):
        assert b"residual" not in path.read_bytes(), path
