"""Which parameters train: all of them, all but frozen layers, or adapters beside frozen weights."""

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from app.config import Config
from app.model_config import LoraConfig
from layercheck.errors import ConfigError
from layercheck.zero3 import describe_model


def choose_trainable(model: Any, config: Config) -> Any:
    """The model with what `model.freeze` and `model.lora` leave to train; the same on every rank.

    Raises:
        ConfigError: a pattern fits nothing, nothing is left to train, or `peft` is missing.
    """
    if config.model.lora is not None:
        model = _with_lora(model, config.model.lora, config.run.seed)
    freeze(model, config.model.freeze)
    return model


def freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Takes the parameters that fit a pattern out of training.

    Args:
        model: partitioned or not.
        patterns: names of layers or parameters, wildcards as in file names.

    Raises:
        ConfigError: a pattern fits nothing, or nothing is left to train.
    """
    layer_of = describe_model(model).layer_of
    for pattern in patterns:
        fitting = [
            param
            for name, param in model.named_parameters()
            if fnmatchcase(name, pattern) or fnmatchcase(layer_of[name].removesuffix(".frozen"), pattern)
        ]
        if not fitting:
            layers = list(dict.fromkeys(layer_of.values()))
            raise ConfigError(f"model.freeze={pattern!r} fits no layer of {layers} and no parameter")
        for param in fitting:
            param.requires_grad_(False)
    if not any(param.requires_grad for param in model.parameters()):
        raise ConfigError(f"model.freeze={list(patterns)} leaves nothing to train")


def _with_lora(model: Any, lora: LoraConfig, seed: int) -> Any:
    peft = _peft()
    targets = lora.targets if isinstance(lora.targets, str) else list(lora.targets)
    adapter = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
    )
    torch.manual_seed(seed)
    try:
        # Not in fp32 beside bf16 weights: DeepSpeed wants one type, and keeps fp32 masters itself.
        return peft.get_peft_model(model, adapter, autocast_adapter_dtype=False)
    except ValueError as error:
        raise ConfigError(f"model.lora.targets={lora.targets!r}: {error}") from None


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"model.lora needs the package peft ({error}): pip install 'layercheck[lora]', or leave it out"
        ) from None
    return peft
