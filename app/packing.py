"""Documents side by side in sequences of equal length, and the mask that keeps them apart."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from app.tokens import IGNORED, Document

_OPEN_SEQUENCES = 64


@dataclass(slots=True)
class Packed:
    """One sequence under construction; `lengths` are those of its documents, the rest will be padding."""

    input_ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)

    def add(self, document: Document) -> None:
        """Appends one document; the caller checks that it fits."""
        self.input_ids += document.input_ids
        self.labels += document.labels
        self.lengths.append(len(document.input_ids))

    def padded(self, seq_len: int, pad_id: int) -> "Packed":
        """The sequence at its full length."""
        free = seq_len - len(self.input_ids)
        return Packed(self.input_ids + [pad_id] * free, self.labels + [IGNORED] * free, self.lengths)


def pack(documents: Iterable[Document], seq_len: int, *, packing: bool = True) -> Iterator[Packed]:
    """Puts each document into the fullest open sequence that has room (best fit); order decides all else.

    Args:
        documents: of at most `seq_len` tokens each.
        seq_len: tokens per sequence.
        packing: False gives every document a sequence of its own.
    """
    limit = _OPEN_SEQUENCES if packing else 0
    open_sequences: list[Packed] = []
    for document in documents:
        place = fullest(open_sequences, document, seq_len) if packing else None
        if place is None:
            place = Packed()
            open_sequences.append(place)
        place.add(document)
        if len(place.input_ids) == seq_len:
            open_sequences.remove(place)
            yield place
        elif len(open_sequences) > limit:
            yield open_sequences.pop(0)
    yield from open_sequences


def fullest(sequences: list[Packed], document: Document, seq_len: int) -> Packed | None:
    """The fullest of some sequences that has room for a document, None if none has."""
    room = seq_len - len(document.input_ids)
    fitting = [place for place in sequences if len(place.input_ids) <= room]
    return max(fitting, key=lambda packed: len(packed.input_ids), default=None)


def positions_and_documents(lengths: list[int], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Position within its document and number of its document per token; padding is one more document."""
    parts = [*lengths, seq_len - sum(lengths)]
    positions = np.concatenate([np.arange(length) for length in parts])
    return positions, np.repeat(np.arange(len(parts)), parts)


def attention_masks(documents: torch.Tensor, dtype: torch.dtype, shape: Any) -> Any:
    """The mask that a model wants for packed sequences.

    Args:
        documents: document numbers, shape (batch, seq_len).
        dtype: of the model, as sdpa demands.
        shape: the model's configuration, for layers that see only a window of the last tokens.

    Returns:
        One mask, see `block_diagonal_mask`; or a dict with one for each kind of layer, where a model has two.
    """
    text = shape.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    window = getattr(text, "sliding_window", None)
    if not window or window >= documents.shape[1] or kinds == {"full_attention"}:
        return block_diagonal_mask(documents, dtype)
    near = block_diagonal_mask(documents, dtype, window)
    if len(kinds) < 2:
        return near
    return {"full_attention": block_diagonal_mask(documents, dtype), "sliding_attention": near}


def block_diagonal_mask(
    documents: torch.Tensor, dtype: torch.dtype, window: int | None = None
) -> torch.Tensor:
    """The additive attention mask of packed sequences: causal, and never across documents.

    Args:
        documents: document numbers, shape (batch, seq_len).
        dtype: of the model, as sdpa demands.
        window: a token sees itself and the `window - 1` tokens before it; None for all.

    Returns:
        Shape (batch, 1, seq_len, seq_len); 0 where a token may look, else the smallest number of `dtype`.
        Padding looks at itself, so no row is empty and softmax stays finite.
    """
    same = documents[:, :, None] == documents[:, None, :]
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    seen = causal if window is None else causal.triu(1 - window)
    mask = torch.zeros(same.shape, dtype=dtype, device=documents.device)
    return mask.masked_fill(~(same & seen), torch.finfo(dtype).min)[:, None]
