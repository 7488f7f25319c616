import logging
from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from app import memory_check
from app.config import Config, parse
from app.memory import MemoryEstimate, ModelSizes, check, describe, estimate
from app.memory_check import estimated_memory, model_sizes
from layercheck.errors import ConfigError
from tests.small_models import SHAPES

SIZES = ModelSizes(
    params=1_000_000,
    trainable=1_000_000,
    with_residuals=0,
    largest_layer=300_000,
    num_layers=4,
    hidden=64,
    vocab=1000,
)


def config(**changes: object) -> Config:
    settings: dict[str, object] = {
        "model": {"config": {"model_type": "qwen2"}},
        "data": {"seq_len": 128},
        "train": {"steps": 1, "global_batch": 8},
        "cluster": {"workers": 4, "gpus_per_worker": 1},
    }
    return parse({key: {**settings.get(key, {}), **changes.get(key, {})} for key in {*settings, *changes}})  # type: ignore[dict-item]


def test_state_is_shared_by_the_ranks_and_a_layer_is_whole() -> None:
    needed = estimate(SIZES, config(), 4)
    assert (needed.weights, needed.gradients, needed.optimizer) == (500_000, 500_000, 3_000_000)
    assert needed.gathered == 2 * 1_300_000, "50 M elements ahead are the whole model; and one gradient"
    assert needed.staging == needed.optimizer
    assert estimate(SIZES, config(train={"dtype": "fp32"}), 4).weights == 1_000_000
    ahead = {"deepspeed": {"zero_optimization": {"stage3_prefetch_bucket_size": 0, "reduce_bucket_size": 7}}}
    tight = estimate(SIZES, config(train=ahead), 4)
    assert (tight.gathered, tight.buckets) == (2 * 600_000, 14)


def test_only_what_trains_has_gradients_and_moments() -> None:
    frozen = replace(SIZES, trainable=10_000)
    needed = estimate(frozen, config(), 1)
    assert (needed.weights, needed.gradients, needed.optimizer) == (2_000_000, 20_000, 120_000)


def test_offload_moves_gradients_and_optimizer_to_the_host() -> None:
    here, there = (estimate(SIZES, config(train={"offload": offload}), 2) for offload in (False, True))
    assert here.device - there.device == here.gradients + here.optimizer == there.host - here.host
    on_cpu = estimate(SIZES, config(cluster={"gpus_per_worker": 0}), 2)
    assert on_cpu.device == 0
    assert on_cpu.host > on_cpu.certain + on_cpu.staging


