"""[pure] From the drift seen in the warm-up to one global threshold K0.

One K0 for all layers (embeddings a multiple of it): a K per layer would make all of them come due equally
often and erase the differences that the method lives on.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Self

from layercheck.config import LayerCheckConfig
from layercheck.errors import ConfigError
from layercheck.layers import LayerSpec

_BISECTIONS = 60
_MIN_FACTOR = 0.01
"""Smallest failure-aware factor: a run that fails at every step must not write every layer at every step."""


def layer_factor(name: str, kind: str, config: LayerCheckConfig) -> float:
    """K0 of a layer as a multiple of the global K0: by name, else by kind (paper 3.4.3: embeddings 10)."""
    for pattern, factor in config.k0_factors.items():
        if fnmatchcase(name, pattern):
            return factor
    return config.embedding_factor if kind == "embedding" else 1.0


def measure_name(config: LayerCheckConfig) -> str:
    """Rates observed by one measure say nothing of another: `mean_abs`, or `displacement mean_abs`."""
    drift = config.drift
    return drift.norm if drift.kind == "path" else f"{drift.kind} {drift.norm}"


def check_patterns(layers: tuple[LayerSpec, ...], config: LayerCheckConfig) -> None:
    """A pattern that fits no layer is a mistake that would otherwise show as wrong intervals only.

    Raises:
        ConfigError: names the pattern and the layers there are.
    """
    patterns = [("k0_factors", pattern) for pattern in config.k0_factors]
    patterns += [("residual.exclude", pattern) for pattern in config.residual.exclude]
    for knob, pattern in patterns:
        if not any(fnmatchcase(layer.name, pattern) for layer in layers):
            names = [layer.name for layer in layers]
            raise ConfigError(
                f"{knob}: {pattern!r} fits no trainable layer of {', '.join(names)}", layers=names
            )


def mean_interval(
    k0: float,
    rates: Mapping[str, float],
    numel: Mapping[str, int],
    factors: Mapping[str, float],
    s_max: int,
) -> float:
    """Expected mean persist interval in steps: steps x full bytes / bytes written by selective events.

    Args:
        k0: global threshold at `lr_ref`.
        rates: layer -> drift per step at `lr_ref`; 0 for a layer that does not move.
        numel: layer -> number of elements (bytes are proportional).
        factors: layer -> its K0 as a multiple of the global one.
        s_max: a layer is written at least every so many steps.
    """
    total = sum(numel[layer] for layer in rates)
    written_per_step = 0.0
    for layer, rate in rates.items():
        interval = min(float(s_max), factors[layer] * k0 / rate) if rate > 0 else float(s_max)
        if interval <= 0:
            return 0.0
        written_per_step += numel[layer] / total / interval
    return 1.0 / written_per_step


def calibrate_k0(
    rates: Mapping[str, float],
    numel: Mapping[str, int],
    factors: Mapping[str, float],
    target_interval: float,
    s_max: int,
) -> float | None:
    """The K0 whose mean interval is `target_interval`, by bisection; None when no layer moves.

    The mean interval grows with K0 from 0 to `s_max`, where the age limit alone writes; a target of `s_max`
    gives the smallest K0 that reaches it.
    """
    low, high = 0.0, s_max * max(rates[layer] / factors[layer] for layer in rates)
    if high <= 0:
        return None
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if mean_interval(middle, rates, numel, factors, s_max) < target_interval:
            low = middle
        else:
            high = middle
    return high


def failure_factor(gaps: tuple[int, ...], interval: float, running: int = 0) -> float:
    """What K is multiplied by when failures outrun the mean interval: min(1, m / (4 x interval)).

    m is the mean number of steps between failures. Steps run since the last one count too (the estimate of a
    mean time between failures from censored data): a single early failure lowers K only until the attempt
    has run long enough to show that it was an exception.

    Args:
        gaps: steps run before each of the last failures, oldest first; empty for a run without a failure.
        interval: mean persist interval in steps at factor 1.
        running: steps run since the last failure.
    """
    if not gaps:
        return 1.0
    mean_gap = (sum(gaps) + running) / len(gaps)
    return max(_MIN_FACTOR, min(1.0, mean_gap / (4 * interval)))


@dataclass(slots=True)
class RateMeter:
    """Drift per unit of learning rate, observed in the second half of the warm-up.

    The unit is the learning rate itself, not lr_t / lr_ref, because `lr_ref` may be the largest rate of the
    warm-up and is then known only at its end.
    """

    norm: str
    per_lr: dict[str, float] = field(default_factory=dict)
    """Layer -> sum over the observed steps of drift / lr."""
    observed: int = 0
    max_lr: float = 0.0

    def observe(self, delta: Mapping[str, float], lr: float) -> None:
        """Adds one step. A step at learning rate 0 moves nothing and says nothing."""
        if lr <= 0:
            return
        self.observed += 1
        self.max_lr = max(self.max_lr, lr)
        for layer, value in delta.items():
            self.per_lr[layer] = self.per_lr.get(layer, 0.0) + value / lr

    def rates(self, lr_ref: float, layers: tuple[LayerSpec, ...]) -> dict[str, float]:
        """Layer -> drift per step at `lr_ref`."""
        scale = lr_ref / max(self.observed, 1)
        return {layer.name: self.per_lr.get(layer.name, 0.0) * scale for layer in layers}

    def to_state(self) -> dict[str, Any]:
        """JSON values, for the trainer state."""
        return {
            "norm": self.norm,
            "per_lr": dict(self.per_lr),
            "observed": self.observed,
            "max_lr": self.max_lr,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any] | None, norm: str) -> Self:
        """The observations of an earlier attempt; none if they were made with another norm."""
        if not state or state["norm"] != norm:
            return cls(norm)
        return cls(norm, dict(state["per_lr"]), int(state["observed"]), float(state["max_lr"]))


def find_lr_ref(meter: RateMeter, config: LayerCheckConfig, known: float | None) -> float | None:
    """Learning rate at which K_l is K0_l: the setting, else what is `known`, else the warm-up's largest."""
    return config.lr_ref or known or meter.max_lr or None


def find_k0(
    meter: RateMeter, config: LayerCheckConfig, layers: tuple[LayerSpec, ...], lr_ref: float
) -> float | None:
    """The global K0 at `lr_ref`: `k0`, `k0_per_lr`, or calibrated; None when no layer has moved yet."""
    if config.k0 is not None:
        return config.k0
    if config.k0_per_lr is not None:
        return config.k0_per_lr * lr_ref
    if meter.observed == 0:
        return None
    numel, factors = _weights(layers, config)
    rates = meter.rates(lr_ref, layers)
    return calibrate_k0(rates, numel, factors, config.target_interval, config.s_max)


def expected_interval(
    k0: float, meter: RateMeter, config: LayerCheckConfig, layers: tuple[LayerSpec, ...], lr_ref: float
) -> float:
    """Mean interval in steps that `k0` gives at the observed rates; the target when nothing was observed."""
    if meter.observed == 0:
        return config.target_interval
    numel, factors = _weights(layers, config)
    return mean_interval(k0, meter.rates(lr_ref, layers), numel, factors, config.s_max)


def _weights(
    layers: tuple[LayerSpec, ...], config: LayerCheckConfig
) -> tuple[dict[str, int], dict[str, float]]:
    numel = {layer.name: layer.numel for layer in layers}
    factors = {layer.name: layer_factor(layer.name, layer.kind, config) for layer in layers}
    return numel, factors
