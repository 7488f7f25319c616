"""The settings of LayerCheck: one frozen, checked value. Unknown keys and contradictions are errors."""

from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layercheck.end_signals import signal_number
from layercheck.errors import ConfigError
from layercheck.layers import MASTER_BYTES, VERSION_BYTES


class DriftConfig(BaseModel):
    """How the movement of a layer is measured."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    norm: Literal["mean_abs", "rms", "rel_l2", "rel_l1"] = "mean_abs"
    """Scalar that an update of a layer becomes: mean or root mean square of its values, or relative to
    the weights."""
    kind: Literal["path", "displacement"] = "path"
    """`path`: sum of the updates since the newest version (paper 3.2). `displacement`: distance from it."""
    sample: Literal["auto", "exact", "sampled"] = "auto"
    """`auto`: exact on an accelerator and for small layers, sampled elsewhere (see `tracking/sample.py`)."""


class ResidualConfig(BaseModel):
    """Small saves between two versions of a layer: how far its weights are from the version, quantised."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    """Each rank then keeps one more fp32 copy of its weights in host memory, those of the newest versions."""
    bits: Literal[4, 8] = 8
    """Bits of a value. A version of Adam holds 96 bits a parameter."""
    block: Literal[64, 128] = 64
    """Values that share a scale, which takes 16 bits."""
    k_ratio: float = Field(0.1, gt=0, lt=1)
    """A residual is due when a layer moved by this part of K since its newest version or residual."""
    exclude: tuple[str, ...] = ()
    """Name patterns of layers without residuals, which need no copy either: `["embed_tokens", "*norm"]`."""

    @property
    def share(self) -> float:
        """Bytes of a residual / bytes of a version with Adam's moments."""
        return (self.bits + 16 / self.block) / (8 * VERSION_BYTES)

    @property
    def staged_share(self) -> float:
        """The same of the bytes that a step copies: fp32 weights, coded only when they are written."""
        return max(self.share, MASTER_BYTES / VERSION_BYTES)

    def nbytes(self, numel: int) -> int:
        """Bytes of a residual of `numel` values, up to a block on each rank."""
        return round(VERSION_BYTES * numel * self.share)

    def covers(self, layer: str) -> bool:
        """True if this layer gets residuals."""
        return self.enabled and not any(fnmatchcase(layer, pattern) for pattern in self.exclude)


class MemoryConfig(BaseModel):
    """Snapshots in shared memory, kept by a vault on each node: they outlive the worker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = False
    """Events pass through the memory of the node, and a vault writes them to the storage."""
    k_ratio: float = Field(0.03, ge=0, lt=1)
    """A layer is copied to memory alone when it moved by this part of K since its newest copy there, or when
    that copy is 1.5 times this part of `target_interval` old; 0: all layers at every step, which waits for
    the copies of the step before. After the warm-up."""
    budget_gb: float | None = Field(None, gt=0)
    """Most memory (10^9 bytes) that the vault of a node takes. Default: half of what is free in /dev/shm. Two
    copies of the state of the node's ranks are enough for `k_ratio: 0`, several for more."""
    replicas: int = Field(0, ge=0, le=1)
    """Copies on other nodes: with 1 what is in memory survives the loss of a node."""
    settle_s: float = Field(30, gt=0)
    """Longest wait at a restart for the vaults to commit what the ranks before have handed over."""


