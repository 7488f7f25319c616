"""Models that nobody chose here: by configuration alone they train, die and go on."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from layercheck.cli import main as cli
from tests.harness import RankFailedError, run_ranks
from tests.samples import OPENTHOUGHTS
from tests.small_models import make_folder

SETTINGS: dict[str, Any] = {
    "data": {"source": str(OPENTHOUGHTS), "seq_len": 512},
    "train": {"steps": 4, "global_batch": 4, "lr": 1.0e-3, "schedule": "constant"},
    "checkpoint": {
        "settings": {
            "warmup_steps": 2,
            "warmup_full_every": 2,
            "s_max": 12,
            "target_interval": 3,
            "full_every": 0,
        }
    },
    "cluster": {"workers": 2},
    "report_every_s": 1000,
}


def settings_of(storage: str, model: dict[str, Any], steps: int, **more: Any) -> Any:
    from app.config import parse

    train = SETTINGS["train"] | {"steps": steps} | more.pop("train", {})
    return parse({**SETTINGS, "run": {"storage": storage}, "model": model, "train": train, **more})


def train_app(storage: str, model: dict[str, Any], steps: int, **more: Any) -> tuple[list[float], Any]:
    """One life of a run: the losses of its steps and the result."""
    import torch.distributed as dist

    from app import train_loop

    losses: list[float] = []
    hooks = {key: more.pop(key) for key in ("witness", "publisher") if key in more}
    reduced = train_loop.mean_over_ranks

    def spy(*arguments: Any) -> Any:
        loss, due = reduced(*arguments)
        losses.append(loss)
        return loss, due

    train_loop.mean_over_ranks = spy
    try:
        config = settings_of(storage, model, steps, **more)
        result = train_loop.train(
            config, rank=dist.get_rank(), world_size=dist.get_world_size(), submission="one", **hooks
        )
    finally:
        train_loop.mean_over_ranks = reduced
    return losses, result


def _families(root: str, families: list[str]) -> dict[str, Any]:
    found = {}
    for family in families:
        model = {"path": f"{root}/{family}"}
        whole, _ = train_app(f"{root}/whole-{family}", model, 5)
        first, _ = train_app(f"{root}/parts-{family}", model, 3)
        rest, result = train_app(f"{root}/parts-{family}", model, 5)
        found[family] = (whole, first, rest, result.status)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("families", [["gpt2", "gemma"], ["gemma3_text", "qwen2_moe"]], ids=" ".join)
def test_a_folder_of_any_family_trains_and_a_second_life_has_the_losses_of_one_that_did_not_end(
    tmp_path: Path, families: list[str]
) -> None:
    for family in families:
        make_folder(tmp_path / family, family)
    for found in run_ranks(2, tmp_path, _families, str(tmp_path), families):
        for family in families:
            whole, first, rest, status = found[family]
            assert status == "completed"
            assert first == whole[:3], family
            assert rest == whole[3:], family
            assert 4.0 < whole[0] < 7.5, "a random model over 512 tokens: about ln 512"


class Eyes:
    """A witness that keeps the trainable state of every rank's slices: at the start of a life and now."""

    def __init__(self) -> None:
        self.begin: dict[str, Any] = {}

    def built(self, engine: Any, for_recovery: bool) -> None:
        from deepspeed.utils import z3_leaf_module

        from layercheck.zero3 import Zero3Engine

        self.zero3 = Zero3Engine(engine)
        self.leaves = [name for name, module in engine.module.named_modules() if z3_leaf_module(module)]

    def begun(self, point: Any) -> None:
        self.begin = self.now()

    def stepped(self, step: int) -> None:
        pass

    def now(self) -> dict[str, Any]:
        return {
            f"{part.spec.name}/{key}": tensor.float().numpy().copy()
            for parts in self.zero3.slices.values()
            for part in parts
            for key, tensor in self.zero3.tensors(part).items()
        }


