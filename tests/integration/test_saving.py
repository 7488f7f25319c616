"""What reaches the storage: the bytes of the named step (I4), of the same layers on every rank (I3)."""

import json
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import safe_open

from tests.harness import run_ranks
from tests.integration.ranks import assert_live_bytes, note_state, shards, train

STEPS = 24


def _train_on_slow_storage(storage: str, shadow: str) -> None:
    """Each shard file takes several steps to write; `shadow` gets a copy of the live state of every step."""
    from layercheck.persistence.storage import LocalStorage

    class Slow(LocalStorage):
        def write(self, path: str, chunks: Iterable[Any]) -> None:
            if "/rank-" in path:
                chunks = self._dawdle(chunks)
            super().write(path, chunks)

        def _dawdle(self, chunks: Iterable[Any]) -> Iterable[Any]:
            for chunk in chunks:
                time.sleep(0.05)
                yield chunk

    train(storage, STEPS, each_step=partial(note_state, shadow), store=Slow(f"{storage}/run/layercheck"))


def test_i4_a_version_holds_the_bytes_of_its_step_however_slow_the_writer_is(tmp_path: Path) -> None:
    storage, shadow = str(tmp_path / "store"), tmp_path / "shadow"
    shadow.mkdir()
    run_ranks(2, tmp_path, _train_on_slow_storage, storage, str(shadow))
    assert assert_live_bytes(Path(storage), shadow) > 100


def test_i3_all_ranks_choose_the_same_layers_at_the_same_steps(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    run_ranks(3, tmp_path, train, storage, 40)
    chosen: dict[int, dict[int, tuple[str, ...]]] = {}
    for step, rank, file in shards(Path(storage)):
        with safe_open(file, "np") as shard:
            metadata = shard.metadata()
        layers = {json.loads(text)["layer"] for name, text in metadata.items() if name != "layercheck"}
        chosen.setdefault(step, {})[rank] = tuple(sorted(layers))
    partial_events = 0
    for step, by_rank in chosen.items():
        assert set(by_rank) == {0, 1, 2}, f"step {step}"
        assert len(set(by_rank.values())) == 1, f"step {step}: {by_rank}"
        partial_events += len(by_rank[0]) < 5
    assert partial_events >= 3


def test_each_version_of_a_moving_layer_differs_from_the_one_before(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    run_ranks(2, tmp_path, partial(train, seed=1), storage, STEPS)
    last: dict[str, bytes] = {}
    for _, rank, file in shards(Path(storage)):
        if rank:
            continue
        with safe_open(file, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                if name.endswith("/fp32"):
                    content = shard.get_tensor(name).tobytes()
                    assert content != last.get(name), name
                    last[name] = content
