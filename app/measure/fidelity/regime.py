"""The conditions: two small models, what they learn first, and what they are fine-tuned on."""

from pathlib import Path
from typing import Any

from app.config import Config, parse
from app.measure.fidelity.spec import Length, ModelKind, RunSpec
from app.measure.fidelity.texts import Texts

SEQ_LEN = 96
BATCH = 8
BASE_LR = 2e-3
TUNE_LR = 3e-4
BASE_SEED = 11
_SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
MODELS: dict[ModelKind, dict[str, Any]] = {
    "llama": {"config": _SHAPE, "vocab_size": 1024},
    "wide_embedding": {"config": _SHAPE | {"num_hidden_layers": 2}, "vocab_size": 4096},
}
"""About a quarter and about two thirds of the parameters are in the embedding."""


def base_config(folder: Path, model: ModelKind, length: Length) -> Config:
    """The run that makes the model, from scratch, on the bundled text."""
    name = f"base-{model}-{length.base_steps}"
    return _config(
        folder,
        {
            "run": {"name": name, "storage": str(folder), "seed": BASE_SEED},
            "model": MODELS[model],
            "data": {"source": "bundled"},
            "train": {"steps": length.base_steps, "lr": BASE_LR, "lr_warmup_steps": 20},
            "checkpoint": {"settings": {"full_every": 0, "preemption_signals": []}},
        },
    )


def tuning_config(folder: Path, base: Path, texts: Texts, spec: RunSpec) -> Config:
    """The fine-tuning of `base`, a folder that `from_pretrained` reads."""
    return _config(
        folder,
        {
            "run": {"name": f"run-{spec.key}", "storage": str(folder), "seed": spec.seed},
            "model": {
                "path": str(base), "tokenizer": "bundled", "vocab_size": MODELS[spec.model]["vocab_size"]
            },
            "data": {"source": str(texts.train)},
            "train": {"steps": spec.length.steps, "lr": TUNE_LR, "lr_warmup_steps": 10},
            "checkpoint": {"settings": {"preemption_signals": [], **spec.checkpoint}},
        },
    )  # fmt: skip


def unlike(config: Config, model: ModelKind, seed: int) -> Config:
    """The same run with another model of the same shape: fresh weights that have nothing to do with it."""
    settings = config.resolved()
    settings["run"]["seed"] = seed
    settings["model"] |= {"path": None, "config": MODELS[model]["config"]}
    return parse(settings, "fidelity")


def evaluated(config: Config, source: Path, *, packing: bool) -> Config:
    """The configuration whose data are the held-out rows of `source`."""
    settings = config.resolved()
    settings["data"] |= {"source": str(source), "packing": packing}
    return parse(settings, "fidelity")


def _config(folder: Path, settings: dict[str, Any]) -> Config:
    settings["data"] |= {"seq_len": SEQ_LEN, "cache": str(folder / "data")}
    settings["train"] |= {"global_batch": BATCH, "micro_batch": BATCH, "dtype": "fp32"}
    settings["cluster"] = {"workers": 1}
    return parse(settings, "fidelity")
