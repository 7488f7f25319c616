"""The settings of the methods that LayerCheck is compared with, one section each."""

from typing import Literal

from pydantic import Field

from app.section import Section

Method = Literal["layercheck", "none", "deepspeed", "dcp_async", "checkfreq"]
"""How a run is protected."""

WRITE_LOCAL_FILES = ("deepspeed", "dcp_async")
"""Methods whose files are written by others, who know folders alone."""


class IntervalSettings(Section):
    """A method that saves its full state every so many steps."""

    interval_steps: int = Field(100, ge=1)


class CheckFreqSettings(Section):
    """CheckFreq, see `checkfreq.py`."""

    mode: Literal["auto", "manual"] = "auto"
    """`auto` tunes the interval; `manual` keeps to `interval_steps`."""
    interval_steps: int = Field(100, ge=1)
    max_overhead: float = Field(0.05, gt=0, lt=1)
    """Share of a step that checkpoints may add."""
    profile_from: int = Field(5, ge=1)
    """First step of the attempt that is timed: those before it warm up."""
    profile_steps: int = Field(95, ge=1)
    """Steps that are timed before the first checkpoint decides the interval."""
    dynamic: bool = False
    """Watch the overhead to the end of the run, not only until it is within its budget once."""


class BaselineSettings(Section):
    """What the methods have in common, and the section of each."""

    keep: int = Field(2, ge=1)
    """Newest commits that stay in the storage; an older one goes when a new one is durable."""
    deepspeed: IntervalSettings = IntervalSettings()
    dcp_async: IntervalSettings = IntervalSettings()
    checkfreq: CheckFreqSettings = CheckFreqSettings()
