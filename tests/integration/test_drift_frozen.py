"""Frozen parts: written once or only hashed, bit-equal after a recovery onto other random values (I11)."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import xxhash

from layercheck.errors import LayerCheckError, StoreMismatchError
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


def _load(zero3: Any, weights: dict[str, Any]) -> None:
    """What an application does that reads its model folder again."""
    import torch

    for parts in zero3.slices.values():
        for part in (part for part in parts if part.sub_group < 0):
            zero3.tensors(part)["weight"].copy_(torch.from_numpy(weights[part.spec.name][1]))


def _refused(engine: Any, storage: str, **settings: Any) -> str:
    with pytest.raises(StoreMismatchError) as caught:
        open_session(engine, storage, **settings).resume()
    return f"{caught.value.facts} {caught.value}"


def _wrong_sources(engine: Any, storage: str, weights: dict[str, Any]) -> list[str]:
    """Errors of a fresh engine: with other random values, with one bit changed on one rank, with `base`."""
    import torch.distributed as dist

    errors = [_refused(engine, storage, frozen="source")]
    changed = {name: (offset, values.copy()) for name, (offset, values) in weights.items()}
    if dist.get_rank() == 1:
        changed["model.layers.1.mlp.up_proj.weight"][1][-1] *= -1
    zero3 = open_session(engine, storage, frozen="source")._zero3
    _load(zero3, changed)
    errors.append(_refused(engine, storage, frozen="source"))
    _load(zero3, weights)
    errors.append(_refused(engine, storage))
    return [*errors, *_unreadable(zero3)]


def _unreadable(zero3: Any) -> list[str]:
    """What a rank is told if rank 1 cannot read a layer, at once or later; then its log lines."""
    from layercheck.recovery.frozen import frozen_hashes

    told = [_told(zero3, spared) for spared in (0, len(zero3.slices["layers.1.frozen"]))]
    lines, logger = _Lines(), logging.getLogger("layercheck.recovery.frozen")
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    frozen_hashes(zero3)
    logger.removeHandler(lines)
    return [*told, "\n".join(lines.said)]


def _told(zero3: Any, spared: int) -> str:
    import torch.distributed as dist

    from layercheck.recovery.frozen import frozen_hashes

    tensors, looks = zero3.tensors, 0

    def failing(part: Any) -> Any:
        nonlocal looks
        looks += part.layer == "layers.1.frozen"
        if dist.get_rank() == 1 and looks > spared:
            raise OSError("bad address")
        return tensors(part)

    zero3.tensors = failing
    with pytest.raises(LayerCheckError) as caught:
        frozen_hashes(zero3)
    zero3.tensors = tensors
    return caught.value.message


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _train_and_recover(storage: str, build: dict[str, Any], frozen: str) -> dict[str, Any]:
    engine = micro.build(**build)
    session = open_session(engine, storage, frozen=frozen)
    session.resume()
    for step in range(1, STEPS + 1):
        loss = micro.train_step(engine, step)
        session.after_step(step, {"loss": loss})
    session.save_now()
    before = _frozen_weights(session._zero3)
    session.close("failed")
    went_on = [micro.train_step(engine, step) for step in range(STEPS + 1, STEPS + 6)]

    fresh = micro.build(seed=99, **build)
    again = open_session(fresh, storage, frozen=frozen)
    other = _frozen_weights(again._zero3)
    errors = _wrong_sources(fresh, storage, before) if frozen == "source" else []
    kept = again._zero3.layer_map.trainable if frozen == "source" else again._zero3.layer_map.layers
    again._zero3.abandon_install([layer.name for layer in kept])  # as after an install that failed
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
        "errors": errors,
        "trainable": [layer.name for layer in session._zero3.layer_map.trainable],
    }


HALF: tuple[dict[str, Any], set[str]] = (
    {"freeze": ("layers.0.", "layers.1.", "embed_tokens")},
    {"layers.0", "layers.1", "embed_tokens"},
)


@pytest.mark.parametrize(
    ("build", "frozen"),
    [
        HALF,
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
    for result in run_ranks(2, tmp_path, _train_and_recover, storage, build, "base"):
        _went_on_bit_equal(result)
    assert _written(storage) == {name: [0] for name in frozen}


def test_i11_of_frozen_parts_from_their_source_only_hashes_are_kept_and_checked(tmp_path: Path) -> None:
    storage, (build, frozen) = str(tmp_path / "store"), HALF
    results = run_ranks(2, tmp_path, _train_and_recover, storage, build, "source")
    for rank, result in enumerate(results):
        _went_on_bit_equal(result)
        other, one_bit, base, no_room, no_hash, said = result["errors"]
        assert "layer embed_tokens.frozen has other weights than run run began with" in other
        assert "'layer': 'layers.1.frozen'" in one_bit
        assert "run run with frozen='source', not 'base'" in base
        why = ("another rank", "see its error") if rank == 0 else ("rank 1", "bad address")
        assert no_room == f"{why[0]} cannot make room for the hashes of the frozen layers: {why[1]}"
        assert no_hash == f"{why[0]} cannot hash the frozen layer layers.1.frozen: {why[1]}"
        assert bool(re.search(r"hashing 3 frozen layers, 0\.00 GB\n.*hashed in .* s$", said)) == (rank == 0)
    assert _written(storage) == {}
    hashes = json.loads(Path(storage, "run/layercheck/run.json").read_text())["frozen_hashes"]
    assert hashes.keys() == {f"{name}.frozen" for name in frozen}
    assert hashes["embed_tokens.frozen"] == _hash_of(results, "model.embed_tokens.weight")


def _hash_of(results: list[dict[str, Any]], name: str) -> str:
    """Of a whole parameter in bf16, from the parts of the ranks."""
    parts = [result["before"][name] for result in results]
    whole = np.concatenate([values for _, values in sorted(parts, key=lambda part: part[0])])
    return str(xxhash.xxh3_128_hexdigest((whole.view(np.uint32) >> 16).astype(np.uint16).tobytes()))


def _went_on_bit_equal(result: dict[str, Any]) -> None:
    went_on, recovered = result["losses"]
    assert went_on == recovered
    assert result["before"].keys() == result["after"].keys() != set()
    differing = 0
    for name, (offset, values) in result["before"].items():
        assert result["after"][name][0] == offset
        assert (result["after"][name][1] == values).all(), name
        differing += (result["other"][name][1] != values).any()
    assert differing > 0, "the fresh model had the same values anyway"


def _written(storage: str) -> dict[str, list[int]]:
    """Frozen layer -> steps of its versions."""
    written: dict[str, list[int]] = {}
    for commit in sorted(Path(storage, "run/layercheck/events").glob("*/commit.parquet")):
        for row in pq.read_table(commit).to_pylist():
            if row["layer"].endswith(".frozen") and row["rank"] == 0:
                written.setdefault(row["layer"].removesuffix(".frozen"), []).append(row["step"])
    return written
