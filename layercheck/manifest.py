"""The values that travel: one frozen record for each arrow of a save and of a recovery.

Records that storage keeps are pydantic models, checked when read back; nothing here does any input or output.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator

from layercheck.groups import OptimizerGroup
from layercheck.layers import LayerMap
from layercheck.lost import over_all

FORMAT_VERSION = 1
Reason = Literal["drift", "age", "full", "preemption", "residual", "memory"]
SaveKind = Literal["version", "residual"]
ENDED_WELL = ("completed", "fenced", "preempted")  # ends of an attempt that are no failure
TrainerState = dict[str, Any]
"""JSON values only; always has `step` (int, the optimizer step after which it was taken)."""


class Record(BaseModel):
    """Base of the records that storage keeps: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# ---------------- saving: measure (`drift_report`) -> decide (`decision`) -> copy -> write

MEMORY_PART = 9999
"""Part number of events that are kept in the memory of the nodes alone; no last save has so many parts."""


class EventId(Record):
    """One event: versions taken at one step by one attempt; `part` counts further events of the same step."""

    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    part: int = Field(0, ge=0)

    @property
    def in_memory(self) -> bool:
        """True for an event that no storage ever sees."""
        return self.part == MEMORY_PART

    @property
    def folder(self) -> str:
        """Path below the `layercheck` folder."""
        suffix = f".p{self.part:02d}" if self.part else ""
        return f"events/step-{self.step:08d}.a{self.attempt:03d}{suffix}"

    @property
    def commit_file(self) -> str:
        """Path of the record that makes the event exist."""
        return f"{self.folder}/commit.parquet"

    def shard_file(self, rank: int) -> str:
        """Path of one rank's slices."""
        return f"{self.folder}/rank-{rank:05d}.safetensors"

    @classmethod
    def parse(cls, folder: str) -> Self | None:
        """The event of a folder name (`step-00000123.a002`), or None if no event has exactly that name."""
        match = re.fullmatch(r"(?:events/)?step-(\d{8,})\.a(\d{3,})(?:\.p(\d{2,}))?", folder)
        if not match or not int(match[2]):
            return None
        event = cls(step=int(match[1]), attempt=int(match[2]), part=int(match[3] or 0))
        return event if event.folder == f"events/{folder.removeprefix('events/')}" else None


class ShardRecord(Record):
    """One row of `commit.parquet`: one rank's part of one layer's version.

    `begin` and `end` are the byte range of the layer's tensors inside `file` (a path below the `layercheck`
    folder); `xxh3_128` is the hex digest of exactly these bytes (the file's header has a digest of its own).
    A rank that owns no element of the layer has an empty range. A residual names the version that it adds to.
    """

    layer: str
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    part: int = Field(0, ge=0)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    file: str
    begin: int = Field(ge=0)
    end: int = Field(ge=0)
    xxh3_128: str
    drift: float
    threshold: float
    age: int
    reason: Reason
    snapshot_s: float
    write_s: float
    kind: SaveKind = "version"
    base_step: int = Field(-1, ge=-1)
    base_attempt: int = Field(0, ge=0)

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's part."""
        return self.end - self.begin

    @property
    def event(self) -> EventId:
        """The event that this row belongs to."""
        return EventId(step=self.step, attempt=self.attempt, part=self.part)

    @field_validator("file")
    @classmethod
    def _inside_the_store(cls, value: str) -> str:
        if value.startswith("/") or ".." in value.split("/") or "\\" in value or "://" in value:
            raise ValueError(f"file={value!r} leaves the store")
        return value


# ---------------------------------------------------------------- lineage and commits


class LineageLink(Record):
    """One attempt as its successors see it (I15).

    Attributes:
        attempt: its number.
        r_b: last step that counted as done when it began (resume step - 1).
        predecessor: attempt before it in this lineage, 0 for the first.
        saw_step: step of the newest commit of the predecessor that it saw, -1 for none.
    """

    attempt: int = Field(ge=1)
    r_b: int = Field(ge=0)
    predecessor: int = Field(ge=0)
    saw_step: int = Field(ge=-1)