def _two_lives(
    storage: str, model: dict[str, Any], fake_peft: bool = False, more: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Three steps; a second life begins with the state that the first one ended with, and goes on."""
    if fake_peft:
        from tests import fake_peft as fake

        fake.install()
    first, again = Eyes(), Eyes()
    _, result = train_app(storage, model, 3, witness=first, **(more or {}))
    ended = first.now()
    trainable = [spec.name for layer in first.zero3.layer_map.trainable for spec in layer.params]
    layers = {spec.name: layer.name for layer in first.zero3.layer_map.layers for spec in layer.params}
    losses, done = train_app(storage, model, 5, witness=again, **(more or {}))
    assert (result.status, done.status) == ("completed", "completed")
    return {
        "ended": ended,
        "begun": again.begin,
        "trainable": trainable,
        "layers": layers,
        "losses": losses,
        "leaves": first.leaves,
    }


def _same(found: dict[str, Any]) -> None:
    assert found["ended"].keys() == found["begun"].keys()
    for name, values in found["ended"].items():
        assert (found["begun"][name] == values).all(), name


def _commit_rows(storage: Path) -> list[list[dict[str, Any]]]:
    """The rows of each event's commit, oldest first."""
    import pyarrow.parquet as pq

    commits = sorted((storage / "run/layercheck/events").glob("*/commit.parquet"))
    return [pq.read_table(path).to_pylist() for path in commits]


def _event_bytes(storage: Path) -> list[tuple[int, int]]:
    """(bytes of the commit's rows, bytes of the files) of each event, oldest first."""
    found = []
    events = sorted((storage / "run/layercheck/events").iterdir())
    for event, rows in zip(events, _commit_rows(storage), strict=True):
        files = sum(path.stat().st_size for path in event.glob("*.safetensors"))
        found.append((sum(row["nbytes"] for row in rows), files))
    return found


def test_i11_a_lora_run_trains_and_writes_adapters_and_recovers_the_base_bit_equal(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model", "llama")
    model = {"path": str(folder), "lora": {"r": 128, "targets": ["q_proj", "v_proj"]}}
    results = run_ranks(2, tmp_path, _two_lives, str(tmp_path / "store"), model, True)
    for found in results:
        _same(found)
        assert found["trainable"]
        assert all(".lora_" in name for name in found["trainable"]), "adapters alone drift"
        assert len(found["losses"]) == 2
    numel = sum(
        len(values) for found in results for name, values in found["ended"].items() if name.endswith("/fp32")
    )
    first, *later = _event_bytes(tmp_path / "store")
    assert first[0] > 4 * numel, "the base once"
    for rows, files in later:
        assert rows <= 12 * numel
        assert files <= 1.05 * 12 * numel
    assert max(rows for rows, _ in later) == 12 * numel, "a full event"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"freeze": ["embed_tokens", "layers.0", "*.input_layernorm.weight"]},
        {"gradient_checkpointing": True, "freeze": ["embed_tokens"]},
    ],
    ids=["frozen layers", "checkpointed activations"],
)
def test_i11_frozen_layers_are_recovered_bit_equal_by_the_app(tmp_path: Path, more: dict[str, Any]) -> None:
    model = {"path": str(make_folder(tmp_path / "model", "llama")), **more}
    for found in run_ranks(2, tmp_path, _two_lives, str(tmp_path / "store"), model):
        _same(found)
        frozen = [name for name, layer in found["layers"].items() if layer.endswith(".frozen")]
        assert "model.embed_tokens.weight" in frozen
        assert not set(frozen) & set(found["trainable"])
        assert all(f"{name}/weight" in found["ended"] for name in frozen)


@pytest.mark.slow
def test_i11_frozen_layers_come_back_from_the_model_folder_and_a_changed_one_is_named(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder, storage = make_folder(tmp_path / "model", "llama"), str(tmp_path / "store")
    model = {"path": str(folder), "freeze": ["embed_tokens", "layers.0"]}
    from_source = {**SETTINGS["checkpoint"]["settings"], "frozen": "source"}
    more: dict[str, Any] = {"checkpoint": {"settings": from_source}}
    for found in run_ranks(2, tmp_path, _two_lives, storage, model, False, more):
        _same(found)
        assert "model.embed_tokens.weight/weight" in found["ended"]
    written = {row["layer"] for rows in _commit_rows(tmp_path / "store") for row in rows}
    assert written == {"layers.1", "norm", "lm_head"}
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][-1, -1] *= -1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RankFailedError) as caught:
        run_ranks(2, tmp_path, partial(train_app, **more), storage, model, 7)
    assert str(caught.value).count("StoreMismatchError: layer layers.0.frozen has other weights") == 2


