"""The settings of the methods that LayerCheck is compared with, one section each."""

from typing import Literal, Self

from pydantic import Field, model_validator

from app.section import Section

Method = Literal["layercheck", "none", "deepspeed", "dcp_async", "checkfreq", "lowdiff", "gemini"]
"""How a run is protected."""

WRITE_LOCAL_FILES = ("deepspeed", "dcp_async")
"""Methods whose files are written by others, who know folders alone."""


class IntervalSettings(Section):
    """A method that saves its full state every so many steps."""

    interval_steps: int = Field(100, ge=1)
    """Steps between two full saves."""


class CheckFreqSettings(Section):
    """CheckFreq, see `checkfreq.py`."""

    mode: Literal["auto", "manual"] = "auto"
    """`auto` tunes the interval; `manual` keeps to `interval_steps`."""
    interval_steps: int = Field(100, ge=1)
    """Steps between two full saves, with `manual`."""
    max_overhead: float = Field(0.05, gt=0, lt=1)
    """Share of a step that checkpoints may add."""
    profile_from: int = Field(5, ge=1)
    """First step of the attempt that is timed: those before it warm up."""
    profile_steps: int = Field(95, ge=1)
    """Steps that are timed before the first checkpoint decides the interval."""
    dynamic: bool = False
    """Watch the overhead to the end of the run, not only until it is within its budget once."""


class LowDiffSettings(Section):
    """LowDiff, see `lowdiff/method.py`. `auto` is the paper's optimum, measured in the first steps."""

    mode: Literal["topk", "dense"] = "dense"
    """`topk`: training consumes the largest elements of each gradient alone, as published; `dense`: all of
    it, in 16 bits."""
    rho: float = Field(0.01, gt=0, le=1)
    """Share of each gradient that `topk` keeps."""
    batch: int | Literal["auto"] = 1
    """Steps whose differentials go into one file; a crash loses up to so many."""
    base_every: int | Literal["auto"] = 100
    """Steps between two bases; a recovery replays up to so many."""
    mtbf_h: float | None = Field(None, gt=0)
    """Mean hours between failures, for `auto`."""
    profile_steps: int = Field(20, ge=3)
    """Steps that are timed before `auto` decides; each is its own batch."""
    pending: int = Field(4, ge=1)
    """Batches that may wait in host memory for the storage before training waits."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in ("batch", "base_every"):
            value = getattr(self, name)
            if value == "auto" and self.mtbf_h is None:
                raise ValueError(f"checkpoint.baseline.lowdiff.{name}='auto' needs lowdiff.mtbf_h (hours)")
            if value != "auto" and value < 1:
                raise ValueError(f"checkpoint.baseline.lowdiff.{name}={value} must be at least 1, or 'auto'")
        return self


class GeminiSettings(Section):
    """GEMINI, see `gemini/method.py`."""

    interval_steps: int = Field(1, ge=1)
    """Steps between two copies into host memory."""
    storage_every: int = Field(1000, ge=1)
    """Steps between two checkpoints in the storage, for the loss of both hosts of a shard."""
    chunk_bytes: int = Field(16 << 20, ge=1)
    """Bytes in flight to the peer."""
    wait_s: float = Field(60, gt=0)
    """Limit of a copy, of a transfer and of a call to a store. Then host copies stop, training goes on."""
    keep_s: float = Field(3600, gt=0)
    """Seconds for which a host keeps its copies after its last trainer has gone."""


class BaselineSettings(Section):
    """What the methods have in common, and the section of each."""

    keep: int = Field(2, ge=1)
    """Newest commits that stay in the storage; an older one goes when a new one is durable."""
    deepspeed: IntervalSettings = IntervalSettings()
    dcp_async: IntervalSettings = IntervalSettings()
    checkfreq: CheckFreqSettings = CheckFreqSettings()
    lowdiff: LowDiffSettings = LowDiffSettings()
    gemini: GeminiSettings = GeminiSettings()
