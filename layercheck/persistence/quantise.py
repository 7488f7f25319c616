"""[pure] A displacement as 8 or 4 bits a value, with one scale for each block of values.

Symmetric: a value is code * scale, |code| <= 127 or 7, scale = max|x| of the block / 127 or 7, rounded up to
bfloat16 (2 bytes). So an error is at most half a scale, and zero stays zero. Two 4-bit codes lie in a byte,
the earlier one in the low half, each as code + 8. The last block is filled up with zeros, which keeps scales
that follow at even places in a file.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8] | npt.NDArray[np.uint8]
Scales = npt.NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Code:
    """How values are coded: `bits` (8 or 4) a value, a scale for every `block` values (an even number)."""

    bits: Literal[4, 8]
    block: int

    @property
    def dtype(self) -> str:
        """Name of the codes' type in safetensors."""
        return "I8" if self.bits == 8 else "U8"

    def num_codes(self, numel: int) -> int:
        """Bytes of the codes of `numel` values, in whole blocks."""
        return self.num_scales(numel) * self.block * self.bits // 8

    def num_scales(self, numel: int) -> int:
        """Scales of `numel` values."""
        return -(-numel // self.block)


def quantise(values: Floats, code: Code) -> tuple[Codes, Scales]:
    """The codes and the scales (bfloat16 as raw bits) of finite values, shape (numel,)."""
    blocks = _in_blocks(values, code.block)
    largest = np.float32(127 if code.bits == 8 else 7)
    scales = _round_up(np.abs(blocks).max(axis=1, initial=0.0) / largest)
    wide = _widen(scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(wide[:, None] > 0, np.rint(blocks / wide[:, None]), np.float32(0))
    codes = found.astype(np.int8).reshape(-1)
    return (codes if code.bits == 8 else _pack(codes)), scales


def dequantise(codes: Codes, scales: Scales, numel: int, code: Code) -> Floats:
    """The values, shape (numel,)."""
    whole = (
        (codes if code.bits == 8 else _unpack(codes.view(np.uint8)))
        .astype(np.float32)
        .reshape(-1, code.block)
    )
    found: Floats = (whole * _widen(scales)[:, None]).reshape(-1)[:numel]
    return found


def _in_blocks(values: Floats, block: int) -> Floats:
    """Shape (blocks, block); the last one is filled up with zeros."""
    missing = -values.size % block
    whole = np.concatenate([values, np.zeros(missing, np.float32)]) if missing else values
    return whole.reshape(-1, block)


def _round_up(scales: Floats) -> Scales:
    """The next bfloat16 that is not smaller; of values that are not negative."""
    return ((scales.astype(np.float32).view(np.uint32) + np.uint32(0xFFFF)) >> np.uint32(16)).astype(
        np.uint16
    )


def _widen(scales: Scales) -> Floats:
    return (scales.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pack(codes: npt.NDArray[np.int8]) -> npt.NDArray[np.uint8]:
    shifted = (codes + np.int8(8)).astype(np.uint8)
    return shifted[0::2] | (shifted[1::2] << np.uint8(4))


def _unpack(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.int8]:
    halves = np.empty(2 * packed.size, dtype=np.int8)
    halves[0::2], halves[1::2] = packed & 0x0F, packed >> 4
    return halves - np.int8(8)
