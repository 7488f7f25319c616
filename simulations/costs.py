"""`costs.json`: what each method costs on one machine, in the form that the simulation reads.

Written by `python -m simulations.measure methods`; a run's own folder gives one too (`run_costs.py`), and
`paper` is the labelled preset. Units are in the names: `_s` seconds, `_steps` optimizer steps, `_bytes`
bytes. A method without `source` is refused: a figure that nobody vouches for is no cost.

Within a `format_version` fields with a default may be added; it changes when one goes or changes its meaning.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layercheck.config import describe
from layercheck.errors import ConfigError
from simulations.failures import Kind
from simulations.methods import Method, Recovery

FORMAT_VERSION = 1
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Steps = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AddedSeconds = Annotated[float, Field(allow_inf_nan=False)]
"""May be negative: a difference of two measurements that is smaller than their noise."""
Source = Literal["measured", "derived", "paper"]
Copied = Literal["versions", "residuals", "memory"]
"""As what a composite method copies its state."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RecoveryCosts(_Record):
    """Seconds from a failure to the first useful step, by phase; replayed steps are not in it."""

    detect_s: Seconds = 0.0
    """From the death to the moment somebody saw it."""
    restart_s: Seconds = 0.0
    """Rescheduling: workers back at the first line of their program."""
    load_s: Seconds = 0.0
    """Plan and fetch."""
    reconstruct_s: Seconds = 0.0
    """Install, apply differentials, and what the first step takes longer than others."""

    def phases(self) -> Recovery:
        """As the engines read it."""
        return Recovery(self.detect_s, self.restart_s, self.load_s, self.reconstruct_s)


class LayerCosts(_Record):
    """How often a layer was written; composites only."""

    name: str
    numel: int = Field(gt=0)
    interval_steps: Steps


class MethodCosts(_Record):
    """One method.

    Attributes:
        source: `measured` on this machine, `derived` from measured figures by a stated rule, or the `paper`.
        commits: `every_step`, or `interval`: its interval may be chosen.
        stall_s: visible stall per commit; of an `every_step` method, per step.
        stall_fixed_s: the part of it that does not shrink when less is written (measuring, deciding).
        interval_steps: the interval at which this was measured; 1 for `every_step`.
        min_interval_steps: no commit can follow another sooner (the write behind it takes that long).
        recovery: after the death of a process; of a node or of all nodes, where they differ, as named.
        far_every: commits per copy that outlives `far_kinds` of failure; 0 if every commit does.
        layers: for a method that restores layers of different ages: how old each one may be.
        s_max_steps: no layer is older.
        full_stall_s: visible stall of one copy of the full state, where there are such.
        residual_stall_s: the same of residuals of the full state; None: by their bytes.
        far_stall_s: of one copy that outlives `far_kinds`, beside the stall of its commit.
        slowdown_s: what training loses to an event in all, background work included: (seconds of a step with
            an event at every step / without any - 1) x t_iter_s; of a composite, to a step of its own rhythm.
        copy_slowdown_s: of a composite: the same of an event that copies the full state as versions, ...
        measured: other measured figures (bytes, events, ...), kept for the reader.
        spread: standard deviation of any figure, by its name.
    """

    source: Source
    commits: Literal["every_step", "interval"]
    stall_s: Seconds
    stall_fixed_s: Seconds = 0.0
    interval_steps: int = Field(1, ge=1)
    min_interval_steps: int = Field(1, ge=1)
    recovery: RecoveryCosts
    recovery_node: RecoveryCosts | None = None
    recovery_cluster: RecoveryCosts | None = None
    far_every: int = Field(0, ge=0)
    far_kinds: tuple[Kind, ...] = ()
    layers: tuple[LayerCosts, ...] = ()
    s_max_steps: int | None = Field(None, ge=1)
    full_stall_s: Seconds | None = None
    residual_stall_s: Seconds | None = None
    far_stall_s: Seconds = 0.0
    slowdown_s: AddedSeconds | None = None
    copy_slowdown_s: dict[Copied, AddedSeconds] = {}
    commit_delay_s: Seconds = 0.0
    """From the end of the stall until the copy counts."""
    note: str = ""
    measured: dict[str, float] = {}
    spread: dict[str, Seconds] = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.commits == "every_step" and self.interval_steps != 1:
            raise ValueError(f"interval_steps={self.interval_steps} must be 1 for commits='every_step'")
        if self.stall_fixed_s > self.stall_s:
            raise ValueError(f"stall_fixed_s={self.stall_fixed_s:g} is more than stall_s={self.stall_s:g}")
        if self.copy_slowdown_s and not self.layers:
            raise ValueError(f"copy_slowdown_s={self.copy_slowdown_s} needs layers: it is of a composite")
        return self

    @property
    def mean_interval_steps(self) -> float:
        """Steps x bytes of the full state / bytes written: the harmonic mean over bytes."""
        if not self.layers:
            return float(self.interval_steps)
        total = sum(layer.numel for layer in self.layers)
        return total / sum(layer.numel / layer.interval_steps for layer in self.layers)

    def method(self, name: str, t_iter_s: float) -> Method:
        """As the engines read it, at the interval at which it was measured.

        The delay of a composite's copies is in their schedule: its steps go on whatever has been committed.
        """
        process = self.recovery
        recovery = (process, self.recovery_node or process, self.recovery_cluster or process)
        first, second, third = (one.phases() for one in recovery)
        return Method(
            name=name,
            t_iter_s=t_iter_s,
            interval_steps=self.interval_steps,
            stall_s=self.stall_s + (self.far_stall_s / self.far_every if self.far_every else 0.0),
            recovery=(first, second, third),
            far_every=self.far_every,
            far_kinds=self.far_kinds,
            far_stall_s=self.far_stall_s,
            delay_s=0.0 if self.layers else self.commit_delay_s,
        )


