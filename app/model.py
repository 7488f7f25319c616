"""The model under ZeRO-3 and its engine."""

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import layercheck
from app.config import Config, ModelConfig, TrainConfig
from layercheck.errors import ConfigError
from layercheck.model_facts import buffer_names

_DROPOUT_KEYS = (
    "attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"
)  # fmt: skip


def deepspeed_config(config: Config, world_size: int) -> dict[str, Any]:
    """What `deepspeed.initialize` and `zero.Init` get; `train.deepspeed` is laid over it."""
    train = config.train
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": train.micro_batch,
        "gradient_accumulation_steps": train.accumulation(world_size),
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": train.dtype == "bf16"},
        "gradient_clipping": train.clip,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000_000,
    }
    return _merged(settings, train.deepspeed)


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    result = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merged(result[key], value) if both else value
    return result


def init_distributed(config: Config) -> None:
    """Joins DeepSpeed to the process group, or makes one from the usual environment variables."""
    torch.set_num_threads(max(1, int(config.cluster.cpus_per_worker)))
    backend = dist.get_backend() if dist.is_initialized() else config.cluster.process_group
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)


def build_model(config: Config, tokenizer: Any, world_size: int, *, for_recovery: bool = False) -> Any:
    """The model, its parameters partitioned over the ranks.

    Args:
        config: names a pretrained model or describes a fresh one; a fresh one depends on `run.seed` alone.
        tokenizer: decides the size of a fresh vocabulary.
        world_size: number of ranks.
        for_recovery: neither load nor initialise weights, because recovery will overwrite every one of them.

    Raises:
        ConfigError: the model cannot be loaded or does not fit the tokenizer or the data.
    """
    shape = _model_shape(config, tokenizer)
    # transformers looks for this object, alive, to partition the weights while it makes or loads them. Its
    # way also keeps the rotary tables in fp32, which a plain zero.Init around the constructor would round.
    partitioning = HfDeepSpeedConfig(deepspeed_config(config, world_size))
    torch.manual_seed(config.run.seed)
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    kind = {"attn_implementation": config.model.attention, "dtype": dtype}
    model = _empty(shape, kind) if for_recovery else None
    if model is None and config.model.path is None:
        model = AutoModelForCausalLM.from_config(shape, **kind)
    elif model is None:
        model = _pretrained(config.model.path, shape, kind)
    del partitioning
    model.config.use_cache = False
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return model


def _empty(shape: Any, kind: dict[str, Any]) -> Any:
    """The model with whatever lies in its memory, or None if recovery would leave some of that there.

    To initialise it, transformers gathers every module once: that can cost more than the recovery.
    """
    # One function does all of it (`PreTrainedModel._from_config`); if it should ever go, `patch` raises.
    with mock.patch("transformers.integrations.deepspeed.initialize_weights_zero3", return_value=None):
        model = AutoModelForCausalLM.from_config(shape, **kind)
    return None if buffer_names(model) else model  # buffers are in no store


def _pretrained(path: str, shape: Any, kind: dict[str, Any]) -> Any:
    try:
        return AutoModelForCausalLM.from_pretrained(path, config=shape, **kind)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={path!r} cannot be loaded: {error}") from None


def _model_shape(config: Config, tokenizer: Any) -> Any:
    model = config.model
    if model.path is not None:
        try:
            shape = AutoConfig.from_pretrained(model.path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={model.path!r} cannot be loaded: {error}") from None
    else:
        shape = _fresh_shape(model, tokenizer)
    _check_fits(shape, config, tokenizer)
    return _with_dropout(shape, model)


def _fresh_shape(model: ModelConfig, tokenizer: Any) -> Any:
    assert model.config is not None
    settings = {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        **model.config,
    }
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model.config={model.config!r}: {error}") from None


def _check_fits(shape: Any, config: Config, tokenizer: Any) -> None:
    if len(tokenizer) > shape.vocab_size:
        raise ConfigError(
            f"the tokenizer {config.model.tokenizer_name!r} has {len(tokenizer)} tokens, the model only "
            f"{shape.vocab_size}: change model.tokenizer or model.config.vocab_size"
        )
    limits = [getattr(shape, key, None) for key in ("max_position_embeddings", "sliding_window")]
    known = [limit for limit in limits if limit]
    if known and config.data.seq_len > min(known):
        raise ConfigError(
            f"data.seq_len={config.data.seq_len} is above the {min(known)} positions that the model sees"
        )


def _with_dropout(shape: Any, model: ModelConfig) -> Any:
    if model.dropout is not None:
        for key in _DROPOUT_KEYS:
            if hasattr(shape, key):
                setattr(shape, key, model.dropout)
    return shape


def build_engine(model: Any, config: Config, world_size: int) -> Any:
    """The ZeRO-3 engine: AdamW with one pair of groups per layer, whether a session will watch it or not."""
    train: TrainConfig = config.train
    groups = layercheck.layer_groups(model, train.weight_decay)
    if train.groups == "stock":
        groups = _stock_groups(groups)
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=optimizer, config=deepspeed_config(config, world_size)
    )
    engine.train()
    return engine


def _stock_groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same parameters in two groups, matrices and vectors, whether their decay differs or not."""
    merged: dict[bool, dict[str, Any]] = {}
    for group in groups:
        first = group["params"][0]
        matrices = len(getattr(first, "ds_shape", first.shape)) > 1  # partitioned or not
        empty = {"params": [], "weight_decay": group["weight_decay"]}
        merged.setdefault(matrices, empty)["params"] += group["params"]
    return list(merged.values())


def set_lr(engine: Any, lr: float) -> None:
    """Sets the rate of the next optimizer step, in all groups."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
