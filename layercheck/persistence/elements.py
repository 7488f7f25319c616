"""The types of torch by their names in safetensors, and bytes seen as elements of one of them."""

import torch
from torch import Tensor

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""safetensors dtype -> torch dtype."""
DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def elements(raw: Tensor, dtype: str) -> Tensor:
    """Bytes of shape (nbytes,), uint8, as elements of a safetensors dtype; a view of the same memory.

    Torch refuses to see an empty tensor as wider elements; a rank may own nothing of a small parameter.
    """
    wide = TORCH_DTYPES[dtype]
    return raw.view(wide) if raw.numel() else torch.empty(0, dtype=wide)
