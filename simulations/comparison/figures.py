"""[pure] From blocks to the figures of `comparison.json`: medians over the repeats, with their spread.

end_to_end_ratio = mean seconds from step to step / that of the `none` block of the same repeat: the machine
changes in minutes, less within a repeat. Spreads are standard deviations over the repeats, 0 for one alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from layercheck.errors import LayerCheckError
from simulations.comparison.arms import REFERENCE
from simulations.comparison.block import Block, Recovered

FULL_BYTES_PER_PARAMETER = 12
LOWDIFF_BYTES_PER_PARAMETER = {"lowdiff_topk": 0.01 * (4 + 2), "lowdiff_dense": 2.0}
"""Of one differential at rho = 0.01 in bf16 training: int32 index and value; or all values."""
OURS = "layercheck"


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and the standard deviation around the mean."""

    value: float
    stdev: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(median(values), stdev(values) if len(values) > 1 else 0.0)


@dataclass(frozen=True, slots=True)
class MethodFigures:
    """One method in one regime; medians over its blocks.

    Attributes:
        end_to_end_ratio: to `none`.
        cycle_s: mean seconds from step to step; `stall_s` the visible stall in it.
        stall_per_event_s: visible stall over the method's own events; None if it had none in the storage.
        stall_share: visible stall / step time.
        steps, bytes_written, events, layer_writes: own rhythm, full events and bases aside.
        mean_event_bytes: None without an event.
        bytes_per_step: bytes_written / steps.
        aside_bytes: of full events and bases.
        mean_interval: steps x full state / bytes written.
        mean_age: in steps.
        footprint_bytes: in the storage at the end; `host_memory_bytes` GEMINI's.
        facts: of the method alone (its chosen interval, ...).
    """

    blocks: int
    end_to_end_ratio: Spread
    cycle_s: Spread
    stall_s: Spread
    stall_per_event_s: float | None
    stall_share: float
    steps: int
    bytes_written: int
    events: int
    layer_writes: int
    mean_event_bytes: float | None
    bytes_per_step: float
    aside_bytes: int
    mean_interval: float
    mean_age: float | None
    footprint_bytes: int
    full_bytes: int
    facts: dict[str, float]


def step_time(blocks: Sequence[Block]) -> Spread:
    """Median seconds of a step without checkpointing, over all steps of all blocks of `none`.

    Raises:
        LayerCheckError: there is no such block.
    """
    mine = _steady(blocks, REFERENCE)
    each = [median(block.step_s) for block in mine]
    return Spread(median([step_s for block in mine for step_s in block.step_s]), Spread.of(each).stdev)


def regime(blocks: Sequence[Block], name: str) -> dict[str, MethodFigures]:
    """Each method of a regime, `none` among them."""
    mine = [block for block in blocks if name in block.regimes]
    methods = list(dict.fromkeys(block.method for block in mine))
    reference = {block.number: block.cycle_s for block in _steady(blocks, REFERENCE)}
    return {method: _method([b for b in mine if b.method == method], reference) for method in methods}


def _method(blocks: Sequence[Block], reference: dict[int, float]) -> MethodFigures:
    written = [block.written for block in blocks if block.written is not None]
    steps, nbytes = sum(each.steps for each in written), sum(each.nbytes for each in written)
    events, stall_s = sum(each.events for each in written), [fmean(block.stall_s) for block in blocks]
    measured = sum(len(block.step_s) for block in blocks)
    # Differentials are counted over whole runs, stalls over the measured steps.
    events_measured = events * measured / steps if steps else 0.0
    ages = [block.mean_age for block in blocks if block.mean_age is not None]
    return MethodFigures(
        blocks=len(blocks),
        end_to_end_ratio=Spread.of([block.cycle_s / _beside(block, reference) for block in blocks]),
        cycle_s=Spread.of([block.cycle_s for block in blocks]),
        stall_s=Spread.of(stall_s),
        stall_per_event_s=_total_stall_s(blocks) / events_measured if events_measured else None,
        stall_share=_total_stall_s(blocks) / sum(block.elapsed_s for block in blocks),
        steps=steps,
        bytes_written=nbytes,
        events=events,
        layer_writes=sum(each.layer_writes for each in written),
        mean_event_bytes=nbytes / events if events else None,
        bytes_per_step=nbytes / steps if steps else 0.0,
        aside_bytes=sum(each.aside_bytes for each in written),
        mean_interval=steps * blocks[0].full_bytes / nbytes if nbytes else 0.0,
        mean_age=fmean(ages) if ages else None,
        footprint_bytes=round(median(block.footprint_bytes for block in blocks)),
        full_bytes=blocks[0].full_bytes,
        facts=_mean_facts(blocks),
    )