@pytest.mark.slow
def test_an_offloaded_optimizer_comes_back(tmp_path: Path) -> None:
    model = {"path": str(make_folder(tmp_path / "model"))}
    for found in run_ranks(
        2, tmp_path, _two_lives, str(tmp_path / "s"), model, False, {"train": {"offload": True}}
    ):
        _same(found)
        assert any(name.endswith("/exp_avg_sq") and values.any() for name, values in found["ended"].items())


@pytest.mark.slow
def test_an_expert_that_never_got_a_token_has_zero_moments_again(tmp_path: Path) -> None:
    model = {"path": str(make_folder(tmp_path / "model", "olmoe"))}
    data = {"source": str(OPENTHOUGHTS), "seq_len": 48}
    more: dict[str, Any] = {"data": data, "train": {"global_batch": 2}}
    idle = 0
    for found in run_ranks(2, tmp_path, _two_lives, str(tmp_path / "store"), model, False, more):
        _same(found)
        experts = [name for name in found["layers"] if ".experts." in name]
        assert {found["layers"][name] for name in experts} == {"layers.0", "layers.1"}, "one layer per block"
        assert len(experts) == 4, "fused: two tensors a block"
        assert [name.rsplit(".", 1)[1] for name in found["leaves"]] == ["mlp", "mlp"], "gathered as a whole"
        for name in experts:
            width = 2 * 8 * 32 if "gate_up" in name else 8 * 32
            squares = found["ended"][f"{name}/exp_avg_sq"]
            whole = squares[: len(squares) // width * width].reshape(-1, width)
            idle += int((whole == 0).all(axis=1).sum())
            assert whole.any(), "some experts had tokens"
    assert idle > 0, "every expert had a token: nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe"])
def test_the_model_that_a_run_hands_over_is_the_one_that_was_trained(tmp_path: Path, family: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, out = make_folder(tmp_path / "model", family), tmp_path / "out"
    (found, _) = run_ranks(
        2, tmp_path, _handed_over, str(tmp_path / "store"), str(out), {"path": str(folder)}
    )
    from_store = tmp_path / "from-store"
    command = ["export", str(tmp_path / "store/run"), "--to", "hf", "--dtype", "bfloat16"]
    assert cli([*command, "--out", str(from_store)]) == 0
    model = AutoModelForCausalLM.from_pretrained(out)
    other = dict(AutoModelForCausalLM.from_pretrained(from_store).named_parameters())
    assert model.dtype == torch.bfloat16
    assert model.config.use_cache
    assert len(AutoTokenizer.from_pretrained(out)) == 512
    masters = {name.removesuffix("/fp32"): values for name, values in found.items() if name.endswith("/fp32")}
    weights = dict(model.named_parameters())
    assert masters.keys() == weights.keys()
    for name, values in masters.items():
        mine = weights[name].detach().float().flatten()[: len(values)]
        assert torch.equal(mine, torch.from_numpy(values).to(torch.bfloat16).float()), name
        assert torch.equal(other[name], weights[name]), f"{name} of layercheck export"


def _handed_over(storage: str, out: str, model: dict[str, Any]) -> dict[str, Any]:
    import shutil

    calls: list[Any] = []

    def publisher(folder: Path | None, metrics: dict[str, Any]) -> None:
        calls.append((folder is not None, metrics["step"]))
        if folder is not None:
            shutil.copytree(folder, out)

    eyes = Eyes()
    train_app(storage, model, 3, witness=eyes, publisher=publisher)
    state = eyes.now()
    train_app(storage, model, 3, publisher=publisher)
    assert len(calls) == 1, "a run that was complete hands nothing over again"
    assert calls[0][1] == 3
    return state
