"""Where this rank's parts of the parameters lie in the flat fp32 partitions of the optimizer's sub-groups."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from layercheck.layers import ParamSpec


@dataclass(frozen=True, slots=True)
class ParamSlice:
    """This rank's part of one parameter.

    Attributes:
        offset: first element of the part in the flattened parameter.
        numel: real elements of the part, without padding; may be 0.
        sub_group: index of the optimizer sub-group, -1 for a frozen parameter.
        begin: first element of the part in the sub-group's flat tensor.
    """

    spec: ParamSpec
    layer: str
    offset: int
    numel: int
    sub_group: int
    begin: int


@dataclass(frozen=True, slots=True)
class SubGroup:
    """One optimizer sub-group: the unit of one `optimizer.step()` call.

    `flat` is this rank's fp32 partition, padding included; `segments` are its runs of real elements as
    (begin, length).
    """

    index: int
    group: int
    layer: str
    flat: Tensor
    segments: tuple[tuple[int, int], ...]


def merge(parts: Sequence[ParamSlice]) -> tuple[tuple[int, int], ...]:
    """The runs of real elements of parts that are given in the order of `begin`: (begin, length) each."""
    segments: list[tuple[int, int]] = []
    for part in parts:
        if part.numel == 0:
            continue
        if segments and sum(segments[-1]) == part.begin:
            segments[-1] = (segments[-1][0], segments[-1][1] + part.numel)
        else:
            segments.append((part.begin, part.numel))
    return tuple(segments)