def _beside(block: Block, reference: dict[int, float]) -> float:
    if block.number not in reference:
        raise LayerCheckError(f"{block.arm}: repeat {block.number} has no block of {REFERENCE!r} beside it")
    return reference[block.number]


def _total_stall_s(blocks: Sequence[Block]) -> float:
    return sum(sum(block.stall_s) for block in blocks)


def _mean_facts(blocks: Sequence[Block]) -> dict[str, float]:
    names = dict.fromkeys(name for block in blocks for name in block.facts or {})
    return {name: fmean(block.fact(name) for block in blocks) for name in names}


def _steady(blocks: Sequence[Block], method: str) -> list[Block]:
    mine = [block for block in blocks if block.method == method and block.recovered is None]
    if not mine:
        raise LayerCheckError(f"no block of {method!r} was measured, the ratios are to it")
    return mine


# ---------------------------------------------------------------- recoveries


def matched_interval(blocks: Sequence[Block]) -> int:
    """LayerCheck's mean persist interval in steps, at least 2: a roll-back needs something to run again.

    Raises:
        LayerCheckError: LayerCheck wrote nothing.
    """
    mine = _steady(blocks, OURS)
    mean = fmean(block.mean_interval for block in mine)
    if not mean:
        raise LayerCheckError(f"{OURS} wrote no layer in {len(mine)} blocks: its interval is unknown")
    return max(2, round(mean))


def recoveries(blocks: Sequence[Block]) -> dict[str, list[Recovered]]:
    """Of each method."""
    found: dict[str, list[Recovered]] = {}
    for block in blocks:
        if block.recovered is not None:
            found.setdefault(block.method, []).append(block.recovered)
    return found


def recovery_figures(timed: Sequence[Recovered]) -> dict[str, float]:
    """Means over the recoveries of a method, and the spread of the whole."""
    parts: dict[str, Callable[[Recovered], float]] = {
        "detect_s": lambda one: one.detect_s,
        "reschedule_s": lambda one: one.reschedule_s,
        "load_s": lambda one: one.load_s,
        "reconstruct_s": lambda one: one.reconstruct_s,
        "replay_s": lambda one: one.replay_s,
        "first_step_s": lambda one: one.first_step_s,
        "replayed_steps": lambda one: one.replayed_steps,
        "recovery_s": lambda one: one.total_s,
        "recovery_without_restart_s": lambda one: one.without_restart_s,
    }
    means = {name: fmean(part(one) for one in timed) for name, part in parts.items()}
    totals = [one.total_s for one in timed]
    return {**means, "recovery_s_stdev": Spread.of(totals).stdev, "recoveries": len(timed)}


# ---------------------------------------------------------------- ratios


@dataclass(frozen=True, slots=True)
class LowDiffBytes:
    """Bytes of LowDiff's differentials over LayerCheck's, both per step, full events and bases aside.

    Attributes:
        bytes_per_parameter_step: of a differential, by construction.
        mean_interval: LayerCheck's, in steps.
        expected_ratio: bytes_per_parameter_step x mean_interval / 12.
        measured_ratio: what was written.
    """

    bytes_per_parameter_step: float
    mean_interval: float
    expected_ratio: float
    measured_ratio: float


def lowdiff_bytes(figures: dict[str, MethodFigures]) -> dict[str, LowDiffBytes]:
    """For each of LowDiff's points among the figures of a regime."""
    ours = figures[OURS]
    found = {}
    for method, per_parameter in LOWDIFF_BYTES_PER_PARAMETER.items():
        if method in figures and ours.bytes_per_step:
            expected = per_parameter * ours.mean_interval / FULL_BYTES_PER_PARAMETER
            measured = figures[method].bytes_per_step / ours.bytes_per_step
            found[method] = LowDiffBytes(per_parameter, ours.mean_interval, expected, measured)
    return found


def ratios_to_ours(figures: dict[str, MethodFigures]) -> dict[str, dict[str, float]]:
    """Each other method over LayerCheck: bytes per step, mean event size, end-to-end time."""
    ours = figures[OURS]
    found: dict[str, dict[str, float]] = {}
    for method, theirs in figures.items():
        if method in (OURS, REFERENCE):
            continue
        ratios = {"end_to_end": theirs.end_to_end_ratio.value / ours.end_to_end_ratio.value}
        if theirs.events and ours.events:
            ratios["bytes"] = theirs.bytes_per_step / ours.bytes_per_step
            ratios["mean_event_bytes"] = (theirs.mean_event_bytes or 0.0) / (ours.mean_event_bytes or 1.0)
        found[method] = ratios
    return found