@pytest.mark.parametrize("gpus", [0, 1])
def test_residuals_take_one_more_copy_of_the_weights_in_host_memory(gpus: int) -> None:
    settings = config(cluster={"gpus_per_worker": gpus})
    without, needed = (
        estimate(SIZES, settings, 4),
        estimate(replace(SIZES, with_residuals=600_000), settings, 4),
    )
    assert (without.bases, needed.bases) == (0, 4 * 600_000 // 4)
    assert needed.host - without.host == needed.bases
    assert needed.device == without.device
    assert "copies for residuals 600 kB" in describe(needed, SIZES, 4)


def _tier(**memory: object) -> Config:
    settings = {"memory": {"enabled": True, **memory}}
    return config(checkpoint={"settings": settings}, cluster={"gpus_per_worker": 0})


@pytest.mark.parametrize(("replicas", "copies"), [(0, 2), (1, 4)])
def test_the_memory_tier_holds_two_copies_of_the_state_and_as_much_for_another_node(
    replicas: int, copies: int
) -> None:
    without, needed = estimate(SIZES, _tier(enabled=False), 4), estimate(SIZES, _tier(replicas=replicas), 4)
    assert (without.vault, needed.vault) == (0, copies * needed.optimizer)
    assert needed.host - without.host == needed.vault
    assert f"memory tier about {3 * copies} MB" in describe(needed, SIZES, 4)
    assert estimate(SIZES, config(checkpoint={"method": "none"}), 4).vault == 0


def test_the_memory_tier_of_a_host_takes_no_more_than_its_budget() -> None:
    needed = estimate(SIZES, _tier(budget_gb=0.001), 4)
    assert needed.vault == needed.vault_limit == 1_000_000
    beside = 4 * (needed.host - needed.vault - needed.staging) + 4 * needed.staging
    enough = int((beside + 1_000_000) / 0.9) + 2
    assert check(needed, None, enough, 4) is None
    free = estimate(SIZES, _tier(replicas=1), 4)
    warned = check(free, None, enough, 4)
    assert warned is not None
    assert "memory.budget_gb" in warned


def test_copies_for_residuals_are_of_what_trains_and_is_not_excluded() -> None:
    shape = AutoConfig.for_model(**SHAPES["qwen2"], vocab_size=4000, pad_token_id=0, bos_token_id=1)

    def covered(method: str = "layercheck", freeze: tuple[str, ...] = (), **residual: object) -> int:
        checkpoint = {"method": method, "settings": {"residual": residual}}
        return model_sizes(shape, config(checkpoint=checkpoint, model={"freeze": freeze})).with_residuals

    whole, embedding = model_sizes(shape, config()).params, 4000 * 32
    assert covered() == covered(method="none", enabled=True) == 0
    assert covered(enabled=True) == whole
    assert covered(enabled=True, exclude=["embed*"]) == whole - embedding
    assert covered(enabled=True, freeze=("embed_tokens",)) == whole - embedding


def test_checkpointing_and_shorter_sequences_take_less() -> None:
    whole = estimate(SIZES, config(), 4).activations
    assert estimate(SIZES, config(model={"gradient_checkpointing": True}), 4).activations < 0.8 * whole
    assert estimate(SIZES, config(data={"seq_len": 64}), 4).activations == whole / 2
    assert estimate(SIZES, config(train={"micro_batch": 2}), 4).activations == 2 * whole


def _needs(**changes: object) -> MemoryEstimate:
    return estimate(SIZES, config(**changes), 4)


def test_what_cannot_fit_is_one_error_and_what_may_not_is_a_warning() -> None:
    needed = _needs()
    assert check(needed, needed.device * 2, 10**12, 4) is None
    warned = check(needed, needed.device, 10**12, 4)
    assert warned is not None
    assert "of the device are needed" in warned
    with pytest.raises(ConfigError, match=r"the device has 3.9\d MB.*4 MB.*cluster\.workers"):
        check(needed, needed.certain - 10_000, 10**12, 4)


def test_the_ranks_of_a_host_share_its_memory() -> None:
    needed = _needs(cluster={"gpus_per_worker": 0})
    assert check(needed, None, 10 * needed.host, 4) is None
    have = 2 * needed.certain
    with pytest.raises(ConfigError, match="the host has 8 MB"):
        check(needed, None, have, 4)
    assert check(needed, None, have * 10, 2) is None, "half the ranks, ten times the memory"
    offloaded = _needs(train={"offload": True})
    with pytest.raises(ConfigError, match="host"):
        check(offloaded, 10**12, 3 * (offloaded.gradients + offloaded.optimizer), 4)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "qwen2", "qwen2_moe"])
def test_sizes_from_the_configuration_alone_are_those_of_the_model(family: str) -> None:
    shape = AutoConfig.for_model(**SHAPES[family], vocab_size=400, pad_token_id=0, bos_token_id=1)
    model = AutoModelForCausalLM.from_config(shape)
    sizes = model_sizes(shape, config())
    assert sizes.params == sizes.trainable == sum(param.numel() for param in model.parameters())
    assert 0 < sizes.largest_layer < sizes.params
    assert (sizes.hidden, sizes.vocab) == (32, 400)
    assert all(param.device == torch.device("cpu") for param in model.parameters()), "nothing else moved"


def test_a_frozen_embedding_still_has_to_be_gathered() -> None:
    shape = AutoConfig.for_model(**SHAPES["qwen2"], vocab_size=4000, pad_token_id=0, bos_token_id=1)
    sizes = model_sizes(shape, config(model={"freeze": ["embed_tokens"]}))
    assert sizes.largest_layer == 4000 * 32
    assert sizes.trainable == sizes.params - 4000 * 32


def test_the_line_for_a_person_names_every_part() -> None:
    text = describe(_needs(), SIZES, 4)
    for part in ("a rank of 4", "1.0 M parameters", "optimizer 3 MB", "staging up to 3 MB", "of the device"):
        assert part in text
    assert "2.8 M parameters" in estimated_memory(parse({**_tiny()}))


def test_a_run_is_told_its_memory_and_refused_only_for_what_cannot_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = config(cluster={"gpus_per_worker": 0})
    shape = AutoConfig.for_model(**SHAPES["qwen2"], vocab_size=400, pad_token_id=0, bos_token_id=1)
    with caplog.at_level(logging.INFO, "app"):
        memory_check.tell_memory(shape, settings, 4)
    assert "memory of a rank of 4" in caplog.text
    monkeypatch.setattr(memory_check, "_host_bytes", lambda: 100_000)
    with pytest.raises(ConfigError, match="the host has 100 kB"):
        memory_check.tell_memory(shape, settings, 4)

    def cannot(*_: object) -> ModelSizes:
        raise NotImplementedError("no meta kernel")

    monkeypatch.setattr(memory_check, "model_sizes", cannot)
    memory_check.tell_memory(shape, settings, 4)
    assert "no memory estimate: no meta kernel" in caplog.text


def _tiny() -> dict[str, object]:
    from app.config import load_config

    return load_config("tiny").resolved()
