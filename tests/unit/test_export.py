"""The export command: what it refuses, what a bad shard costs, how much memory it holds, its weights."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from layercheck.cli import main
from layercheck.export import zero_files
from layercheck.export.composite import Composite
from layercheck.export.hf_files import write_hf
from layercheck.groups import OptimizerGroup
from layercheck.recovery import fetch
from tests.fakes import flip_bit
from tests.shards import Shelf, plan_of, shelf, values
from tests.stores import RealRun, real_run

SHAPES = {"embed": ((40, 8),), "layers.0": ((8, 8), (8,)), "layers.1": ((8, 8), (8,)), "norm": ((5,),)}
WRITTEN_BY = {"embed": 2, "layers.0": 3, "layers.1": 1, "norm": 2}


@pytest.fixture
def store(tmp_path: Path) -> Shelf:
    return shelf(tmp_path / "store", SHAPES)


def composite(store: Shelf) -> Composite:
    """A composite whose layers are of other steps and world sizes."""
    layers = tuple(
        store.put(layer, step, WRITTEN_BY.get(layer.name, 2))
        for step, layer in enumerate(store.run.layer_map.layers, start=5)
    )
    return Composite(store.storage, store.run, plan_of(layers))


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["--to", "hf", "--groups", "stock"], 2, "--groups stock means nothing with --to hf"),
        (["--to", "hf", "--world-size", "2"], 2, "--world-size 2 means nothing with --to hf"),
        (
            ["--to", "deepspeed", "--dtype", "bfloat16"],
            2,
            "--dtype bfloat16 means nothing with --to deepspeed",
        ),
        (["--to", "deepspeed", "--world-size", "0"], 2, "'0' is no whole number of at least 1"),
        (["--to", "onnx"], 2, "onnx"),
        (["--to", "deepspeed"], 2, "names no optimizer groups"),
        (["--to", "hf"], 2, "has no model config"),
        (["--to", "hf", "--at-step", "99"], 1, "has come to step 14, not to 99"),
    ],
)
def test_what_cannot_be_exported_is_one_error_and_leaves_nothing(
    run: RealRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], code: int, words: str
) -> None:
    before = set(tmp_path.rglob("*"))
    try:
        found = main(["export", str(run.folder), "--out", str(tmp_path / "out"), *args])
    except SystemExit as ended:
        found = int(ended.code or 0)
    assert found == code
    assert words in capsys.readouterr().err
    assert set(tmp_path.rglob("*")) == before


WARM, COLD = {"lr": 1e-4, "betas": [0.9, 0.99]}, {"lr": 2e-4, "betas": [0.9, 0.99]}


@pytest.mark.parametrize(
    ("state", "count", "rates"),
    [
        # DeepSpeed's schedulers keep a count and no rate: the rate of the next update is in the groups alone.
        ({"lr_scheduler": {"last_batch_iteration": 6}, "groups": [WARM, COLD]}, 2, [1e-4, 2e-4]),
        ({"lr_scheduler": {"last_batch_iteration": 6}, "groups": [WARM] * 3}, 2, [1e-4, 1e-4]),
        ({"lr_scheduler": {"last_batch_iteration": 6}, "groups": [WARM, COLD, COLD]}, 2, [1e-3, 1e-3]),
        ({"hf_scheduler": {"_last_lr": [3e-4, 4e-4]}}, 2, [3e-4, 4e-4]),
        ({}, 2, [1e-3, 1e-3]),
    ],
)
def test_the_exported_groups_have_the_rate_of_the_next_update(
    store: Shelf, state: dict[str, Any], count: int, rates: list[float]
) -> None:
    group = OptimizerGroup(names=("norm.0",), settings={"lr": 1e-3, "betas": [0.9, 0.999]})
    layout = zero_files._Layout((group,) * count, [[index] for index in range(count)], [], {})
    made = composite(store)
    plan = made.plan.model_copy(update={"trainer_state": made.plan.trainer_state | state})
    groups = zero_files._param_groups(Composite(made.storage, made.run, plan), layout)
    assert [group["lr"] for group in groups] == rates
    assert all(isinstance(group["betas"], tuple) for group in groups)
    assert [group["params"] for group in groups] == [[index] for index in range(count)]


def test_a_folder_in_use_is_left_alone(
    run: RealRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    below = str(tmp_path / "out" / "mine" / "below")
    assert main(["export", str(run.folder), "--to", "hf", "--out", below]) == 2
    assert f"--out {below}: File exists" in capsys.readouterr().err
    assert main(["export", str(run.folder), "--to", "hf", "--out", str(tmp_path / "out")]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine"]


def test_the_weights_are_the_masters_bit_for_bit_or_rounded_to_the_nearest(
    store: Shelf, tmp_path: Path
) -> None:
    import torch

    whole = composite(store)
    steps = {layer.layer: layer.step for layer in whole.plan.layers}
    for dtype in ("float32", "bfloat16"):
        folder = tmp_path / dtype
        folder.mkdir()
        write_hf(whole, folder, dtype)
        with safe_open(folder / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == set(store.run.layer_map.layer_of)
            for layer in store.run.layer_map.layers:
                for spec in layer.params:
                    master = torch.from_numpy(values(spec, "fp32", steps[layer.name])).reshape(spec.shape)
                    assert torch.equal(file.get_tensor(spec.name), master.to(getattr(torch, dtype)))
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


def test_a_large_model_is_split_over_files_with_an_index(store: Shelf, tmp_path: Path) -> None:
    whole = composite(store)
    write_hf(whole, tmp_path, "float32", max_file_bytes=400)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {name: (tmp_path / name).stat().st_size for name in set(index["weight_map"].values())}
    assert len(sizes) == 3
    assert index["metadata"]["total_size"] == 4 * sum(layer.numel for layer in store.run.layer_map.layers)
    found = {}
    for name in sizes:
        held = load_file(tmp_path / name)
        assert all(index["weight_map"][key] == name for key in held)
        found |= held
    for layer in whole.plan.layers:
        for spec in store.run.layer_map.by_name[layer.layer].params:
            expected = values(spec, "fp32", layer.step).reshape(spec.shape)
            np.testing.assert_array_equal(found[spec.name], expected)


def test_the_export_holds_one_layer_and_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = 64 << 10
    monkeypatch.setattr(fetch, "BLOCK_BYTES", block)
    store = shelf(tmp_path / "store", {f"layers.{i}": ((512, 512),) for i in range(5)})
    layers = tuple(store.put(layer, 1, 2) for layer in store.run.layer_map.layers)
    whole = Composite(store.storage, store.run, plan_of(layers))
    (tmp_path / "out").mkdir()
    write_hf(whole, tmp_path / "out")  # loads what is loaded once
    tracemalloc.start()
    try:
        write_hf(whole, tmp_path / "out")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    largest = 4 * 512 * 512
    assert largest <= peak <= largest + block + (256 << 10), f"{peak} bytes, {largest} in the largest layer"


def test_i6_a_bad_shard_costs_the_export_one_older_layer_and_is_said(
    run: RealRun, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = run.folder / "run.json"
    from layercheck.coordination import journal

    found = journal.parse(record.read_bytes())
    record.write_bytes(journal.dump(found | {"model_config_json": {"model_type": "qwen2"}}))
    damaged = run.folder / "events/step-00000012.a001/rank-00001.safetensors"
    flip_bit(damaged, 8 * (damaged.stat().st_size - 1))
    out = tmp_path / "out"
    assert main(["export", str(run.folder), "--to", "hf", "--out", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert json.loads(told.out)["max_age"] == 10
    assert "step-00000012.a001/rank-00001.safetensors is bad, an older layers.0 was taken" in told.err
    weights = load_file(out / "model.safetensors")["layers.0.w"].tobytes()
    assert weights == bytes([8] * 40) + bytes([9] * 40)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
