"""Residuals as numbers: the error of the codes, and the way from staged bytes to those of the file."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.errors import LayerCheckError, StorageError
from layercheck.persistence import recode
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.quantise import Code, Floats, dequantise, quantise
from layercheck.persistence.recode import Piece, recoded

CODES = st.builds(Code, st.sampled_from([4, 8]), st.sampled_from([64, 128]))


def numbers(seed: int, count: int, scale: float = 1.0) -> Floats:
    """Values whose size differs from block to block, zeros among them."""
    draw = np.random.default_rng(seed)
    values = draw.standard_normal(count) * 10.0 ** draw.integers(-9, 3, count) * scale
    values[draw.random(count) < 0.1] = 0.0
    return values.astype(np.float32)


# ---------------------------------------------------------------------------------------------------- codes


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 700), CODES)
def test_no_value_is_off_by_more_than_half_a_scale_of_its_block(seed: int, count: int, code: Code):
    values = numbers(seed, count)
    codes, scales = quantise(values, code)
    assert (codes.size, scales.size) == (code.num_codes(count), code.num_scales(count))
    assert (codes.itemsize, scales.itemsize) == (1, 2)
    back = dequantise(codes, scales, count, code)
    assert back.dtype == np.float32
    assert back.size == count
    largest = 127 if code.bits == 8 else 7
    for begin in range(0, count, code.block):
        block, found = values[begin : begin + code.block], back[begin : begin + code.block]
        peak = float(np.abs(block).max())
        # A bfloat16 scale is up to 1/128 above the peak's own; denormal ones have steps of 2^-133.
        half = 0.5 * (peak / largest * (1 + 2**-7) + 2**-133)
        assert np.abs(block.astype(float) - found).max() <= half * (1 + 1e-6)
        assert not found[block == 0].any(), "zero stays zero"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 300), CODES)
def test_what_was_decoded_is_coded_to_itself(seed: int, count: int, code: Code):
    codes, scales = quantise(numbers(seed, count), code)
    back = dequantise(codes, scales, count, code)
    again = dequantise(*quantise(back, code), count, code)
    np.testing.assert_allclose(again, back, rtol=2**-7)


def test_a_block_knows_nothing_of_its_neighbours():
    code = Code(8, 64)
    values = np.concatenate([numbers(1, 64), 1e6 * np.ones(64, np.float32)])
    codes, scales = quantise(values, code)
    alone, scale = quantise(values[:64], code)
    np.testing.assert_array_equal(codes[:64], alone)
    assert scales[0] == scale[0]


# ----------------------------------------------------------------------------------------- through the writer


def cut(data: bytes, sizes: list[int]) -> Iterator[memoryview]:
    at = 0
    while at < len(data):
        for size in sizes:
            yield memoryview(data[at : at + size])
            at += size


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    numels=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 500), min_size=1, max_size=5),
    elements=st.sampled_from([128, 256, 1 << 18]),
    code=CODES,
)
def test_versions_pass_and_leave_their_weights_and_residuals_become_codes(
    seed: int, numels: list[int], sizes: list[int], elements: int, code: Code
):
    bases, staged, expected, pieces = BaseCopies(lambda layer: layer != "other"), b"", b"", []
    for index, numel in enumerate(numels):
        old, new = numbers(seed + index, numel), numbers(seed + index + 9, numel)
        bases.keep("moved", (3, 1), {})
        bases.room("moved", f"p{index}", numel)[:] = old
        pieces.append(Piece("moved", f"p{index}", "fp32", 4 * numel, (3, 1), code))
        codes, scales = quantise(new - old, code)
        staged, expected = staged + new.tobytes(), expected + codes.tobytes() + scales.tobytes()
    bases.done("moved", (3, 1))
    for layer in ("saved", "other"):
        for state in ("fp32", "exp_avg"):
            values = numbers(seed, numels[0]).tobytes()
            pieces.append(Piece(layer, "p", state, len(values)))
            staged, expected = staged + values, expected + values
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recode, "ELEMENTS", elements)
        found = b"".join(bytes(part) for part in recoded(pieces, cut(staged, sizes), bases, (9, 2)))
    assert found == expected
    np.testing.assert_array_equal(bases.of("saved", "p", (9, 2)), numbers(seed, numels[0]))
    with pytest.raises(LayerCheckError, match="kept are those of None"):
        bases.of("other", "p", (9, 2))


def test_a_residual_of_another_version_than_the_kept_one_is_refused():
    bases = BaseCopies(lambda layer: True)
    bases.keep("a", (3, 1), {"p": numbers(0, 8)})
    piece = Piece("a", "p", "fp32", 32, (4, 1), Code(8, 64))
    with pytest.raises(LayerCheckError, match=r"version \(4, 1\), kept are those of \(3, 1\)"):
        list(recoded([piece], [memoryview(bytes(32))], bases, (5, 1)))


def test_a_version_that_was_written_in_part_is_no_base():
    bases = BaseCopies(lambda layer: True)
    bases.keep("a", (3, 1), {"p": numbers(0, 8)})
    with pytest.raises(StorageError, match="ended before"):
        list(recoded([Piece("a", "p", "fp32", 32)], [memoryview(bytes(16))], bases, (5, 1)))
    with pytest.raises(LayerCheckError):
        bases.of("a", "p", (3, 1))
