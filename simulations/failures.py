"""[pure] Times of failures: laws, observed gaps, and draws that depend on a key alone, never on an order.

The same seed gives the same failures to every method, and the same unit gaps at every MTBF: curves differ by
what the methods do, not by luck.
"""

import csv
from dataclasses import dataclass
from itertools import pairwise
from math import gamma, isfinite, log, sqrt
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from layercheck.errors import ConfigError
from simulations.checks import not_negative, positive

Floats = npt.NDArray[np.float64]
Kind = Literal["process", "node", "cluster"]
KINDS: tuple[Kind, ...] = ("process", "node", "cluster")
"""What a failure takes away: one worker process; a node with its memory; the memory of all nodes."""

_GAPS, _REPAIRS, _KINDS = 0, 1, 2
"""Independent streams of one seed."""


@dataclass(frozen=True, slots=True)
class Law:
    """Law of the time between failures, up to its mean.

    Attributes:
        name: `exponential`, `weibull` or `bootstrap`.
        shape: Weibull k.
        unit_gaps: for `bootstrap`: observed gaps divided by their mean, drawn with replacement.
    """

    name: Literal["exponential", "weibull", "bootstrap"] = "exponential"
    shape: float | None = None
    unit_gaps: tuple[float, ...] = ()

    def draw(self, generator: np.random.Generator, count: int) -> Floats:
        """`count` gaps of mean 1."""
        if self.name == "exponential":
            return generator.standard_exponential(count)
        if self.name == "weibull":
            assert self.shape is not None
            return generator.weibull(self.shape, count) / gamma(1 + 1 / self.shape)
        return generator.choice(np.asarray(self.unit_gaps), count)


@dataclass(frozen=True, slots=True)
class Repair:
    """Time until somebody or something has repaired what broke, before the recovery can begin: lognormal.

    LANL 1996-2005 (credit LANL): mu = 4.15, sigma = 1.40 in ln(minutes). OLMo: sigma = 2.17.
    """

    mean_s: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> Floats:
        """`count` repair times in seconds."""
        mu = log(self.mean_s) - self.sigma**2 / 2
        return generator.lognormal(mu, self.sigma, count)


@dataclass(frozen=True, slots=True)
class FailureModel:
    """Everything that is drawn for one cluster.

    Attributes:
        mtbf_s: mean time between failures in seconds, on the clock that `in_recovery` says.
        in_recovery: failures also happen during recoveries (the gaps are wall-clock times); else gaps count
            productive time only.
        mix: probability of each of `KINDS`.
    """

    mtbf_s: float
    law: Law = Law()
    in_recovery: bool = True
    repair: Repair | None = None
    mix: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        positive("mtbf_s", self.mtbf_s)
        for kind, part in zip(KINDS, self.mix, strict=True):
            not_negative(f"mix.{kind}", part)
        if abs(sum(self.mix) - 1) > 1e-6:
            raise ConfigError(f"mix={self.mix} must add up to 1 (process, node, cluster)")


@dataclass(frozen=True, slots=True)
class Failures:
    """The failures of one simulated stretch of time.

    Attributes:
        gaps_s: shape (n + 1,): seconds from the start to the first failure, between failures, and from the
            last one to the horizon. Without failures in recovery: productive seconds, and no last entry cut.
        repair_s: shape (n,), seconds of repair after each failure.
        kind: shape (n,), index into `KINDS`.
    """

    gaps_s: Floats
    repair_s: Floats
    kind: npt.NDArray[np.int8]


def draw_gaps(model: FailureModel, horizon_s: float, seed: int) -> Floats:
    """Gaps in seconds that reach beyond `horizon_s`; a function of (law, MTBF, seed) alone."""
    generator = np.random.default_rng([seed, _GAPS])
    units = horizon_s / model.mtbf_s
    parts, total = [], 0.0
    while total <= units:
        left = units - total
        part = model.law.draw(generator, int(left + 6 * sqrt(left)) + 16)
        parts.append(part)
        total += float(part.sum())
    return np.concatenate(parts) * model.mtbf_s


