"""The sweep: every method, protocol and MTBF, many seeds. One cell is one task, here or on a Ray cluster.

A cell's draws depend on its seeds alone, so the numbers are the same in any order and on any number of
machines. All methods meet the same failures.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, sqrt

import numpy as np
import numpy.typing as npt

from simulations.copies import lost_steps
from simulations.costs import Costs
from simulations.engines.booked import SECONDS
from simulations.engines.segments import simulate_segments
from simulations.failures import FailureModel, Failures, draw_failures
from simulations.protocols import PROTOCOLS, Point, Protocol, closed_form, operating_point
from simulations.tiers import STORAGE, TierSet

Floats = npt.NDArray[np.float64]
MIN_LOST_SAMPLE = 2000
"""Failures at which lost progress is sampled, per point at least (all of them where there are fewer)."""
_LEAST_LOST_PER_SEED = 16
SEEDS_PER_CELL = 50


@dataclass(frozen=True, slots=True)
class Plan:
    """What to sweep.

    Attributes:
        failures: law, repair, mix; its MTBF is replaced by each of `mtbf_s`.
        tiers: a composite method is simulated with each of them.
    """

    costs: Costs
    mtbf_s: tuple[float, ...]
    failures: FailureModel
    seeds: int = 200
    first_seed: int = 0
    horizon_s: float = 30 * 86400.0
    protocols: tuple[Protocol, ...] = PROTOCOLS
    tiers: tuple[TierSet, ...] = (STORAGE,)


@dataclass(frozen=True, slots=True)
class Cell:
    """One task: a method at one MTBF over some seeds."""

    point: Point
    failures: FailureModel
    seeds: tuple[int, ...]
    horizon_s: float
    lost_per_seed: int


@dataclass(frozen=True, slots=True)
class CellResult:
    """Per seed. `seconds`: shape (seeds, causes of `Booked`); the others shape (seeds,)."""

    seconds: Floats
    num_failures: Floats
    lost_steps_mean: Floats
    num_lost_sampled: Floats


@dataclass(frozen=True, slots=True)
class Outcome:
    """One point of the sweep over all seeds. Ratios are means over seeds with 95 % intervals."""

    point: Point
    mtbf_s: float
    closed_form: float
    ettr: float
    ettr_ci: float
    charged: float
    charged_ci: float
    shares: dict[str, float] = field(default_factory=dict)
    """Cause -> part of the counted time; `lost_progress` beside them is part of `useful_s`."""
    lost_steps: float = 0.0
    num_lost_sampled: int = 0
    num_failures: int = 0
    seeds: int = 0


Runner = Callable[[list[Cell]], Iterable[CellResult]]
"""Runs cells and yields their results in the same order."""


def cells_of(plan: Plan) -> list[tuple[Point, FailureModel, list[Cell]]]:
    """The cells of each point, MTBF by MTBF, so that neighbours share their failures."""
    found = []
    seeds = tuple(range(plan.first_seed, plan.first_seed + plan.seeds))
    per_seed = max(_LEAST_LOST_PER_SEED, ceil(MIN_LOST_SAMPLE / len(seeds)))
    for mtbf_s in plan.mtbf_s:
        failures = replace(plan.failures, mtbf_s=mtbf_s)
        for protocol in plan.protocols:
            for point in _points(plan, protocol, failures):
                blocks = [seeds[at : at + SEEDS_PER_CELL] for at in range(0, len(seeds), SEEDS_PER_CELL)]
                cells = [Cell(point, failures, block, plan.horizon_s, per_seed) for block in blocks]
                found.append((point, failures, cells))
    return found


def _points(plan: Plan, protocol: Protocol, failures: FailureModel) -> list[Point]:
    return [
        operating_point(name, plan.costs, protocol, failures, tiers)
        for name, cost in plan.costs.methods.items()
        for tiers in (plan.tiers if cost.layers else (STORAGE,))
    ]


def run_here(cells: list[Cell]) -> Iterable[CellResult]:
    """All cells in this process, in an order that draws each failure list once."""
    order = sorted(range(len(cells)), key=lambda at: (cells[at].failures.mtbf_s, cells[at].seeds))
    results: dict[int, CellResult] = {}
    following = 0
    for at in order:
        results[at] = run_cell(cells[at])
        while following in results:
            yield results.pop(following)
            following += 1


def run_cell(cell: Cell) -> CellResult:
    """Simulates one cell."""
    rows = [_run_seed(cell, seed) for seed in cell.seeds]
    table = np.array([row[0] for row in rows])
    failures, lost, sampled = np.array([row[1:] for row in rows]).T
    return CellResult(table, failures, lost, sampled)


def _run_seed(cell: Cell, seed: int) -> tuple[list[float], float, float, float]:
    drawn = _drawn(cell.failures, cell.horizon_s, seed)
    method, tiers = cell.point.method, cell.point.tiers
    segments = simulate_segments(method, drawn, cell.horizon_s, cell.failures.in_recovery)
    seconds = [getattr(segments.booked, name) for name in SECONDS]
    lost = np.empty(0)
    if tiers:
        stretches = segments.commits[:-1] * method.interval_steps
        kinds = drawn.kind[: len(stretches)]
        lost = lost_steps(tiers, stretches, kinds, seed, cell.lost_per_seed)
    return seconds, segments.booked.num_failures, float(lost.mean()) if len(lost) else 0.0, len(lost)


@lru_cache(maxsize=SEEDS_PER_CELL + 1)
def _drawn(failures: FailureModel, horizon_s: float, seed: int) -> Failures:
    return draw_failures(failures, horizon_s, seed)


def summarize(point: Point, failures: FailureModel, results: list[CellResult]) -> Outcome:
    """Joins the cells of one point."""
    seconds = np.concatenate([result.seconds for result in results])
    num_failures = np.concatenate([result.num_failures for result in results])
    lost = np.concatenate([result.lost_steps_mean for result in results])
    sampled = np.concatenate([result.num_lost_sampled for result in results])
    counted_s = seconds.sum(axis=1) - seconds[:, SECONDS.index("open_s")]
    useful_s = seconds[:, SECONDS.index("useful_s")]
    lost_s = lost * num_failures * point.method.t_iter_s
    ratios, charged = useful_s / counted_s, (useful_s - lost_s) / counted_s
    shares = dict(zip(SECONDS, (seconds.sum(axis=0) / counted_s.sum()).tolist(), strict=True))
    del shares["open_s"]
    return Outcome(
        point=point,
        mtbf_s=failures.mtbf_s,
        closed_form=closed_form(point.method, failures),
        ettr=float(ratios.mean()),
        ettr_ci=_half_width(ratios),
        charged=float(charged.mean()),
        charged_ci=_half_width(charged),
        shares=shares | {"lost_progress": float(lost_s.sum() / counted_s.sum())},
        lost_steps=float((lost * sampled).sum() / sampled.sum()) if sampled.sum() else 0.0,
        num_lost_sampled=int(sampled.sum()),
        num_failures=int(num_failures.sum()),
        seeds=len(num_failures),
    )


def _half_width(values: Floats) -> float:
    """Half of the 95 % interval of a mean."""
    if len(values) < 2:
        return 0.0
    return t_quantile(len(values) - 1) * float(values.std(ddof=1)) / sqrt(len(values))


def t_quantile(freedom: int) -> float:
    """97.5 % quantile of Student's t (expansion in 1/freedom, Abramowitz and Stegun 26.7.5; 3 % low at 2)."""
    z, n = 1.959964, freedom
    terms = (
        (z**3 + z) / (4 * n),
        (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2),
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3),
    )
    return z + sum(terms)


def sweep(
    plans: Sequence[Plan], run: Runner = run_here, shown: Callable[[int, int], None] | None = None
) -> list[Outcome]:
    """Runs plans one after the other, as one list of cells.

    Args:
        plans: what to sweep.
        run: runs the cells: here, or on a Ray cluster.
        shown: told (cells done, cells in all) after each cell.
    """
    points = [point for plan in plans for point in cells_of(plan)]
    todo = [cell for _, _, cells in points for cell in cells]
    results: list[CellResult] = []
    for result in run(todo):
        results.append(result)
        if shown is not None:
            shown(len(results), len(todo))
    outcomes, at = [], 0
    for point, failures, cells in points:
        outcomes.append(summarize(point, failures, results[at : at + len(cells)]))
        at += len(cells)
    return outcomes