class AttemptRecord(Record):
    """`attempts/aNNN.json`: the claim that fences all older attempts. `lineage` ends with its own link."""

    attempt: int = Field(ge=1)
    token: str
    submission: str
    world_size: int = Field(ge=1)
    mode: str
    r_b: int = Field(ge=0)
    trainer_state: TrainerState
    lineage: tuple[LineageLink, ...]


class Progress(Record):
    """`attempts/aNNN.progress.json`: how far an attempt is known to have come."""

    attempt: int = Field(ge=1)
    step: int = Field(ge=0)
    trainer_state: TrainerState
    drift: dict[str, float]
    ended: str | None = None
    """None while it runs; else how it ended: `completed`, `failed`, `fenced`, `preempted`."""
    reason: str = ""
    """Why it ended, in words."""
    beat: int = Field(0, ge=0)
    """Counts the writes of this file: who watches it sees life also while a long step runs."""


class Commit(Record):
    """The content of one `commit.parquet`. `lineage` is that of the attempt that wrote it."""

    event: EventId
    records: Sequence[ShardRecord]
    trainer_state: TrainerState
    lineage: tuple[LineageLink, ...]

    @cached_property
    def by_layer(self) -> dict[str, Sequence[ShardRecord]]:
        """Layer -> its shards, in rank order."""
        layers: dict[str, list[ShardRecord]] = {}
        for record in sorted(self.records, key=lambda row: row.rank):
            layers.setdefault(record.layer, []).append(record)
        return {layer: tuple(rows) for layer, rows in layers.items()}

    @cached_property
    def bases(self) -> dict[str, tuple[int, int]]:
        """Layer of a residual -> (step, attempt) of the version that it adds to."""
        first = {layer: rows[0] for layer, rows in self.by_layer.items()}
        return {
            layer: (row.base_step, row.base_attempt) for layer, row in first.items() if row.kind == "residual"
        }

    @cached_property
    def whole_layers(self) -> tuple[str, ...]:
        """Layers of which the rows of all ranks are here."""
        ranks = list(range(self.records[0].world_size)) if self.records else []
        return tuple(name for name, rows in self.by_layer.items() if [row.rank for row in rows] == ranks)


class RunRecord(Record):
    """`run.json`: what must agree for a store to be continued, and what a person wants to know of a run."""

    format_version: int = FORMAT_VERSION
    run_id: str
    name: str
    layer_map: LayerMap
    optimizer: str
    """Class name of the torch optimizer."""
    optimizer_groups: tuple[OptimizerGroup, ...] = ()
    tied: dict[str, str] = {}
    """Further name of a shared parameter -> the name that its layer has it under."""
    buffers: tuple[str, ...] = ()
    """Buffers that belong to the model's state dict; their values are not kept."""
    frozen_hashes: dict[str, str] = {}
    """Frozen layer -> xxh3-128 of its parameters, where these are in no event (`frozen: source`)."""
    model_config_json: dict[str, Any] = {}
    """The model's own `config.json`, empty if it has none."""
    tokenizer_files: dict[str, str] = {}
    config: dict[str, Any] = {}
    """Resolved settings: `checkpoint` (LayerCheckConfig) and whatever the application adds."""

    @cached_property
    def stored(self) -> LayerMap:
        """The layers that have versions."""
        return self.layer_map.without(self.frozen_hashes)


# ------------------------------------------------- recovery: plan -> fetch -> install; then `receipt.Receipt`


ROW_KEYS = ("name", "step", "attempt", "age", "residual", "lost", "lost_drift")


class PlannedSave(Record):
    """A save that recovery takes with a version (its residual), or in its place (a newer one in memory)."""

    step: int = Field(ge=1)
    attempt: int = Field(ge=1)
    shards: tuple[ShardRecord, ...]


