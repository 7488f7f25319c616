"""[pure] One rank's file of consecutive differentials, and the names that say which steps it holds.

`diffs/steps-00000011-00000020/rank-00001.diff` (see `diff_store.py`) is `<8 bytes: header length><16 bytes:
xxh3-128 of the header><JSON header><data>`; the data of a step is one byte range with a checksum in the
header. A file is written as a whole or not at all (`persistence.storage`), so a batch needs no commit record:
it exists when every rank's file does. A skipped step has a record and no data. The differentials of a batch
are not summed: with Adam a step of the sum is not the sum of the steps.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from xxhash import xxh3_128_digest, xxh3_128_hexdigest

from layercheck.errors import DamagedShardError
from layercheck.persistence.file_calls import Buffer

_LENGTH_BYTES, _DIGEST_BYTES = 8, 16
_START = _LENGTH_BYTES + _DIGEST_BYTES
_NAME = re.compile(r"steps-(\d{8,})-(\d{8,})")


class Consumed(BaseModel):
    """How the optimizer step used the gradient; replay gives the same values to the same calls.

    Attributes:
        norm: global norm of the scaled gradient, with its type (`persistence.scalars`).
        loss_scale: by which the loss was multiplied.
        clip: largest norm, 0 for no clipping.
        groups: scheduled settings (`lr`, `momentum`, `betas`) of each optimizer group.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    norm: dict[str, Any]
    loss_scale: float
    clip: float
    groups: tuple[dict[str, Any], ...]


class StepRecord(BaseModel):
    """One step. `begin` and `end` count from the start of the data; `consumed` is None for a skipped step."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int = Field(ge=1)
    consumed: Consumed | None
    trainer_state: dict[str, Any]
    begin: int = Field(ge=0)
    end: int = Field(ge=0)
    xxh3_128: str

    @property
    def skipped(self) -> bool:
        """True for a step whose update overflowed: its data is consumed, its weights are those before it."""
        return self.consumed is None


class BatchHeader(BaseModel):
    """What a file is. `layout` is a digest of this rank's slices: differentials fit no other partition."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    mode: Literal["topk", "dense"]
    dtype: str
    rho: float | None
    layout: str
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    steps: tuple[StepRecord, ...]


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The steps `first` to `last`, both included, of one batch."""

    first: int
    last: int

    @property
    def folder(self) -> str:
        """The name of the folder in which the files of all ranks lie."""
        return f"steps-{self.first:08d}-{self.last:08d}"

    @classmethod
    def named(cls, name: str) -> Self | None:
        """The span of a folder's name, None for any other name."""
        found = _NAME.fullmatch(name)
        span = cls(int(found[1]), int(found[2])) if found else None
        return span if span is not None and 1 <= span.first <= span.last else None


def spans_in(names: Iterable[str]) -> tuple[Span, ...]:
    """The batches among the names of a folder, in the order of their steps."""
    return tuple(sorted(span for name in names if (span := Span.named(name)) is not None))


def run_after(base: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    """The batches that follow a base of step `base` without a gap.

    The base holds the update of its own step: the first differential wanted is `base + 1`, wherever in a
    batch it lies.
    """
    run: list[Span] = []
    step = base
    for span in sorted(spans):
        if span.first <= step + 1 <= span.last:
            run.append(span)
            step = span.last
    return tuple(run)


def needless(oldest_base: int, spans: Iterable[Span]) -> tuple[Span, ...]:
    """Batches that no kept base needs: all of their steps are in the oldest one."""
    return tuple(span for span in spans if span.last <= oldest_base)


@dataclass(frozen=True, slots=True)
class StepData:
    """One step to be written: see `StepRecord`; `content` is empty for a skipped one."""

    step: int
    consumed: Consumed | None
    trainer_state: dict[str, Any]
    content: memoryview


def encode(header: BatchHeader, steps: Sequence[StepData]) -> list[Buffer]:
    """The chunks of a file: the header, completed by its steps, and their bytes."""
    records: list[StepRecord] = []
    chunks: list[Buffer] = []
    position = 0
    for each in steps:
        end = position + len(each.content)
        records.append(
            StepRecord(
                step=each.step,
                consumed=each.consumed,
                trainer_state=each.trainer_state,
                begin=position,
                end=end,
                xxh3_128=xxh3_128_hexdigest(each.content),
            )
        )
        chunks.append(each.content)
        position = end
    text = header.model_copy(update={"steps": tuple(records)}).model_dump_json().encode("ascii")
    return [len(text).to_bytes(_LENGTH_BYTES, "little") + xxh3_128_digest(text) + text, *chunks]


@dataclass(frozen=True, slots=True)
class Batch:
    """A file that was read and checked."""

    header: BatchHeader
    data: memoryview
    nbytes: int

    def of(self, record: StepRecord) -> memoryview:
        """The bytes of one step."""
        return self.data[record.begin : record.end]


def decode(raw: bytes, span: Span, path: str) -> Batch:
    """Checks all of a file.

    Raises:
        DamagedShardError: it is not what was written, or holds other steps than its name says.
    """
    try:
        length = int.from_bytes(raw[:_LENGTH_BYTES], "little")
        text = raw[_START : _START + length]
        if len(text) != length or xxh3_128_digest(text) != raw[_LENGTH_BYTES:_START]:
            raise ValueError("the digest of its header does not match")
        batch = Batch(BatchHeader.model_validate_json(text), memoryview(raw)[_START + length :], len(raw))
        records = batch.header.steps
        if [record.step for record in records] != list(range(span.first, span.last + 1)):
            raise ValueError(f"it does not hold the steps {span.first} to {span.last}")
        if any(xxh3_128_hexdigest(batch.of(record)) != record.xxh3_128 for record in records):
            raise ValueError("the checksum of a step does not match")
        return batch
    except (ValueError, ValidationError) as error:
        raise DamagedShardError(f"{path} is damaged: {error}", path=path) from error
