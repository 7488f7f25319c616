"""What a recovery says it lost, against what was really lost: the weights before the end and after it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import note_state, open_session, train

LAST = 27


def _train(storage: str, shadow: str, settings: dict[str, Any]) -> None:
    """Ends in order, so that the last step is known to the journal."""
    train(
        storage,
        LAST,
        settings=settings,
        each_step=lambda session, step: note_state(shadow, session, step),
    )


def _resume(storage: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The receipt, and this rank's fp32 weights by (layer, parameter)."""
    engine = micro.build(99)
    session = open_session(engine, storage, **settings)
    point = session.resume()
    weights = {
        (part.layer, part.spec.name): session._zero3.tensors(part)["fp32"].clone().numpy()
        for parts in session._zero3.slices.values()
        for part in parts
    }
    session.close("failed")
    return {"receipt": point.receipt.model_dump(), "weights": weights}


def _moved(shadow: str, step: int, results: list[dict[str, Any]]) -> dict[str, tuple[float, int]]:
    """Layer -> (sum of the distances, elements) between the weights after `step` and those that came back."""
    moved: dict[str, tuple[float, int]] = {}
    for rank, result in enumerate(results):
        state = np.load(f"{shadow}/{step}-{rank}.npz")
        for (layer, name), back in result["weights"].items():
            total, numel = moved.get(layer, (0.0, 0))
            distance = np.abs(state[f"{name}/fp32"].astype(float) - back).sum()
            moved[layer] = total + float(distance), numel + back.size
    return moved


def test_the_receipt_says_the_distance_that_was_lost(tmp_path: Path) -> None:
    shadow, storage, settings = (
        tmp_path / "shadow",
        str(tmp_path / "store"),
        {"drift": {"kind": "displacement"}},
    )
    shadow.mkdir()
    run_ranks(2, tmp_path, _train, storage, str(shadow), settings)
    results = run_ranks(2, tmp_path, _resume, storage, settings)
    receipt = results[0]["receipt"]
    assert (receipt["t_fail"], receipt["measure"]) == (LAST, "displacement mean_abs")
    assert len({layer["lost"] for layer in receipt["layers"]}) >= 3, "equal losses show little"
    moved = _moved(str(shadow), LAST, results)
    for layer in receipt["layers"]:
        total, numel = moved[layer["name"]]
        assert layer["lost_drift"] == pytest.approx(total / numel, rel=1e-4), layer["name"]
        assert (layer["lost_drift"] == 0) == (layer["lost"] == 0)
    whole = sum(total for total, _ in moved.values()) / sum(numel for _, numel in moved.values())
    assert receipt["lost_drift"] == pytest.approx(whole, rel=1e-4)
