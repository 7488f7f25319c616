"""An exported composite is read by those it is for: DeepSpeed, its zero_to_fp32, transformers."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from layercheck.cli import main
from tests import flat, micro
from tests.harness import run_ranks
from tests.integration.ranks import open_session, train

MORE = 3
"""Steps after the load."""
FROZEN = ("embed_tokens", "layers.0")


def _go_on(engine: Any, first: int) -> list[float]:
    return [micro.train_step(engine, step) for step in range(first, first + MORE)]


def _recovered(storage: str, **build: Any) -> dict[str, Any]:
    engine = micro.build(99, **build)
    session = open_session(engine, storage)
    point = session.resume()
    session.close("failed")
    parts = flat.parts_of(engine)
    return {"parts": parts, "step": point.step - 1, "losses": _go_on(engine, point.step)}


def _loaded(folder: str, **build: Any) -> dict[str, Any]:
    engine = micro.build(7, **build)
    path, client = engine.load_checkpoint(folder)
    assert path is not None
    parts, step = flat.parts_of(engine), engine.global_steps
    settings = [group["weight_decay"] for group in engine.optimizer.param_groups]
    return {
        "parts": parts, "step": step, "client": client["layercheck"], "decay": settings,
        "sub_groups": flat.sub_groups_of(engine), "losses": _go_on(engine, step + 1),
    }  # fmt: skip


def _both(storage: str, zero: str, padded: str, hf: list[str]) -> dict[str, Any]:
    """What LayerCheck recovers and what DeepSpeed loads; on rank 0 also what the others read."""
    import torch.distributed as dist

    found = {"recovered": _recovered(storage), "loaded": _loaded(zero)}
    if dist.get_rank() == 0:
        found["fp32"] = [_zero_to_fp32(zero), _zero_to_fp32(padded)]
        found["hf"] = [_from_pretrained(folder) for folder in hf]
    return found


def _zero_to_fp32(folder: str) -> dict[str, np.ndarray]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(folder)
    return {name: tensor.numpy() for name, tensor in found.items()}


def _from_pretrained(folder: str) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    model.eval()
    twin = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype).eval()
    twin.load_state_dict(model.state_dict())
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        gap = (model(tokens).logits - twin(tokens).logits).abs().max()
    return {
        "state": {name: tensor.float().numpy() for name, tensor in model.state_dict().items()},
        "dtype": str(model.dtype),
        "tied": model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr(),
        "strangers": {key: sorted(value) for key, value in told.items() if value},
        "gap": float(gap),
    }


def _export(storage: Path, out: Path, *flags: str) -> None:
    assert main(["export", str(storage / "run"), "--out", str(out), *flags]) == 0


@pytest.fixture(scope="module")
def storage(killed_once: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("export") / "store"
    shutil.copytree(killed_once, copy)
    return copy


@pytest.fixture(scope="module")
def found(storage: Path) -> list[dict[str, Any]]:
    """Everything on two ranks, once."""
    tmp = storage.parent
    _export(storage, tmp / "zero", "--to", "deepspeed", "--sub-group-size", "5000")
    _export(storage, tmp / "zero5", "--to", "deepspeed", "--groups", "stock", "--world-size", "5")
    _export(storage, tmp / "hf32", "--to", "hf")
    _export(storage, tmp / "hf16", "--to", "hf", "--dtype", "bfloat16")
    hf = [str(tmp / "hf32"), str(tmp / "hf16")]
    return run_ranks(2, tmp, _both, str(storage), str(tmp / "zero"), str(tmp / "zero5"), hf)


def _whole(ranks: list[dict[str, Any]], of: str, key: str) -> np.ndarray:
    return flat.whole([rank[of]["parts"] for rank in ranks], key)


def test_deepspeed_loads_the_very_state_and_goes_on_with_the_very_losses(found: list[dict[str, Any]]) -> None:
    for rank in found:
        recovered, loaded = rank["recovered"], rank["loaded"]
        assert loaded["step"] == recovered["step"] == loaded["client"]["trainer_state"]["step"]
        assert set(loaded["parts"]) == set(recovered["parts"])
        for key, part in recovered["parts"].items():
            np.testing.assert_array_equal(loaded["parts"][key], part, key)
        assert loaded["losses"] == recovered["losses"]
    steps = {
        float(found[0]["recovered"]["parts"][key]) for key in found[0]["recovered"]["parts"] if "/step" in key
    }
    assert len(steps) >= 3, "a composite of equal ages shows nothing"


@pytest.mark.parametrize("padded", [False, True])
def test_zero_to_fp32_gives_the_masters_and_the_tied_name(found: list[dict[str, Any]], padded: bool) -> None:
    fp32 = dict(found[0]["fp32"][padded])
    np.testing.assert_array_equal(fp32.pop("lm_head.weight"), fp32["model.embed_tokens.weight"])
    masters = [key for key in found[0]["recovered"]["parts"] if key.endswith("/fp32")]
    assert sorted(masters) == sorted(f"{name}/fp32" for name in fp32)
    for name, tensor in fp32.items():
        np.testing.assert_array_equal(tensor.reshape(-1), _whole(found, "recovered", f"{name}/fp32"), name)


def test_from_pretrained_reads_the_masters_and_ties_the_head(found: list[dict[str, Any]]) -> None:
    import torch

    for model, dtype in zip(found[0]["hf"], ("torch.float32", "torch.bfloat16"), strict=True):
        assert (model["dtype"], model["tied"], model["strangers"], model["gap"]) == (dtype, True, {}, 0.0)
        for name, tensor in model["state"].items():
            owner = "model.embed_tokens.weight" if name == "lm_head.weight" else name
            master = torch.from_numpy(_whole(found, "recovered", f"{owner}/fp32"))
            rounded = master.bfloat16().float() if dtype == "torch.bfloat16" else master
            np.testing.assert_array_equal(tensor.reshape(-1), rounded.numpy(), name)


def test_stock_groups_at_another_world_size_hold_the_same_state_and_say_whose_step_they_took(
    storage: Path, found: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    out = storage.parent / "stock"
    _export(
        storage,
        out,
        "--to",
        "deepspeed",
        "--groups",
        "stock",
        "--world-size",
        "3",
        "--sub-group-size",
        "5000",
    )
    assert "got the largest; --groups layer keeps each" in capsys.readouterr().err
    ranks = run_ranks(3, storage.parent, _stock, str(out))
    recovered = found[0]["recovered"]["parts"]
    for key in flat.tensor_keys(recovered):
        now = flat.whole([rank["parts"] for rank in ranks], key)
        np.testing.assert_array_equal(now, _whole(found, "recovered", key), key)
    assert ranks[0]["decay"] == [0.01, 0.0]
    for names in ranks[0]["sub_groups"]:
        largest = max(float(recovered[f"{name}/step"]) for name in names)
        assert {float(rank["parts"][f"{name}/step"]) for rank in ranks for name in names} == {largest}
    assert all(np.isfinite(loss) for loss in ranks[0]["losses"])


def _stock(folder: str) -> dict[str, Any]:
    return _loaded(folder, groups="stock")


@pytest.mark.slow
def test_groups_of_a_file_on_one_rank_load_too(storage: Path, found: list[dict[str, Any]]) -> None:
    file = storage.parent / "groups.json"
    file.write_text(json.dumps([{"names": _model_order(storage), "weight_decay": 0.02}]))
    out = storage.parent / "one"
    _export(storage, out, "--to", "deepspeed", "--groups", str(file), "--world-size", "1")
    (rank,) = run_ranks(1, storage.parent, _one, str(out))
    for key in flat.tensor_keys(found[0]["recovered"]["parts"]):
        np.testing.assert_array_equal(flat.whole([rank["parts"]], key), _whole(found, "recovered", key), key)
    assert rank["decay"] == [0.02]


def _model_order(storage: Path) -> list[str]:
    run = json.loads((storage / "run/layercheck/run.json").read_text())
    return [spec["name"] for layer in run["layer_map"]["layers"] for spec in layer["params"]]


def _one(folder: str) -> dict[str, Any]:
    return _loaded(folder, groups="one", sub_group_size=10**9)


def _frozen(storage: str, folder: str) -> tuple[list[float], list[float]]:
    recovered = _recovered(storage, freeze=FROZEN)
    return recovered["losses"], _loaded(folder, freeze=FROZEN)["losses"]


@pytest.mark.slow
def test_frozen_layers_are_exported_and_loaded(tmp_path: Path) -> None:
    storage, steps = tmp_path / "store", 9
    run_ranks(2, tmp_path, partial(train, freeze=FROZEN, save_at=steps), str(storage), steps)
    _export(storage, tmp_path / "zero", "--to", "deepspeed", "--sub-group-size", "5000")
    for recovered, loaded in run_ranks(2, tmp_path, _frozen, str(storage), str(tmp_path / "zero")):
        assert loaded == recovered
