import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from app import adapters
from app.adapters import choose_trainable
from app.config import Config, parse
from layercheck.errors import ConfigError
from layercheck.zero3 import describe_model, layer_groups
from tests import fake_peft
from tests.small_models import SHAPES


def model(family: str = "llama") -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPES[family], vocab_size=400))


def config(**keys: object) -> Config:
    return parse(
        {
            "model": {"config": {"model_type": "llama"}, **keys},
            "train": {"steps": 1, "global_batch": 2},
        }
    )


def _frozen(family: str, *patterns: str) -> set[str]:
    made = choose_trainable(model(family), config(freeze=patterns))
    return {name for name, param in made.named_parameters() if not param.requires_grad}


def test_layers_and_parameters_are_frozen_by_name_and_wildcard() -> None:
    assert _frozen("llama", "embed_tokens") == {"model.embed_tokens.weight"}
    whole = _frozen("llama", "layers.1")
    assert len(whole) == 9
    assert all(name.startswith("model.layers.1.") for name in whole)
    assert _frozen("llama", "layers.*", "embed_tokens", "norm") == {
        name for name, _ in model().named_parameters() if name != "lm_head.weight"
    }
    assert _frozen("llama", "*.0.mlp.down_proj.weight") == {"model.layers.0.mlp.down_proj.weight"}
    assert _frozen("gpt2", "wpe", "*.ln_[12].bias") == {
        "transformer.wpe.weight",
        *(f"transformer.h.{block}.ln_{place}.bias" for block in (0, 1) for place in (1, 2)),
    }


def test_a_head_that_shares_the_embedding_is_frozen_with_it() -> None:
    made = choose_trainable(model("qwen2"), config(freeze=["embed_tokens"]))
    assert not made.get_output_embeddings().weight.requires_grad
    assert "embed_tokens" not in {group["layer"] for group in layer_groups(made, 0.1)}


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["layers.7"], r"model\.freeze='layers\.7' fits no layer.*layers\.1"),
        (["*"], "leaves nothing to train"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_one_error(patterns: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_trainable(model(), config(freeze=patterns))


def test_without_peft_a_lora_run_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ConfigError, match=r"model\.lora needs the package peft .*layercheck\[lora\]"):
        choose_trainable(model(), config(lora={}))


def test_adapters_are_layers_of_their_own_and_the_same_for_a_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "_peft", lambda: fake_peft)
    made = [choose_trainable(model(), config(lora={"r": 4})) for _ in range(2)]
    layers = {layer.name: layer for layer in describe_model(made[0]).layers}
    assert [name for name, layer in layers.items() if layer.trainable] == ["layers.0", "layers.1"]
    assert {"layers.0.frozen", "embed_tokens.frozen", "norm.frozen", "lm_head.frozen"} <= layers.keys()
    assert all(".lora_" in spec.name for spec in layers["layers.0"].params)
    for (name, mine), (_, theirs) in zip(*(one.named_parameters() for one in made), strict=True):
        if "lora_A" in name:
            assert torch.equal(mine, theirs)
    with pytest.raises(ConfigError, match=r"model\.lora\.targets=\('nosuch',\).*not found"):
        choose_trainable(model(), config(lora={"targets": ["nosuch"]}))
