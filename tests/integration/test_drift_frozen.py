"""Frozen parts: written once, recovered bit-equal onto a model of other random values (I11)."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import open_session

STEPS = 14


def _frozen_weights(zero3: Any) -> dict[str, Any]:
    return {
        part.spec.name: (part.offset, zero3.tensors(part)["weight"].float().numpy().copy())
        for layer in zero3.layer_map.layers
        if not layer.trainable
        for part in zero3.slices[layer.name]
    }


def _train_and_recover(storage: str, build: dict[str, Any]) -> dict[str, Any]:
    engine = micro.build(**build)
    session = open_session(engine, storage)
    session.resume()
    for step in range(1, STEPS + 1):
        loss = micro.train_step(engine, step)
        session.after_step(step, {"loss": loss})
    session.save_now()
    before = _frozen_weights(session._zero3)
    session.close("failed")
    went_on = [micro.train_step(engine, step) for step in range(STEPS + 1, STEPS + 6)]

    fresh = micro.build(seed=99, **build)
    again = open_session(fresh, storage)
    other = _frozen_weights(again._zero3)
    point = again.resume()
    recovered = []
    for step in range(point.step, STEPS + 6):
        recovered.append(micro.train_step(fresh, step))
        again.after_step(step, {"loss": recovered[-1]})
    after = _frozen_weights(again._zero3)
    again.close()
    return {
        "before": before,
        "other": other,
        "after": after,
        "losses": (went_on, recovered),
        "trainable": [layer.name for layer in session._zero3.layer_map.trainable],
    }


@pytest.mark.parametrize(
    ("build", "frozen"),
    [
        ({"freeze": ("layers.0.", "layers.1.", "embed_tokens")}, {"layers.0", "layers.1", "embed_tokens"}),
        (
            {"train": ("q_proj", "v_proj")},
            {"embed_tokens", "layers.0", "layers.1", "layers.2", "norm"},
        ),
    ],
    ids=["half the layers", "all but two matrices of each layer"],
)
def test_i11_frozen_parts_are_written_once_and_recovered_bit_equal(
    tmp_path: Path, build: dict[str, Any], frozen: set[str]
) -> None:
    storage = str(tmp_path / "store")
    for result in run_ranks(2, tmp_path, _train_and_recover, storage, build):
        went_on, recovered = result["losses"]
        assert went_on == recovered
        assert result["before"].keys() == result["after"].keys() != set()
        differing = 0
        for name, (offset, values) in result["before"].items():
            assert result["after"][name][0] == offset
            assert (result["after"][name][1] == values).all(), name
            differing += (result["other"][name][1] != values).any()
        assert differing > 0, "the fresh model had the same values anyway"
    written: dict[str, list[int]] = {}
    for commit in sorted(Path(storage, "run/layercheck/events").glob("*/commit.parquet")):
        for row in pq.read_table(commit).to_pylist():
            if row["layer"].endswith(".frozen") and row["rank"] == 0:
                written.setdefault(row["layer"].removesuffix(".frozen"), []).append(row["step"])
    assert written == {name: [0] for name in frozen}