class LayerCheckConfig(BaseModel):
    """All settings of a session. Steps are optimizer steps, `_s` are seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    drift: DriftConfig = DriftConfig()
    """How far a layer has moved."""
    residual: ResidualConfig = ResidualConfig()
    """Small saves between two versions of a layer."""
    memory: MemoryConfig = MemoryConfig()
    """Newest versions in the memory of the nodes as well."""

    target_interval: float = Field(100, gt=0)
    """Wanted mean persist interval in steps; K0 is calibrated for it at the end of the warm-up."""
    k0: float | None = Field(None, gt=0)
    """Absolute threshold at `lr_ref`; replaces the calibration (the paper uses 1e-3)."""
    k0_per_lr: float | None = Field(None, gt=0)
    """Threshold as a multiple of `lr_ref`; replaces the calibration."""
    lr_ref: float | None = Field(None, gt=0)
    """Learning rate at which K_l is K0_l. Default: the group's initial rate, else the warm-up's largest."""
    embedding_factor: float = Field(10, gt=0)
    """K0 of embeddings as a multiple of the other layers' K0 (paper 3.4.3)."""
    k0_factors: dict[str, Annotated[float, Field(gt=0)]] = {}
    """Layer name pattern -> its K0 as a multiple of the global K0; the first that fits, before
    `embedding_factor`. Wildcards as in file names: `{"layers.0": 2.0, "*norm": 0.5}`."""
    overhead_budget: float | None = Field(None, gt=0, lt=1)
    """Part of the step time that saving may cost; K moves to meet it; `target_interval` is the start."""
    s_max: int = Field(400, ge=4)
    """No layer is ever older than this many steps, counted against committed versions (I1)."""
    max_event_share: float = Field(0.15, gt=0, le=1)
    """Largest part of the full state that one selective event may hold (one layer always may)."""
    selection: Literal["drift", "round_robin", "random", "full"] = "drift"
    """How due layers are chosen; all but `drift` are there for comparison, at equal bytes."""

    warmup_steps: int = Field(200, ge=2)
    """Steps of the run, not of the attempt, with full events only. K0 is calibrated in their second half."""
    warmup_full_every: int = Field(100, ge=1)
    """Steps between full events in the warm-up; at most 3/4 of `s_max`."""
    full_every: int = Field(2000, ge=0)
    """Steps between full events after the warm-up; 0 means none."""

    frozen: Literal["base", "source"] = "base"
    """Parts that do not train. `base`: they are written once, with the first full event. `source`: only their
    hashes are; the application loads the same weights at each start, and they are checked (I11)."""

    keep_versions: int = Field(2, ge=1)
    """Newest versions of each layer that are never collected."""
    keep_full: int = Field(1, ge=1)
    """Newest full events that are never collected."""

    failure_aware: bool = True
    """Lower K at a resume when failures come faster than the mean interval allows."""
    recovery: Literal["composite", "uniform", "strict"] = "composite"
    """`composite`: newest version of each layer. `uniform`: newest full event, steps since then run again.
    `strict`: composite, refused with a layer older than `strict_max_age`."""
    strict_max_age: int | None = Field(None, ge=0)
    """Largest age in steps that a `strict` recovery accepts."""
    probation_steps: int = Field(20, ge=0)
    """Steps after a recovery in which the versions before it are kept, should the loss turn non-finite."""

    on_bound: Literal["wait", "continue"] = "wait"
    """When a layer reaches `s_max` uncommitted: all ranks wait for the storage, or go on with an alert."""
    storage_wait_s: float = Field(600, gt=0)
    """Longest wait for the storage at the age limit; then the run ends with one error."""
    event_timeout_s: float = Field(300, gt=0)
    """An event that is incomplete after this long is declared lost; its layers are due again."""
    takeover_s: float = Field(30, gt=0)
    """A submission takes over a run whose progress file did not change for so long."""
    idle_s: float = Field(3600, gt=0)
    """Under Ray the coordinator ends itself after this long without a heartbeat."""
    scrub_hours: float = Field(24, ge=0)
    """Every live byte is read again and checked once in so many hours, in the background; 0: never."""
    hang_s: float = Field(1800, ge=0)
    """A rank without a step for so long ends its own process (`watchdog.py`); 0 switches this off."""
    staging_bytes: int | None = Field(None, gt=0)
    """Host memory for copies in flight. Default: min(a quarter of free memory, this rank's full state)."""
    write_retries: int = Field(8, ge=0)
    """Tries after the first, with pauses from 0.2 s doubling up to 10 s: half a minute by default."""
    metrics_flush_s: float = Field(60, gt=0)
    """Seconds between parts of `metrics/` and `drift/`."""

    preemption_signals: tuple[str, ...] = ("SIGTERM",)
    """Signals that announce the end of a rank, such as SIGUSR1 for Slurm's `--signal`; () for none. All
    ranks then save every layer that moved, and the loop learns of it by `StepReport.preempted`."""
    preemption_grace_s: float = Field(30, gt=0)
    """Time for that last save, from the signal on, where the announcement itself gives none."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.warmup_full_every > 0.75 * self.s_max:
            raise ValueError(
                f"warmup_full_every={self.warmup_full_every} must be at most 3/4 of s_max={self.s_max}: "
                "raise s_max or save full events more often"
            )
        if self.k0 is not None and self.k0_per_lr is not None:
            raise ValueError(f"give k0={self.k0} or k0_per_lr={self.k0_per_lr}, not both")
        if self.overhead_budget is not None and (self.k0 or self.k0_per_lr):
            raise ValueError(
                f"overhead_budget={self.overhead_budget:g} moves K, k0 and k0_per_lr fix it: give one of them"
            )
        if self.k0 is None and self.k0_per_lr is None and self.target_interval > self.s_max:
            raise ValueError(
                f"target_interval={self.target_interval:g} is above s_max={self.s_max}: the age limit alone "
                "would write more often; lower target_interval or raise s_max"
            )
        for name in self.preemption_signals:
            signal_number(name)
        if self.recovery == "strict" and self.strict_max_age is None:
            raise ValueError("recovery='strict' needs strict_max_age (steps)")
        return self


def parse_config(settings: LayerCheckConfig | dict[str, Any] | None) -> LayerCheckConfig:
    """Returns the checked configuration.

    Args:
        settings: a configuration, a (nested) dict of its keys, or None for the defaults.

    Raises:
        ConfigError: names each key that is unknown or out of range, with the value received.
    """
    if isinstance(settings, LayerCheckConfig):
        return settings
    try:
        return LayerCheckConfig.model_validate(settings or {})
    except ValidationError as error:
        raise ConfigError(describe(error, "checkpoint settings")) from None


def describe(error: ValidationError, what: str) -> str:
    """One line for a person: each wrong key with the value received."""
    parts = []
    for item in error.errors():
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown key {key!r} (value {item['input']!r})")
        elif item["type"] == "value_error":
            parts.append(str(item["ctx"]["error"]))
        else:
            parts.append(f"{key}={item['input']!r}: {item['msg']}")
    return f"{what}: " + "; ".join(parts)