class Costs(_Record):
    """The whole file.

    Attributes:
        t_iter_s: one training step without checkpointing.
        gpus: devices (or workers) that this was measured on.
        methods: by name; a composite method (`layers` given) is the one whose interval `matched` takes over.
    """

    format_version: Literal[1]
    title: str
    t_iter_s: Steps
    gpus: int = Field(1, ge=1)
    machine: str = ""
    model: str = ""
    full_bytes: int | None = Field(None, ge=0)
    methods: dict[str, MethodCosts] = Field(min_length=1)

    @property
    def matched_interval_steps(self) -> int:
        """Mean persist interval of the composite method; without one the longest interval measured."""
        composite = [cost.mean_interval_steps for cost in self.methods.values() if cost.layers]
        others = [float(cost.interval_steps) for cost in self.methods.values()]
        return max(1, round(composite[0] if composite else max(others)))


def with_same_restart(costs: Costs) -> Costs:
    """All methods with the mean detection and restart of all, after the death of a process.

    Both are the work of the cluster, not of the method, and they scatter by more than methods differ.
    """
    mean = {
        key: fmean(getattr(cost.recovery, key) for cost in costs.methods.values())
        for key in ("detect_s", "restart_s")
    }
    methods = {
        name: cost.model_copy(update={"recovery": cost.recovery.model_copy(update=mean)})
        for name, cost in costs.methods.items()
    }
    return costs.model_copy(update={"methods": methods})


def parse_costs(content: object, what: str) -> Costs:
    """Checks the content of a `costs.json`.

    Raises:
        ConfigError: names each wrong key with the value received.
    """
    try:
        return Costs.model_validate(content)
    except ValidationError as error:
        raise ConfigError(describe(error, what)) from None


def read_costs_file(path: Path) -> Costs:
    """Reads a `costs.json`.

    Raises:
        ConfigError: it cannot be read, is no JSON, or does not fit the schema.
    """
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"costs {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"costs {path} is no JSON: {error}") from None
    return parse_costs(content, f"costs {path}")


def load_costs(source: str) -> Costs:
    """Costs of `--costs`: `paper`, a `costs.json`, or the folder of a run (or one that holds a `costs.json`).

    Raises:
        ConfigError: there are none, or they are wrong.
    """
    from simulations.paper_costs import paper_costs
    from simulations.run_costs import costs_of_run

    if source == "paper":
        return paper_costs()
    path = Path(source)
    if path.is_dir():
        return (
            read_costs_file(path / "costs.json") if (path / "costs.json").is_file() else costs_of_run(source)
        )
    return read_costs_file(path)
