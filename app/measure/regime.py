"""The conditions of the measurement: a model whose step takes about a second on two cores, often saved."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.config import Config, parse, set_key

WORLD_SIZE = 2
CHECKPOINT: dict[str, Any] = {
    "warmup_steps": 20,
    "warmup_full_every": 20,
    "target_interval": 30,
    "embedding_factor": 1,
    "s_max": 60,
    "full_every": 0,
    "metrics_flush_s": 5,
}


@dataclass(frozen=True, slots=True)
class Regime:
    """How long to measure. `num_steps` are measured steps of each arm after the warm-up."""

    num_steps: int
    num_write_pairs: int

    @property
    def last_step(self) -> int:
        """Number of the last step."""
        return int(CHECKPOINT["warmup_steps"]) + self.num_steps


@dataclass(frozen=True, slots=True)
class Size:
    """Of the measured model, whose blocks are six and whose embedding has 8192 rows."""

    hidden: int
    intermediate: int


SIZES = {"small": Size(256, 688), "medium": Size(448, 1216), "large": Size(640, 1728)}
"""6, 17 and 32 million parameters."""
FULL = Regime(num_steps=300, num_write_pairs=20)
QUICK = Regime(num_steps=170, num_write_pairs=10)


def config(
    storage: str, groups: str, num_steps: int, size: str = "large", items: Sequence[str] = ()
) -> Config:
    """Six blocks and an embedding, on the bundled text.

    Args:
        storage: folder of the runs; the tokenised data is shared by all arms.
        groups: `layer` or `stock`.
        num_steps: length of the learning rate's schedule.
        size: of `SIZES`.
        items: `--set` items that are laid over all that.
    """
    model = SIZES[size]
    settings: dict[str, Any] = {
        "run": {"name": groups, "storage": storage, "seed": 7},
        "model": {
            "config": {
                "model_type": "qwen2",
                "vocab_size": 8192,
                "hidden_size": model.hidden,
                "intermediate_size": model.intermediate,
                "num_hidden_layers": 6,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "max_position_embeddings": 256,
                "tie_word_embeddings": True,
            },
            "vocab_size": 2048,
        },
        "data": {"source": "bundled", "seq_len": 64, "max_rows": 200, "cache": f"{storage}/data"},
        "train": {
            "steps": num_steps,
            "global_batch": 2 * WORLD_SIZE,
            "micro_batch": 2,
            "lr": 1.0e-4,
            "schedule": "linear",
            "min_lr_ratio": 0.5,
            "groups": groups,
        },
        "checkpoint": {"method": "layercheck" if groups == "layer" else "none", "settings": {**CHECKPOINT}},
        "cluster": {"workers": WORLD_SIZE},
    }
    for item in items:
        set_key(settings, item)
    return parse(settings, "measuring regime")
