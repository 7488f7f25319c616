"""[pure] Cuts a range of a file into blocks that are read straight to where their bytes belong."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.uint8]


class Run(NamedTuple):
    """A run of bytes of a file, from `begin` on, and the memory that it fills."""

    begin: int
    into: Array

    @property
    def end(self) -> int:
        """Where it ends in the file."""
        return self.begin + self.into.size


def in_order(runs: Sequence[Run], begin: int, end: int) -> list[Run]:
    """The runs in file order, empty ones left out.

    Raises:
        ValueError: one leaves the range `begin` to `end`, or two overlap.
    """
    ordered = sorted((run for run in runs if run.into.size), key=lambda run: run.begin)
    position = begin
    for run in ordered:
        if run.begin < position:
            raise ValueError(f"bytes {run.begin} to {run.end} overlap with others, or begin before {begin}")
        position = run.end
    if position > end:
        raise ValueError(f"bytes to {position} lie beyond the layer's end at {end}")
    return ordered


def blocks(
    runs: Sequence[Run], begin: int, end: int, block_bytes: int, spare: Array
) -> Iterator[tuple[int, list[Array]]]:
    """Each block as (offset, memory): arrays that take its bytes one after another.

    Args:
        runs: as `in_order` gave them.
        begin: first byte of the range.
        end: the byte after its last one.
        block_bytes: size of a block; the last may be smaller.
        spare: memory for what no run wants, at least `block_bytes`; each block uses it again.
    """
    first = 0
    for at in range(begin, end, block_bytes):
        stop = min(at + block_bytes, end)
        while first < len(runs) and runs[first].end <= at:
            first += 1
        yield at, list(_memory(runs, first, at, stop, spare))


def _memory(runs: Sequence[Run], first: int, begin: int, end: int, spare: Array) -> Iterator[Array]:
    """One block. Its parts are read at once and hashed after that: no two share spare memory."""
    at = begin
    for index in range(first, len(runs)):
        run = runs[index]
        if run.begin >= end:
            break
        if at < run.begin:
            yield spare[at - begin : run.begin - begin]
            at = run.begin
        last = min(end, run.end)
        yield run.into[at - run.begin : last - run.begin]
        at = last
    if at < end:
        yield spare[at - begin : end - begin]
