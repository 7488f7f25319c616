"""What a comparison came to: `comparison.json`, and the same as tables in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from simulations.comparison import figures
from simulations.comparison.arms import REGIMES
from simulations.comparison.block import Block, Recovered
from simulations.comparison.figures import MethodFigures

FORMAT_VERSION = 1
PAPER = {
    "bytes": {"largest": 22.6, "mean": 17.1},
    "mean_event_bytes": {"largest": 6.6, "mean": 5.0},
    "end_to_end": {"lowdiff": 1.31, "gemini": 3.76},
}
"""What the paper reports: how many times less LayerCheck takes than the others. A reference line."""
_RECOVERY_KEYS = ("recovery_s", "recovery_without_restart_s", "reconstruct_s")


def comparison(blocks: Sequence[Block], interval: int, about: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `comparison.json`.

    Args:
        blocks: of all methods.
        interval: steps at which recoveries were compared.
        about: machine, model, seed and lengths.
    """
    timed = figures.recoveries(blocks)
    step = figures.step_time(blocks)
    by_regime = {name: figures.regime(blocks, name) for name in REGIMES}
    return {
        "format_version": FORMAT_VERSION,
        **about,
        "t_iter_s": asdict(step),
        "regimes": {
            name: {method: _row(each, timed.get(method, ())) for method, each in found.items()}
            for name, found in by_regime.items()
        },
        "recovery": {
            "matched_interval_steps": interval,
            **{method: figures.recovery_figures(each) for method, each in timed.items()},
        },
        "ratios_to_layercheck": {name: figures.ratios_to_ours(found) for name, found in by_regime.items()},
        "lowdiff_bytes": {
            method: asdict(each) for method, each in figures.lowdiff_bytes(by_regime["own"]).items()
        },
        "recovery_ratios_to_layercheck": _recovery_ratios(timed),
        "paper": PAPER,
    }


def _row(found: MethodFigures, timed: Sequence[Recovered]) -> dict[str, Any]:
    """The figures of one method in one regime; None for a recovery that was not timed."""
    ratio = found.end_to_end_ratio
    recovery: dict[str, float] = figures.recovery_figures(timed) if timed else {}
    return {
        **asdict(found),
        "end_to_end_ratio": ratio.value,
        "end_to_end_ratio_stdev": ratio.stdev,
        **{key: recovery.get(key) for key in _RECOVERY_KEYS},
    }


def _recovery_ratios(timed: Mapping[str, Sequence[Recovered]]) -> dict[str, dict[str, float]]:
    """Each method's recovery over LayerCheck's, without and with detection and restart."""
    if figures.OURS not in timed:
        return {}
    ours = figures.recovery_figures(timed[figures.OURS])
    found = {}
    for method, each in timed.items():
        theirs = figures.recovery_figures(each)
        if method not in (figures.OURS, "none"):
            found[method] = {key: theirs[key] / ours[key] for key in _RECOVERY_KEYS[:2]}
    return found


# ---------------------------------------------------------------- for people


def markdown(content: Mapping[str, Any]) -> str:
    """Tables of all regimes and of the recoveries."""
    lines = [
        "# The methods compared",
        "",
        f"{content['machine']}; {content['model']}; seed {content['seed']}. A step without checkpointing: "
        f"{content['t_iter_s']['value']:.3f} s. +-: standard deviation over the repeats.",
    ]
    for name, rows in content["regimes"].items():
        lines += ["", f"## {name.replace('_', ' ')}", "", *_regime_table(rows)]
    lines += ["", "## Recovery at matched freshness", "", *_recovery_table(content["recovery"])]
    lines += ["", "## Beside the paper", "", *_paper_lines(content)]
    return "\n".join(lines) + "\n"


def _regime_table(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    head = (
        "method",
        "end to end / none",
        "stall % of a step",
        "stall / event (s)",
        "steps",
        "events",
        "GB",
        "MB / event",
        "layer writes",
        "mean interval",
        "mean age",
        "footprint (GB)",
    )
    body = [
        (
            name,
            f"{row['end_to_end_ratio']:.3f} +- {row['end_to_end_ratio_stdev']:.3f}",
            f"{100 * row['stall_share']:.1f}",
            _number(row["stall_per_event_s"], 3),
            f"{row['steps']}",
            f"{row['events']}",
            f"{row['bytes_written'] / 1e9:.3f}",
            _number(row["mean_event_bytes"], 1, 1e6),
            f"{row['layer_writes']}",
            f"{row['mean_interval']:.1f}",
            _number(row["mean_age"], 1),
            f"{row['footprint_bytes'] / 1e9:.3f}",
        )
        for name, row in rows.items()
    ]
    return table(head, body)


def _recovery_table(recovery: Mapping[str, Any]) -> list[str]:
    keys = (
        "detect_s",
        "reschedule_s",
        "load_s",
        "reconstruct_s",
        "replay_s",
        "first_step_s",
        "replayed_steps",
        "recovery_without_restart_s",
        "recovery_s",
    )
    body = [
        (method, *(f"{row[key]:.2f}" for key in keys), f"{row['recoveries']}")
        for method, row in recovery.items()
        if isinstance(row, dict)
    ]
    note = f"Interval of the roll-back methods: {recovery['matched_interval_steps']} steps."
    return [note, "", *table(("method", *(key.removesuffix("_s") for key in keys), "recoveries"), body)]


def _paper_lines(content: Mapping[str, Any]) -> list[str]:
    lines = [
        "How many times more than LayerCheck; the paper: bytes 22.6 (mean 17.1), event size 6.6 (mean 5.0), "
        "end to end 1.31 against LowDiff and 3.76 against GEMINI.",
        "",
    ]
    for name, methods in content["ratios_to_layercheck"].items():
        for method, ratios in methods.items():
            words = ", ".join(f"{key.replace('_', ' ')} {value:.2f}" for key, value in ratios.items())
            lines.append(f"- {name.replace('_', ' ')}, {method}: {words}")
    for method, each in content["lowdiff_bytes"].items():
        lines.append(
            f"- bytes of {method}: {each['bytes_per_parameter_step']:g} a parameter and step x "
            f"{each['mean_interval']:.1f} / 12 = {each['expected_ratio']:.2f} expected, "
            f"{each['measured_ratio']:.2f} measured"
        )
    for method, ratios in content["recovery_ratios_to_layercheck"].items():
        lines.append(
            f"- recovery of {method}: {ratios['recovery_without_restart_s']:.2f} times LayerCheck's, "
            f"{ratios['recovery_s']:.2f} with detection and restart"
        )
    return lines


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, numbers to the right of the first column."""
    rule = ["---", *("---:" for _ in head[1:])]
    return ["| " + " | ".join(row) + " |" for row in (head, rule, *body)]


def _number(value: float | None, digits: int, unit: float = 1.0) -> str:
    return "-" if value is None else f"{value / unit:.{digits}f}"
