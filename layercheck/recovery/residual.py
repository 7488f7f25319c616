"""[pure] Cuts a residual's bytes to what a rank wants of them, at any world size."""

from layercheck.errors import DamagedShardError
from layercheck.manifest import LayerPlan
from layercheck.persistence.quantise import Code, Floats, dequantise
from layercheck.persistence.shard_file import RESIDUAL, SCALE, SliceMeta, TensorRange
from layercheck.recovery.scatter import Array


def distance(
    plan: LayerPlan, held: SliceMeta, tensors: dict[str, TensorRange], raw: Array, begin: int
) -> Floats:
    """How far one slice had come from its version, shape (held.numel,).

    Args:
        plan: of the layer; its version has to be the base.
        held: what the file says of the slice.
        tensors: those of the slice, by state.
        raw: the bytes of the whole layer.
        begin: where they begin in the file.

    Raises:
        DamagedShardError: this is no residual of that version.
    """
    about = held.residual
    if about is None or (about.base_step, about.base_attempt) != (plan.step, plan.attempt):
        raise DamagedShardError(f"parameter {held.parameter}: {about} is not of version {plan.step}")
    code = Code(about.bits, about.block)
    codes, scales = tensors[RESIDUAL], tensors[SCALE]
    if (codes.dtype, codes.numel) != (code.dtype, code.num_codes(held.numel)):
        raise DamagedShardError(f"parameter {held.parameter}: {codes.numel} codes of {codes.dtype}")
    if scales.numel != code.num_scales(held.numel):
        raise DamagedShardError(f"parameter {held.parameter}: {scales.numel} scales")
    return dequantise(
        _bytes(codes, raw, begin).view("i1" if code.bits == 8 else "u1"),
        _bytes(scales, raw, begin).copy().view("<u2"),
        held.numel,
        code,
    )


def _bytes(tensor: TensorRange, raw: Array, begin: int) -> Array:
    return raw[tensor.begin - begin : tensor.end - begin]
