"""The memory estimate of a run: the model's sizes from its configuration alone, and what this machine has."""

import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from app.adapters import choose_trainable
from app.config import Config
from app.memory import ModelSizes, check, describe, estimate
from app.shape import model_shape
from app.tokens import load_tokenizer
from layercheck.errors import ConfigError
from layercheck.zero3 import describe_model

log = logging.getLogger("app")
_CGROUP = Path("/sys/fs/cgroup/memory.max")


def model_sizes(shape: Any, config: Config) -> ModelSizes:
    """Counts the parameters of a model that takes no memory."""
    with torch.device("meta"):
        model = choose_trainable(AutoModelForCausalLM.from_config(shape), config)
    text = shape.get_text_config()
    layers: dict[str, int] = {}
    trainable = with_residuals = 0
    checkpoint = config.checkpoint
    for layer in describe_model(model).layers:
        name = layer.name.removesuffix(".frozen")
        layers[name] = layers.get(name, 0) + layer.numel
        if layer.trainable:
            trainable += layer.numel
            has_them = checkpoint.method == "layercheck" and checkpoint.settings.residual.covers(layer.name)
            with_residuals += layer.numel if has_them else 0
    return ModelSizes(
        params=sum(layers.values()),
        trainable=trainable,
        with_residuals=with_residuals,
        largest_layer=max(layers.values()),
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        vocab=text.vocab_size,
    )


def estimated_memory(config: Config) -> str:
    """The estimate for the largest number of workers, as a line for a person. No memory is taken for it.

    Raises:
        ConfigError: the model or the tokenizer cannot be used.
    """
    with tempfile.TemporaryDirectory() as folder:
        shape = model_shape(config, load_tokenizer(config, Path(folder)))
    sizes = model_sizes(shape, config)
    workers = config.cluster.workers
    return describe(estimate(sizes, config, workers), sizes, workers)


def tell_memory(shape: Any, config: Config, world_size: int) -> None:
    """Prints the estimate and compares it with the memory of this rank's device and host.

    Raises:
        ConfigError: it cannot fit.
    """
    try:
        sizes = model_sizes(shape, config)
    except ConfigError:
        raise
    except RuntimeError as error:  # also NotImplementedError: not every model can be built of nothing
        log.warning("no memory estimate: %s", error)
        return
    needed = estimate(sizes, config, world_size)
    log.info("%s", describe(needed, sizes, world_size))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    warning = check(needed, _device_bytes(), _host_bytes(), ranks)
    if warning is not None:
        log.warning("%s", warning)


def _device_bytes() -> int | None:
    return int(torch.cuda.mem_get_info()[1]) if torch.cuda.is_available() else None


def _host_bytes() -> int:
    """Memory of the machine, or of the container where that is less."""
    whole = int(psutil.virtual_memory().total)
    try:
        return min(whole, int(_CGROUP.read_text()))
    except (OSError, ValueError):  # no container, or one without a limit ("max")
        return whole
