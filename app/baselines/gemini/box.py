"""One box as a trainer of its host sees it: bytes in and out of its two slots."""

from collections.abc import Iterator

import torch
from torch import Tensor
from xxhash import xxh3_128

from app.baselines.gemini.memory import Region, attach, is_held
from app.baselines.gemini.records import NUM_SLOTS, RECORD_BYTES, BoxShape, SlotRecord

_PIECE_BYTES = 8 << 20


class Box:
    """A mapped box. Its memory is given back when nothing refers to its tensors any more.

    Args:
        shape: its sizes.
        region: where the store of this host keeps it.
    """

    def __init__(self, shape: BoxShape, region: Region) -> None:
        self.shape, self.region = shape, region
        self._bytes = torch.frombuffer(attach(region), dtype=torch.uint8)

    @property
    def is_kept(self) -> bool:
        """False once the store of this host has died: nobody could find what is written here."""
        return is_held(self.region)

    def steps(self) -> tuple[int | None, int | None]:
        """The step that each slot holds, None for none."""
        first, second = (self.record(slot) for slot in range(NUM_SLOTS))
        return None if first is None else first.step, None if second is None else second.step

    def record(self, slot: int) -> SlotRecord | None:
        """The record of a slot, if it is valid."""
        return SlotRecord.parse(self._at(self.shape.record_at(slot), RECORD_BYTES).numpy().tobytes())

    def wipe(self, slot: int) -> None:
        """Takes the record away: what comes now is not whole."""
        self._at(self.shape.record_at(slot), RECORD_BYTES).zero_()

    def seal(self, slot: int, record: SlotRecord) -> None:
        """Writes the record: the bytes of the slot are whole."""
        self._at(self.shape.record_at(slot), RECORD_BYTES).copy_(as_tensor(record.pack()))

    def meta(self, slot: int, nbytes: int) -> Tensor:
        """The first `nbytes` of the room for meta bytes, uint8."""
        return self._at(self.shape.meta_at(slot), nbytes)

    def data(self, slot: int, nbytes: int) -> Tensor:
        """The first `nbytes` of the room for data, uint8."""
        return self._at(self.shape.data_at(slot), nbytes)

    def digest(self, slot: int, meta_bytes: int, data_bytes: int) -> bytes:
        """The xxh3-128 of the meta bytes followed by the data."""
        return digest_of(self.meta(slot, meta_bytes), self.data(slot, data_bytes))

    def _at(self, begin: int, nbytes: int) -> Tensor:
        return self._bytes.narrow(0, begin, nbytes)


def as_tensor(raw: bytes) -> Tensor:
    """A copy of these bytes, uint8."""
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def digest_of(*parts: Tensor) -> bytes:
    """The xxh3-128 of some uint8 tensors, one after the other; piece by piece, to let other threads run."""
    digest = xxh3_128()
    for part in parts:
        for piece in pieces(part, _PIECE_BYTES):
            digest.update(piece.numpy().data)
    return digest.digest()


def pieces(tensor: Tensor, nbytes: int) -> Iterator[Tensor]:
    """Views of at most `nbytes` that make up a uint8 tensor, in order."""
    for begin in range(0, tensor.numel(), nbytes):
        yield tensor.narrow(0, begin, min(nbytes, tensor.numel() - begin))
