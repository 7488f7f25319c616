"""The model under ZeRO-3 and its engine."""

from typing import Any
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import set_z3_leaf_modules
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations import HfDeepSpeedConfig

import layercheck
from app.adapters import choose_trainable
from app.config import Config, TrainConfig
from app.shape import model_shape
from layercheck.errors import ConfigError
from layercheck.model_facts import buffer_names


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
    if train.offload:
        pinned = config.cluster.gpus_per_worker > 0
        settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
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
        for_recovery: neither load nor initialise weights, because recovery will overwrite every one of them
            (unless frozen ones are to come from where they came before).

    Raises:
        ConfigError: the model cannot be loaded or does not fit the tokenizer or the data.
    """
    shape = model_shape(config, tokenizer)
    # transformers looks for this object, alive, to partition the weights while it makes or loads them. Its
    # way also keeps the rotary tables in fp32, which a plain zero.Init around the constructor would round.
    partitioning = HfDeepSpeedConfig(deepspeed_config(config, world_size))
    torch.manual_seed(config.run.seed)
    dtype = torch.bfloat16 if config.train.dtype == "bf16" else torch.float32
    kind = {"attn_implementation": config.model.attention, "dtype": dtype}
    model = _empty(shape, kind) if for_recovery and not _are_in_no_store(config) else None
    if model is None and config.model.path is None:
        model = AutoModelForCausalLM.from_config(shape, **kind)
    elif model is None:
        model = _pretrained(config.model.path, shape, kind)
    del partitioning
    model.config.use_cache = False
    # The loss is that of the answers alone; and a model that counts its routing cannot read packed masks.
    model.config.output_router_logits = False
    _mark_experts(model)
    if config.model.gradient_checkpointing:
        model.gradient_checkpointing_enable()
    return choose_trainable(model, config)


def _are_in_no_store(config: Config) -> bool:
    """True if recovery puts nothing into the frozen weights: it only checks them."""
    checkpoint, model = config.checkpoint, config.model
    some_frozen = bool(model.freeze) or model.lora is not None
    return some_frozen and checkpoint.method == "layercheck" and checkpoint.settings.frozen == "source"


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


def _mark_experts(model: nn.Module) -> None:
    """ZeRO-3 gathers a block of experts as a whole: which of them a rank needs depends on its tokens."""
    blocks = {type(module) for module in model.modules() if isinstance(_experts(module), nn.Module)}
    if blocks:
        set_z3_leaf_modules(model, list(blocks))


def _experts(module: nn.Module) -> Any:
    return module._modules.get("experts")


def build_engine(model: Any, config: Config, world_size: int) -> Any:
    """The ZeRO-3 engine: AdamW with one pair of groups per layer, whether a session will watch it or not."""
    train: TrainConfig = config.train
    groups = layercheck.layer_groups(model, train.weight_decay)
    if train.groups == "stock":
        groups = _stock_groups(groups)
    engine, _, _, _ = deepspeed.initialize(
        model=model, optimizer=_adamw(groups, train), config=deepspeed_config(config, world_size)
    )
    engine.train()
    return engine


def _adamw(groups: list[dict[str, Any]], train: TrainConfig) -> torch.optim.Optimizer:
    if not train.offload:
        return torch.optim.AdamW(groups, lr=train.lr, betas=train.betas, eps=train.eps)
    # DeepSpeed refuses torch's own on the host: it would be several times slower than this one.
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    optimizer: torch.optim.Optimizer = DeepSpeedCPUAdam(
        groups, lr=train.lr, betas=train.betas, eps=train.eps, adamw_mode=True
    )
    return optimizer


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
