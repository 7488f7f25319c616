"""[pure] The tables of `residuals.json` for people, as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def markdown(content: Mapping[str, Any]) -> str:
    """All tables."""
    conditions = content["conditions"]
    arms = content["arms"]
    lines = [
        "# Residuals: bytes against lost progress in weight space",
        "",
        f"{conditions['parameters']} parameters; {conditions['steps']} steps of fine-tuning after "
        f"{conditions['base_steps']} from scratch, the base at {conditions['warmup_steps']}; mean loss "
        f"{content['loss']['first']:.3f} -> {content['loss']['last']:.3f}; learning rate down to its half. "
        f"Without residuals: a version every {conditions['interval']:g} steps was asked for, "
        f"{content['frontier'][0]['mean_interval_steps']:.0f} it was. `s_max` {conditions['s_max']}.",
        "",
        f"## Real runs, {len(conditions['kill_seeds'])} of each row with {conditions['kills']} SIGKILLs, "
        "after the same steps in all rows",
        "",
        *_table(_REAL_HEAD, [_real_row(name, arms[name], content["predicted"][name]) for name in arms]),
        "",
        "Distance: mean |weight lost - weight restored| over all parameters, fp32, mean over the kills. "
        "Ratios are to the run without residuals, +-: standard error over the kills. By replay: what the "
        "frontier says of this point, for a failure at any step. Lost steps and drift: what the receipts "
        "say, means; drift is the path, a bound.",
        "",
        *[f"- {'yes' if held else '**no**'}: {text}" for text, held in content["verdicts"].items()],
        "",
        "## How far the weights get",
        "",
        *_table(_MOVE_HEAD, [_move_row(row) for row in content["movement"]]),
        "",
        "Exponent: of distance ~ steps^exponent since the row before; 1 is a straight way, 0.5 a random "
        "walk.",
        "",
        "## The frontier by replay",
        "",
        *[_needed(part, row) for part, row in content["needed"].items()],
        "",
        *_table(_FRONTIER_HEAD, [_frontier_row(row) for row in content["frontier"]]),
    ]
    return "\n".join(lines) + "\n"


_REAL_HEAD = (
    "run", "bytes, x", "by replay", "distance lost", "part of it (%)", "by replay (%)", "lost steps",
    "part of them (%)", "lost drift", "drift / distance", "oldest moments", "steps run again",
)  # fmt: skip
_MOVE_HEAD = ("steps", "distance", "path", "distance / path", "exponent")
_FRONTIER_HEAD = (
    "bits", "V asked", "V", "r asked", "r", "bytes, x", "distance lost (%)", "bound by the path (%)",
    "lost steps",
)  # fmt: skip


def _real_row(name: str, arm: Row, replayed: Row) -> tuple[str, ...]:
    known = arm["lost_drift"] is not None
    return (
        name,
        f"{arm['bytes_ratio']:.3f}",
        f"{replayed['bytes_share']:.3f}",
        f"{arm['distance']:.3e}",
        f"{100 * arm['distance_ratio']:.1f} +- {100 * arm['distance_error']:.1f}",
        f"{100 * replayed['distance_share']:.1f}",
        f"{arm['lost_steps']:.1f}",
        f"{100 * arm['lost_steps_ratio']:.1f}",
        f"{arm['lost_drift']:.3e}" if known else "not known",
        f"{arm['drift_over_distance']:.2f}" if known else "",
        f"{arm['max_age']}",
        f"{arm['again_steps']}",
    )


def _move_row(row: Row) -> tuple[str, ...]:
    ratio = row["distance"] / row["path"]
    return (
        f"{row['lag']}",
        f"{row['distance']:.3e}",
        f"{row['path']:.3e}",
        f"{ratio:.3f}",
        f"{row['exponent']:.2f}",
    )


def _frontier_row(row: Row) -> tuple[str, ...]:
    interval = row["residual_interval_steps"]
    return (
        f"{row['bits'] or '-'}",
        f"{row['version']}",
        f"{row['mean_interval_steps'] or 0:.0f}",
        f"{row['residual']:g}" if row["residual"] else "-",
        f"{interval:.1f}" if interval else "-",
        f"{row['bytes_share']:.3f}",
        f"{100 * row['distance_share']:.1f}",
        f"{100 * row['lost_share']:.1f}",
        f"{row['lost_steps']:.1f}",
    )


def _needed(part: str, row: Row | None) -> str:
    if row is None:
        return f"- {float(part):.0%} of the distance: no point of the grid has it."
    return (
        f"- {float(part):.0%} of the distance takes {row['bytes_share']:.2f} x the bytes: {row['bits']} "
        f"bits, a version every {row['mean_interval_steps']:.0f} steps, a residual every "
        f"{row['residual_interval_steps']:.1f}."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
