"""The learning rate as a pure function of the LR index: nothing to save, no jump on a resume."""

import math

from app.config import TrainConfig


def lr_at(index: int, total_steps: int, train: TrainConfig) -> float:
    """The learning rate of one optimizer step.

    Args:
        index: LR index of the step, from 0: optimizer steps before it that were not skipped.
        total_steps: number of steps of the whole run.
        train: `lr` is reached after the warm-up, `min_lr_ratio * lr` at the end.
    """
    warmup = warmup_steps(total_steps, train)
    if index < warmup:
        return train.lr * (index + 1) / warmup
    if train.schedule == "constant":
        return train.lr
    done = min(1.0, (index - warmup) / max(1, total_steps - warmup))
    left = 1 - done if train.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return train.lr * (train.min_lr_ratio + (1 - train.min_lr_ratio) * left)


def warmup_steps(total_steps: int, train: TrainConfig) -> int:
    """Steps during which the rate rises linearly."""
    if train.warmup_ratio is not None:
        return int(train.warmup_ratio * total_steps)
    return train.lr_warmup_steps or 0
