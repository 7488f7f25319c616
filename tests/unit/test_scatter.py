"""Blocks of a file that are read straight to where their bytes belong."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercheck.recovery.scatter import Run, blocks, in_order


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=12),
    begin=st.integers(0, 5),
    block_bytes=st.integers(1, 20),
)
def test_every_byte_of_a_range_goes_once_to_its_run_or_to_spare_memory(
    lengths: list[tuple[int, bool]], begin: int, block_bytes: int
) -> None:
    runs, end = [], begin
    for length, is_wanted in lengths:
        if is_wanted:
            runs.append(Run(end, np.zeros(length, np.uint8)))
        end += length
    content = np.arange(end, dtype=np.uint8)
    spare = np.zeros(block_bytes, np.uint8)
    position = begin
    for at, memory in blocks(in_order(runs[::-1], begin, end), begin, end, block_bytes, spare):
        assert at == position
        assert sum(part.size for part in memory) == min(block_bytes, end - at)
        for part in memory:
            part[:] = content[position : position + part.size]
            position += part.size
        assert np.concatenate(memory).tobytes() == content[at:position].tobytes(), "no two parts share memory"
    assert position == end
    for run in runs:
        np.testing.assert_array_equal(run.into, content[run.begin : run.end])


@pytest.mark.parametrize("at", [(0, 4), (2, 9), (5, 8)])
def test_runs_that_overlap_or_leave_the_range_are_refused(at: tuple[int, int]) -> None:
    runs = [Run(begin, np.zeros(3, np.uint8)) for begin in at]
    assert in_order(runs, 0, 12) == runs, "they lie inside a larger range"
    with pytest.raises(ValueError, match=r"overlap|beyond"):
        in_order(runs, 1, 10)
    with pytest.raises(ValueError, match="overlap"):
        in_order([*runs, Run(at[0] + 2, np.zeros(1, np.uint8))], 0, 12)