def draw_failures(model: FailureModel, horizon_s: float, seed: int) -> Failures:
    """The failures of one seed up to `horizon_s` (exclusive)."""
    gaps_s = draw_gaps(model, horizon_s, seed)
    if model.in_recovery:
        times_s = np.cumsum(gaps_s)
        return failures_at(times_s[times_s < horizon_s], horizon_s, model, seed)
    return _with_details(gaps_s, len(gaps_s) - 1, model, seed)


def failures_at(times_s: Floats, horizon_s: float, model: FailureModel, seed: int = 0) -> Failures:
    """Failures at given wall-clock times, such as those injected into a real run.

    Raises:
        ConfigError: the times do not increase inside (0, horizon_s).
    """
    edges_s = np.concatenate([[0.0], times_s, [horizon_s]])
    if not np.all(np.isfinite(edges_s)) or np.any(np.diff(edges_s) <= 0):
        raise ConfigError(f"failure times must increase between 0 and the horizon of {horizon_s:g} s")
    return _with_details(np.diff(edges_s), len(times_s), model, seed)


def _with_details(gaps_s: Floats, count: int, model: FailureModel, seed: int) -> Failures:
    repair_s = np.zeros(count)
    if model.repair is not None:
        repair_s = model.repair.draw(np.random.default_rng([seed, _REPAIRS]), count)
    kind = np.zeros(count, dtype=np.int8)
    if model.mix[0] < 1:
        draws = np.random.default_rng([seed, _KINDS]).random(count)
        kind = np.searchsorted(np.cumsum(model.mix[:2]), draws, side="right").astype(np.int8)
    return Failures(gaps_s, repair_s, kind)


# ---------------------------------------------------------------- from outside


def parse_law(text: str) -> Law:
    """`exponential`, `weibull:K`, or `bootstrap:FILE` with a CSV of failure times.

    Raises:
        ConfigError: anything else.
    """
    name, _, detail = text.partition(":")
    if name == "exponential" and not detail:
        return Law()
    if name == "weibull" and detail:
        try:
            shape = float(detail)
        except ValueError:
            raise ConfigError(f"law={text!r}: {detail!r} is no number; write weibull:0.7") from None
        return Law("weibull", shape=positive("shape", shape))
    if name == "bootstrap" and detail:
        return bootstrap(read_failure_times(Path(detail)))
    raise ConfigError(f"law={text!r} must be exponential, weibull:K or bootstrap:FILE.csv")


def read_failure_times(path: Path) -> Floats:
    """Failure times in seconds, increasing, from the first column of a CSV; one header line is allowed.

    Raises:
        ConfigError: no such file, fewer than two times, or a value that is no time (its line is named).
    """
    try:
        with open(path, newline="") as file:
            rows = [row for row in csv.reader(file) if row and row[0].strip()]
    except OSError as error:
        raise ConfigError(f"failure times {path}: {error.strerror}") from None
    times: list[float] = []
    for line, row in enumerate(rows, start=1):
        try:
            times.append(float(row[0]))
        except ValueError:
            if line > 1:
                raise ConfigError(f"failure times {path}, line {line}: {row[0]!r} is no number") from None
    for line, value in enumerate(times, start=1):
        if not isfinite(value) or value < 0:
            raise ConfigError(f"failure times {path}: value {line} is {value:g}, not a time in seconds")
    if len(times) < 2 or any(later <= earlier for earlier, later in pairwise(times)):
        raise ConfigError(f"failure times {path}: needs at least two increasing times, has {len(times)}")
    return np.asarray(times)


def bootstrap(times_s: Floats) -> Law:
    """The law of the gaps between observed failure times, scaled to mean 1."""
    gaps = np.diff(times_s)
    return Law("bootstrap", unit_gaps=tuple(float(gap) for gap in gaps / gaps.mean()))


def mtbf_of_counts(num_failures: int, days: float) -> float:
    """MTBF in seconds of failures counted over days (Llama 3: 419 in 54 days = 185.6 min)."""
    return positive("days", days) * 86400 / positive("num_failures", num_failures)
