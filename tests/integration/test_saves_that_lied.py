"""Saves that were not what they seemed: damaged files, frozen layers, names made in the same moment."""

import shutil
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from layercheck.persistence.storage import LocalStorage
from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import open_session, train

KILL_AT = 24


def _commits(storage: str) -> dict[int, list[dict[str, Any]]]:
    found = sorted(Path(storage, "run/layercheck/events").glob("*/commit.parquet"))
    return {int(path.parent.name[5:13]): pq.read_table(path).to_pylist() for path in found}


def _versions(storage: str) -> dict[str, list[int]]:
    """Layer -> steps of its committed versions, newest first."""
    versions: dict[str, list[int]] = {}
    for step, rows in reversed(_commits(storage).items()):
        for layer in sorted({row["layer"] for row in rows}):
            versions.setdefault(layer, []).append(step)
    return versions


def _recover_each(stores: dict[str, str]) -> dict[str, dict[str, Any]]:
    """One engine recovers from one damaged store after the other; gives the receipts."""
    engine = micro.build(99)
    receipts = {}
    for name, storage in stores.items():
        session = open_session(engine, storage)
        receipts[name] = session.resume().receipt.model_dump()
        session.close("failed")
    return receipts


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def test_i6_each_file_of_the_newest_event_deleted_or_cut_costs_just_its_layers_an_older_version(
    tmp_path: Path,
) -> None:
    killed = str(tmp_path / "killed")
    die = partial(train, kill_at=KILL_AT, settings={"keep_versions": 3})
    assert run_ranks(2, tmp_path, die, killed, KILL_AT + 1) == [None, None]
    newest = max(_commits(killed))
    event = next(Path(killed, "run/layercheck/events").glob(f"step-{newest:08d}.*"))
    versions = _versions(killed)
    hit = {layer for layer, steps in versions.items() if steps[0] == newest}
    assert hit
    assert hit != set(versions)
    stores = {}
    for file in sorted(event.iterdir()):
        for how, damage in {"deleted": Path.unlink, "cut": _cut}.items():
            stores[f"{file.name} {how}"] = storage = str(tmp_path / f"{file.name}-{how}")
            shutil.copytree(killed, storage)
            damage(Path(storage, "run/layercheck/events", event.name, file.name))
    assert len(stores) == 6
    for name, receipt in run_ranks(2, tmp_path, _recover_each, stores)[0].items():
        found = {layer["name"]: layer["step"] for layer in receipt["layers"]}
        assert found == {layer: steps[layer in hit] for layer, steps in versions.items()}, name
        if "commit" not in name:
            assert {bad["layer"] for bad in receipt["bad"]} == hit, name
            assert {layer["name"] for layer in receipt["layers"] if layer["fallback"]} == hit, name


@pytest.mark.slow
def test_i11_frozen_layers_are_written_once_and_a_recovery_brings_them_back_bit_by_bit(
    tmp_path: Path,
) -> None:
    storage = str(tmp_path / "store")
    freeze = ("layers.0", "layers.1", "embed_tokens")
    die = partial(train, kill_at=KILL_AT, freeze=freeze, settings={"keep_versions": 100, "keep_full": 9})
    assert run_ranks(2, tmp_path, die, storage, KILL_AT + 1) == [None, None]
    written = [step for step, rows in _commits(storage).items() for row in rows if "frozen" in row["layer"]]
    assert set(written) == {0}
    assert set(_commits(storage)) > {0, 4, 8}
    wanted = run_ranks(2, tmp_path, _weights_of, 0, freeze)
    assert run_ranks(2, tmp_path, partial(_recovered_weights_of, storage), 99, freeze) == wanted


def _frozen_bytes(engine: Any) -> dict[str, bytes]:
    import torch

    frozen = [(name, param) for name, param in engine.module.named_parameters() if not param.requires_grad]
    assert frozen
    return {name: param.ds_tensor.view(torch.uint8).numpy().tobytes() for name, param in frozen}


def _weights_of(seed: int, freeze: tuple[str, ...]) -> dict[str, bytes]:
    return _frozen_bytes(micro.build(seed, freeze=freeze))


def _recovered_weights_of(storage: str, seed: int, freeze: tuple[str, ...]) -> dict[str, bytes]:
    engine = micro.build(seed, freeze=freeze)
    session = open_session(engine, storage)
    session.resume()
    session.close("failed")
    return _frozen_bytes(engine)


def test_ranks_that_make_the_same_folders_at_the_same_moment_all_get_their_file(tmp_path: Path) -> None:
    ranks, rounds = 8, 20
    together = threading.Barrier(ranks)
    errors: list[BaseException] = []

    def write(rank: int) -> None:
        storage = LocalStorage(str(tmp_path))
        try:
            for number in range(rounds):
                together.wait(30)
                storage.write(f"events/{number}/deep/rank-{rank}", [bytes([rank])])
        except BaseException as error:
            errors.append(error)
            together.abort()

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    for number in range(rounds):
        files = sorted(Path(tmp_path, "events", str(number), "deep").iterdir())
        assert [(file.name, file.read_bytes()) for file in files] == [
            (f"rank-{rank}", bytes([rank])) for rank in range(ranks)
        ]
