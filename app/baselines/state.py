"""This rank's full state as bytes: fp32 weights, moments, Adam steps; 12 bytes a parameter, nothing gathered.

The bytes are those of a shard file of LayerCheck that holds every layer, so each method saves the same state
and any safetensors reader opens it. Counters, loss scale and scheduler are no part of it: they are in the
trainer state, which `Zero3Engine.set_global_state` puts back.

    capture(zero3, ...)     what to copy: views of live memory, no copy yet      (training thread)
    image.fill(captured)    copies it into reused host memory                    (any thread)
    install(zero3, image)   puts such bytes back into an engine                  (training thread, collective)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from layercheck.errors import StoreMismatchError
from layercheck.manifest import EventId
from layercheck.partition import ParamSlice
from layercheck.persistence.elements import elements
from layercheck.persistence.shard_file import DTYPE_BYTES, ShardHeader, ShardLayout, TensorRange, header_of
from layercheck.persistence.snapshot import lay_out
from layercheck.recovery.install import finish
from layercheck.zero3 import Zero3Engine

BLOCK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Captured:
    """The file of a state that still lies in live memory: its layout, and what fills it, in order."""

    shard: ShardLayout
    sources: tuple[Tensor, ...]

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.shard.total


def capture(zero3: Zero3Engine, step: int, attempt: int) -> Captured:
    """Names what is to be copied. Its bytes are those of `step` until the optimizer updates again."""
    parts = [part for parts in zero3.slices.values() for part in parts]
    shard, sources = lay_out(zero3, EventId(step=step, attempt=attempt), parts)
    return Captured(shard, tuple(sources))


class StateImage:
    """Host memory for one state file; reused, since fresh memory costs more than the copy into it.

    Args:
        pin: page-lock it, for copies from an accelerator.
    """

    def __init__(self, pin: bool = False) -> None:
        self._pin = pin
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._nbytes = 0

    def fill(self, captured: Captured) -> None:
        """Copies the state; at return the optimizer may update again."""
        self.room(captured.nbytes)
        header = torch.frombuffer(bytearray(captured.shard.header), dtype=torch.uint8)
        position = len(captured.shard.header)
        self._memory[:position].copy_(header)
        for source in captured.sources:
            raw = source.view(torch.uint8)
            self._memory[position : position + raw.numel()].copy_(raw)
            position += raw.numel()

    def room(self, nbytes: int) -> memoryview:
        """Makes the image `nbytes` long, its content undefined; the view to fill it by other means."""
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)
        self._nbytes = nbytes
        return self.view

    @property
    def view(self) -> memoryview:
        """The bytes of the file."""
        return memoryview(self._memory[: self._nbytes].numpy())

    @property
    def tensor(self) -> Tensor:
        """The same as a tensor of shape (nbytes,), uint8."""
        return self._memory[: self._nbytes]

    def chunks(self) -> list[memoryview]:
        """The same in pieces for a storage."""
        view = self.view
        return [view[begin : begin + BLOCK_BYTES] for begin in range(0, len(view), BLOCK_BYTES)]


def install(zero3: Zero3Engine, image: Tensor, name: str) -> None:
    """Puts a state back, weights included. A collective.

    Args:
        zero3: an engine of the same model and number of ranks.
        image: bytes of a state file of this rank, checked by the caller; uint8, shape (nbytes,).
        name: where they come from, for errors.

    Raises:
        StoreMismatchError: it is the state of another model, rank or number of ranks.
        DamagedShardError: its header is not that of a state file.
    """
    view = memoryview(image.numpy())
    header = header_of(name, len(view), lambda begin, end: bytes(view[begin:end]))
    _check(zero3, header, name)
    zero3.begin_install()
    for sub_group in zero3.sub_groups:
        zero3.clear_state(sub_group.index)
    ranges: dict[str, list[TensorRange]] = {}
    for tensor in header.tensors:
        ranges.setdefault(tensor.parameter, []).append(tensor)
    for part in (part for parts in zero3.slices.values() for part in parts):
        tensors = {found.state: _tensor(image, found) for found in ranges[part.spec.name]}
        for key, tensor in tensors.items():
            zero3.room(part, key).copy_(tensor)
        scalars = {key: each.model_dump() for key, each in header.slices[part.spec.name].state.items()}
        zero3.set_scalars(part, scalars)
    finish(zero3)


def _tensor(image: Tensor, found: TensorRange) -> Tensor:
    raw = image[found.begin : found.end]
    # A view as wider elements must begin at a multiple of their size; after some bf16 it does not.
    return elements(raw.clone() if found.begin % DTYPE_BYTES[found.dtype] else raw, found.dtype)


def _check(zero3: Zero3Engine, header: ShardHeader, name: str) -> None:
    about = header.about
    if (about.rank, about.world_size) != (zero3.rank, zero3.world_size):
        raise StoreMismatchError(
            f"{name} is of rank {about.rank} of {about.world_size}, not of rank {zero3.rank} of "
            f"{zero3.world_size}: set cluster.workers={about.world_size}"
        )
    for part in (part for parts in zero3.slices.values() for part in parts):
        held = header.slices.get(part.spec.name)
        if held is None or _shape(part) != (held.shape, held.offset, held.numel):
            raise StoreMismatchError(
                f"{name} has no parameter {part.spec.name} of shape {list(part.spec.shape)}: it is the state "
                "of another model; give another run.name",
                parameter=part.spec.name,
            )


def _shape(part: ParamSlice) -> tuple[tuple[int, ...], int, int]:
    return part.spec.shape, part.offset, part.numel