class LayerPlan(Record):
    """The version of one layer that recovery will load. `lost` is lost steps, `age` is t_fail - step.

    With a residual the weights are those of its step, and `lost` counts from there; the moments stay those of
    the version, whose age is `age`. With a version in memory `age` and `lost` are of that one; the others say
    what the storage has, from which the next versions and the age bound (I1) count.
    """

    layer: str
    numel: int = Field(ge=0)
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    age: int = Field(ge=0)
    lost: int = Field(ge=0)
    reason: Reason
    shards: tuple[ShardRecord, ...]
    lost_drift: float | None = None
    """Movement over the lost steps, see `RecoveryPlan.measure`; None if unknown."""
    fallback: bool = False
    """True when a newer live version or residual exists but is damaged or missing."""
    trainable: bool = True
    """A frozen layer never moves: its age is true but says nothing, so no figure of the plan counts it."""
    residual: PlannedSave | None = None
    memory: PlannedSave | None = None

    @property
    def loaded(self) -> Self:
        """The same with what will really be loaded in place of what the storage has."""
        if self.memory is None:
            return self
        return self.model_copy(update={**dict(self.memory), "residual": None, "memory": None})

    @property
    def row(self) -> dict[str, Any]:
        """What plans, receipts and status say of a layer alike, as JSON values with the keys `ROW_KEYS`."""
        values = (
            self.layer,
            self.step,
            self.attempt,
            self.age,
            self.residual.step if self.residual else None,
            self.lost,
            self.lost_drift,
        )
        return dict(zip(ROW_KEYS, values, strict=True))

    @property
    def all_shards(self) -> tuple[ShardRecord, ...]:
        """Those of the version, then those of the residual; or those in memory."""
        if self.memory is not None:
            return self.memory.shards
        return self.shards + (self.residual.shards if self.residual else ())

    @property
    def events(self) -> tuple[EventId, ...]:
        """That of the version, then that of the residual."""
        return tuple(dict.fromkeys(shard.event for shard in self.all_shards))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole version and its residual, all ranks."""
        return sum(shard.nbytes for shard in self.all_shards)


PlanMode = Literal["composite", "uniform", "strict", "warmup_rollback"]
FailSource = Literal["live", "journal", "commit", "memory"]


class RecoveryPlan(Record):
    """What recovery loads: one version per layer and the first step to run. The same on every rank (I8).

    Attributes:
        t_fail: last step known to be complete before the failure.
        t_fail_source: a living coordinator, the journal (progress file, attempt record), a commit, or memory.
        resume_step: first step to run; t_fail + 1 except in the modes that roll back.
        drift: layer -> carried D_l; infinity marks a layer whose selected event never became live.
        trainer_state: the state that belongs to step resume_step - 1.
        measure: of `lost_drift`, see `layercheck/lost.py`; empty if nothing is known.
    """

    mode: PlanMode
    world_size: int = Field(ge=1)
    t_fail: int = Field(ge=0)
    t_fail_source: FailSource
    resume_step: int = Field(ge=1)
    trainer_state: TrainerState
    drift: dict[str, float]
    layers: tuple[LayerPlan, ...]
    measure: str = ""

    @property
    def max_age(self) -> int:
        """Age of the oldest layer, in steps."""
        return max((layer.age for layer in self.layers if layer.trainable), default=0)

    @property
    def weighted_age(self) -> float:
        """sum(n_l * age_l) / sum(n_l), the paper's size-weighted staleness (section 3.3)."""
        return self._weighted([layer.age for layer in self._trainable])

    @property
    def lost_steps(self) -> float:
        """sum(n_l * lost_l) / sum(n_l): the lost progress of this failure, in steps."""
        return self._weighted([layer.lost for layer in self._trainable])

    @property
    def lost_drift(self) -> float | None:
        """The same in weight space: movement that does not come back, in `measure`."""
        known = [(layer.numel, layer.lost_drift) for layer in self._trainable]
        values = [(numel, drift) for numel, drift in known if drift is not None]
        return over_all(self.measure, values) if len(values) == len(known) else None

    @property
    def has_residuals(self) -> bool:
        """True if the weights of a layer come back rounded, see `layercheck/lost.in_words`."""
        return any(layer.loaded.residual is not None for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes that all ranks together will read."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def _trainable(self) -> list[LayerPlan]:
        return [layer for layer in self.layers if layer.trainable]

    def _weighted(self, steps: list[int]) -> float:
        return over_all("", zip((layer.numel for layer in self._trainable), steps, strict=True))


class BadShard(Record):
    """A shard that failed its check twice on one rank."""

    file: str
    layer: str
    step: int
    attempt: int
    error: str

    @property
    def event(self) -> EventId:
        """The event that its file belongs to; another one of the same step may hold the layer, too."""
        named = EventId.parse(self.file.rpartition("/")[0])
        return named or EventId(step=self.step, attempt=self.attempt)
