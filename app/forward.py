"""One micro-batch through the model: the loss of answer tokens, documents kept apart."""

from typing import Any

import torch
from torch.nn import functional

from app.data import Batch
from app.packing import attention_masks
from app.tokens import IGNORED


def answer_loss(model: Any, batch: Batch, attention: str, num_labels: float) -> torch.Tensor:
    """Sum of the cross entropy over the answer tokens of a micro-batch, divided by `num_labels`.

    Args:
        model: engine or module; `device` tells where it computes.
        batch: token ids and the layout of their documents.
        attention: implementation of the model's attention.
        num_labels: answer tokens of the global batch per micro-batch and rank, so that the mean over ranks
            and micro-batches is the mean over tokens: the same loss at every world size.
    """
    logits = packed_logits(model, batch, attention)
    labels = batch.labels.to(logits.device)[:, 1:].reshape(-1)
    shifted = logits[:, :-1].float().reshape(-1, logits.shape[-1])
    total = functional.cross_entropy(shifted, labels, ignore_index=IGNORED, reduction="sum")
    return total / num_labels


def packed_logits(model: Any, batch: Batch, attention: str) -> torch.Tensor:
    """Logits of shape (batch, seq_len, vocabulary); those of a document do not depend on its neighbours."""
    device = model.device
    inputs: dict[str, Any] = {
        "input_ids": batch.input_ids.to(device),
        "position_ids": batch.position_ids.to(device),
        "use_cache": False,
    }
    if attention != "flash_attention_2":
        # Flash attention finds the boundaries itself, where the positions begin again at 0.
        module = getattr(model, "module", model)
        inputs["attention_mask"] = attention_masks(batch.documents.to(device), module.dtype, module.config)
    logits: torch.Tensor = model(**inputs).logits
    return logits
