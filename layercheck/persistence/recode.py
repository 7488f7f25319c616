"""From staged bytes to the bytes of the file, in the writer thread.

Versions pass as they are, and leave their weights in the base copies; weights that were staged for a residual
become their quantised distance from the base.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from layercheck.errors import StorageError
from layercheck.persistence.bases import Base, BaseCopies
from layercheck.persistence.quantise import Code, Floats, quantise
from layercheck.persistence.shard_file import MASTER

ELEMENTS = 1 << 18
"""Values that are quantised at once: a multiple of every block, small enough for the cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One staged tensor. `base` and `code` are those of a residual, None for a part of a version."""

    layer: str
    parameter: str
    state: str
    nbytes: int
    base: Base | None = None
    code: Code | None = None


def recoded(
    pieces: Sequence[Piece], chunks: Iterable[memoryview], bases: BaseCopies, event: Base
) -> Iterator[memoryview]:
    """The data of a shard file.

    Args:
        pieces: what was staged, in order.
        chunks: the staged bytes.
        bases: read for residuals, replaced by versions.
        event: (step, attempt) of the versions in it.

    Raises:
        StorageError: the staged bytes end too early.
        LayerCheckError: the base of a residual is not kept.
    """
    staged = _Staged(chunks)
    for layer, members in groupby(pieces, key=lambda piece: piece.layer):
        is_version = False
        for piece in members:
            if piece.base is not None and piece.code is not None:
                base = bases.of(layer, piece.parameter, piece.base)
                yield from _distance(staged, base, piece.nbytes // 4, piece.code)
            else:
                is_version = True
                yield from _passed(staged, piece, bases)
        if is_version and bases.covers(layer):
            bases.done(layer, event)


def _passed(staged: "_Staged", piece: Piece, bases: BaseCopies) -> Iterator[memoryview]:
    if piece.state != MASTER or not bases.covers(piece.layer):
        yield from staged.take(piece.nbytes)
        return
    copy, at = bases.room(piece.layer, piece.parameter, piece.nbytes // 4).view(np.uint8), 0
    for chunk in staged.take(piece.nbytes):
        copy[at : at + len(chunk)] = chunk
        at += len(chunk)
        yield chunk


def _distance(staged: "_Staged", base: Floats, numel: int, code: Code) -> Iterator[memoryview]:
    """All codes, then all scales."""
    scratch = np.empty(min(numel, ELEMENTS), dtype=np.float32)
    every = []
    for begin in range(0, numel, ELEMENTS):
        weights = scratch[: min(ELEMENTS, numel - begin)]
        staged.fill(weights)
        weights -= base[begin : begin + weights.size]
        codes, scales = quantise(weights, code)
        every.append(scales)
        yield codes.view(np.uint8).data
    if every:
        yield np.concatenate(every).view(np.uint8).data


class _Staged:
    """Takes bytes off a stream of chunks."""

    def __init__(self, chunks: Iterable[memoryview]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def take(self, nbytes: int) -> Iterator[memoryview]:
        """The next bytes, in pieces that are good until the next one is asked for."""
        while nbytes:
            if not self._rest:
                self._rest = self._next()
            part, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            nbytes -= len(part)
            yield part

    def fill(self, values: Floats) -> None:
        """Writes the next bytes into an array."""
        raw, at = values.view(np.uint8), 0
        for part in self.take(raw.size):
            raw[at : at + len(part)] = part
            at += len(part)

    def _next(self) -> memoryview:
        chunk = next(self._chunks, None)
        if chunk is None:
            raise StorageError("the snapshot ended before the last of its layers")
        return chunk
