"""[pure] How a box, the memory of one copy of one shard, is laid out, and the record that makes a slot valid.

A box has two slots. A slot is one page with its record, then room for the meta bytes (JSON), then the data.
States of a slot: (1) record wiped, bytes being written; (2) bytes whole, record written. A process that dies
in (1) leaves a slot without a record; one that dies while it writes the record leaves one whose own checksum
is wrong. Either reads as an empty slot.
"""

import struct
from dataclasses import dataclass
from typing import Self

from xxhash import xxh3_64_digest

PAGE = 4096
NUM_SLOTS = 2
_MAGIC = b"LCGEMINI"
_FIELDS = struct.Struct("<8sq8sqqqq16s")
RECORD_BYTES = _FIELDS.size + 8


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """What a slot holds: the state of `shard`, of `world_size`, after optimizer step `step`.

    `attempt` is the random mark of the life of the worker group that took it: two lives may pass the same
    step, and their states are never mixed. `digest` is the xxh3-128 of the meta bytes followed by the data.
    """

    step: int
    attempt: bytes
    shard: int
    world_size: int
    meta_bytes: int
    data_bytes: int
    digest: bytes

    def pack(self) -> bytes:
        """`RECORD_BYTES` bytes, the last eight a checksum of the others."""
        body = _FIELDS.pack(
            _MAGIC,
            self.step,
            self.attempt,
            self.shard,
            self.world_size,
            self.meta_bytes,
            self.data_bytes,
            self.digest,
        )
        return body + xxh3_64_digest(body)

    @classmethod
    def parse(cls, raw: bytes) -> Self | None:
        """The record of these bytes; None if they hold none, or one that was cut off."""
        body, check = raw[: _FIELDS.size], raw[_FIELDS.size : RECORD_BYTES]
        if len(raw) < RECORD_BYTES or xxh3_64_digest(body) != check:
            return None
        magic, *values = _FIELDS.unpack(body)
        return cls(*values) if magic == _MAGIC else None


@dataclass(frozen=True, slots=True)
class BoxShape:
    """Room of one box: at most `meta_bytes` and `data_bytes` in each of its two slots."""

    meta_bytes: int
    data_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole box: 24 for each parameter of the shard with Adam, and a little."""
        return NUM_SLOTS * self.slot_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot, whole pages."""
        return PAGE + _pages(self.meta_bytes) + _pages(self.data_bytes)

    def holds(self, other: "BoxShape") -> bool:
        """True if this box has the room that `other` asks for."""
        return self.data_bytes >= other.data_bytes and self.meta_bytes >= other.meta_bytes

    def with_slack(self, nbytes: int) -> "BoxShape":
        """Room for the same state later: numbers in its texts grow longer, by a few bytes each."""
        return BoxShape(self.meta_bytes + nbytes, self.data_bytes + nbytes)

    def record_at(self, slot: int) -> int:
        """Where the record of a slot begins."""
        return slot * self.slot_bytes

    def meta_at(self, slot: int) -> int:
        """Where the meta bytes of a slot begin."""
        return self.record_at(slot) + PAGE

    def data_at(self, slot: int) -> int:
        """Where the data of a slot begin."""
        return self.meta_at(slot) + _pages(self.meta_bytes)


def slot_to_fill(steps: tuple[int | None, int | None], aligned: int) -> int:
    """The slot that the next copy may overwrite: never the one that holds the aligned step.

    Args:
        steps: the step that each slot holds, None for none.
        aligned: newest step that is complete on all ranks, 0 for none.
    """
    if aligned and steps[0] == aligned:
        return 1
    if aligned and steps[1] == aligned:
        return 0
    return min(range(NUM_SLOTS), key=lambda slot: steps[slot] or -1)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE
