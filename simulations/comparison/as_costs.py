"""[pure] From the figures to `costs.json`: stalls as each method was measured at its own interval.

`none` is no entry: it has no commits, and its step is `t_iter_s`. LowDiff commits at every step: its stall is
per step, bases included where one fell into the measured steps. A recovery is that at matched freshness.
GEMINI's copies count when the peer has them, copies beside training when they are durable. `slowdown_s` is
from the regime in which every method decides or saves at every step.
"""

from collections.abc import Mapping, Sequence
from math import ceil

from simulations.comparison.arms import REFERENCE
from simulations.comparison.block import Block, Recovered
from simulations.comparison.figures import OURS, MethodFigures, Spread, recovery_figures
from simulations.costs import Costs, LayerCosts, MethodCosts, RecoveryCosts

_EVERY_STEP = (OURS, "lowdiff_topk", "lowdiff_dense")


def costs_of(
    blocks: Sequence[Block],
    figures: Mapping[str, MethodFigures],
    at_every_step: Mapping[str, MethodFigures],
    timed: Mapping[str, Sequence[Recovered]],
    t_iter: Spread,
    machine: str,
    model: str,
) -> Costs:
    """The costs of every method whose recovery was timed.

    Args:
        blocks: all of them.
        figures: of the regime `own`.
        at_every_step: of the regime `every_step`.
        timed: recoveries by method.
        t_iter: a step without checkpointing.
        machine: in words.
        model: in words.
    """
    methods = {
        name: _method(name, each, timed[name], t_iter.value, blocks).model_copy(
            update={"slowdown_s": _slowdown_s(at_every_step.get(name), t_iter.value)}
        )
        for name, each in figures.items()
        if name != REFERENCE and name in timed
    }
    return Costs(
        format_version=1,
        title="measured by python -m simulations.measure methods",
        t_iter_s=t_iter.value,
        gpus=2,
        machine=machine,
        model=model,
        full_bytes=figures[OURS].full_bytes,
        methods=methods,
    )


def _method(
    name: str, figures: MethodFigures, timed: Sequence[Recovered], t_iter_s: float, blocks: Sequence[Block]
) -> MethodCosts:
    every_step = name in _EVERY_STEP
    interval = 1 if every_step else max(1, round(figures.facts.get("interval_steps", 1)))
    commit_s = figures.facts.get("commit_s", 0.0)
    in_memory = name == "gemini"
    exchange_s = figures.facts.get("copy_s", 0.0) + figures.facts.get("exchange_s", 0.0)
    beside = not every_step and not in_memory and name != "deepspeed"
    return MethodCosts(
        source="measured",
        commits="every_step" if every_step else "interval",
        stall_s=figures.stall_s.value * interval,
        stall_fixed_s=_fixed_s(name, figures, blocks),
        interval_steps=interval,
        min_interval_steps=max(1, ceil(commit_s / t_iter_s)) if beside else 1,
        commit_delay_s=exchange_s if in_memory else commit_s if beside else 0.0,
        recovery=_recovery(timed),
        far_every=_far_every(figures, interval) if in_memory else 0,
        far_kinds=("cluster",) if in_memory else (),
        layers=_layers(blocks) if name == OURS else (),
        measured=_measured(figures),
        spread={
            "stall_s": figures.stall_s.stdev * interval,
            "cycle_s": figures.cycle_s.stdev,
            "recovery_s": recovery_figures(timed)["recovery_s_stdev"],
        },
        note=f"{figures.blocks} blocks, {len(timed)} recoveries at matched freshness",
    )


def _fixed_s(name: str, figures: MethodFigures, blocks: Sequence[Block]) -> float:
    """Of LayerCheck: the stall of a step that writes nothing or little, the lowest tenth of its steps."""
    if name != OURS:
        return 0.0
    stalls_s = sorted(
        stall_s
        for block in blocks
        if block.method == OURS and not block.recovered
        for stall_s in block.stall_s
    )
    return min(stalls_s[len(stalls_s) // 10], figures.stall_s.value)


def _slowdown_s(figures: MethodFigures | None, t_iter_s: float) -> float | None:
    """What an event at every step makes a step longer; None where that was not measured."""
    return None if figures is None else (figures.end_to_end_ratio.value - 1) * t_iter_s


def _recovery(timed: Sequence[Recovered]) -> RecoveryCosts:
    means = recovery_figures(timed)
    return RecoveryCosts(
        detect_s=means["detect_s"],
        restart_s=means["reschedule_s"],
        load_s=means["load_s"],
        reconstruct_s=means["reconstruct_s"] + means["first_step_s"],
    )


def _far_every(figures: MethodFigures, interval: int) -> int:
    return max(1, round(figures.facts.get("storage_every_steps", 0.0) / interval))


def _layers(blocks: Sequence[Block]) -> tuple[LayerCosts, ...]:
    """Measured steps per write; a layer that was not written is as old as they are many."""
    mine = [block for block in blocks if block.method == OURS and block.layers and block.written]
    steps = sum(block.written.steps for block in mine if block.written)
    writes = {layer.name: 0 for layer in mine[0].layers}
    for block in mine:
        for layer in block.layers:
            writes[layer.name] += layer.writes
    return tuple(
        LayerCosts(name=layer.name, numel=layer.numel, interval_steps=steps / max(1, writes[layer.name]))
        for layer in mine[0].layers
    )


def _measured(figures: MethodFigures) -> dict[str, float]:
    found: dict[str, float | None] = {
        "end_to_end_ratio": figures.end_to_end_ratio.value,
        "bytes_per_step": figures.bytes_per_step,
        "events": figures.events,
        "steps": figures.steps,
        "mean_event_bytes": figures.mean_event_bytes,
        "layer_writes": figures.layer_writes,
        "footprint_bytes": figures.footprint_bytes,
        "mean_age_steps": figures.mean_age,
        **figures.facts,
    }
    return {name: float(value) for name, value in found.items() if value is not None}
