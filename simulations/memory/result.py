"""[pure] The tables of `memory.json` for people, as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def markdown(content: Mapping[str, Any]) -> str:
    """All tables."""
    conditions = content["conditions"]
    lines = [
        "# The memory tier: what a death costs",
        "",
        f"{conditions['parameters']} parameters on {conditions['ranks']} ranks, {conditions['steps']} steps, "
        f"the base at {conditions['warmup_steps']}; a version every {conditions['target_interval']:g} steps "
        f"asked for, `memory.k_ratio` {conditions['k_ratio']:g} where it is not 0. Every kill is a SIGKILL "
        "at a random moment of a step.",
        "",
        *_table(_HEAD, [_row(name, arm) for name, arm in content["arms"].items()]),
        "",
        "Lost steps: size-weighted, of the receipts; they count from the newest step that is known, and "
        "steps after that are run again. Ages: of the versions, moments included. Layers from: over all "
        "kills; a residual is newer weights of a version from the storage. Loss: training loss, mean of the "
        f"last {conditions['loss_steps']} steps, against the run without a failure; a model "
        "that learns from scratch misses every lost step.",
        "",
        *_held(content["verdicts"]),
        "",
        "## Fine-tuning that is killed three times",
        "",
        *_tuned_lines(content["tuned"]),
        "",
        "## Each recovery",
        "",
        *_table(_ONE_HEAD, [_one_row(name, one) for name, one in _each(content)]),
        "",
        "## Steps lost by layer, at the default threshold",
        "",
        *_table(("layer", "parameters", "mean", "largest"), _layer_rows(content)),
    ]
    return "\n".join(lines) + "\n"


def tuned_markdown(content: Mapping[str, Any]) -> str:
    """The fine-tuning runs alone."""
    lines = ["# The memory tier: fine-tuning that is killed three times", "", *_tuned_lines(content), ""]
    return "\n".join([*lines, *_held(content["verdicts"])]) + "\n"


def _held(verdicts: Mapping[str, bool]) -> list[str]:
    return [f"- {'yes' if held else '**no**'}: {text}" for text, held in verdicts.items()]


def _tuned_lines(content: Mapping[str, Any]) -> list[str]:
    figures, conditions = content["figures"], content["conditions"]
    return [
        f"{conditions['parameters']} parameters on {conditions['ranks']} ranks, trained for "
        f"{conditions['base_steps']} steps, then fine-tuned for {conditions['steps']} on other text: "
        f"held-out loss {figures['base_loss']:.4f} -> {figures['final_loss']:.4f} without a failure. A "
        f"worker is killed three times in each killed run, {conditions['gap']} steps apart; `memory.k_ratio` "
        f"{conditions['k_ratio']:g}.",
        "",
        *_table(_TUNED_HEAD, [_tuned_row(pair) for pair in figures["pairs"]]),
        "",
        f"Mean deviation {100 * figures['mean_deviation']:+.3f} %, largest "
        f"{100 * figures['largest_deviation']:.3f} %; standard deviation over the seeds without a failure "
        f"{100 * figures['spread']:.3f} %. Loss: held-out loss of the model that the run leaves. Lost steps "
        "and weighted ages are size-weighted, one figure for each kill.",
    ]


def overhead_markdown(content: Mapping[str, Any]) -> str:
    """The table of `overhead.json`."""
    conditions, arms = content["conditions"], content["arms"].items()
    lines = [
        "# The memory tier: what it costs",
        "",
        f"{conditions['parameters']} parameters on {conditions['ranks']} ranks, {conditions['steps']} steps "
        f"of each arm, some in a row and then those of the next; {conditions['cores']} cores. The vault is a "
        "process of its own.",
        "",
        *_table(_COST_HEAD, [_cost_row(name, arm, conditions["steps"]) for name, arm in arms]),
        "",
        "Step: median seconds of the slower rank, saving included. Ratio: of medians, to the base, with its "
        "95 % interval. Inside: the same without the first of some steps in a row, beside which runs what "
        "the arm before has left. To none: to stock groups without a session; all other arms have layer "
        "groups, which alone change a step. Overhead: visible stall and processor time of our threads in a "
        "rank, over training alone; not of other methods, whose threads come and go. Stall and threads: a "
        "step and rank. Stored: a step, all ranks.",
    ]
    return "\n".join(lines) + "\n"


_HEAD = (
    "run", "kills", "lost steps, mean", "largest", "oldest version", "weighted age", "layers from",
    "steps run again", "loss", "state", "step (s)",
)  # fmt: skip
_ONE_HEAD = (
    "run", "killed after", "known from", "lost steps", "oldest", "from", "plan (s)", "fetch", "install",
)  # fmt: skip
_TUNED_HEAD = (
    "seed", "killed after", "lost steps", "weighted age", "oldest version", "loss", "loss, killed",
    "deviation", "step (s)",
)  # fmt: skip
_COST_HEAD = (
    "arm", "base", "step (s)", "ratio", "inside", "to none", "overhead", "stall (ms)", "threads (ms)",
    "stored (MB)", "oldest version",
)  # fmt: skip


def _row(name: str, arm: Row) -> tuple[str, ...]:
    return (
        name,
        f"{arm['kills']}",
        f"{arm['lost_mean']:.2f}",
        f"{arm['lost_max']:.2f}",
        f"{arm['max_age']}",
        f"{arm['weighted_age']:.2f}",
        _places(arm["sources"]),
        f"{arm['again_steps']}",
        f"{100 * (arm['loss_ratio'] - 1):+.3f} %",
        "the same bits" if arm["is_exact"] else "differs",
        f"{arm['median_step_s']:.2f}",
    )


def _each(content: Mapping[str, Any]) -> list[tuple[str, Row]]:
    return [(name, one) for name, run in content["runs"].items() for one in run["recoveries"]]


def _one_row(name: str, one: Row) -> tuple[str, ...]:
    sources = list(one["sources"].values())
    counts = {source: sources.count(source) for source in sorted(set(sources))}
    return (
        name,
        f"{one['killed_at']}",
        one["t_fail_source"],
        f"{one['lost_steps']:.2f}",
        f"{one['max_age']}",
        _places(counts | {"residual": len(one["residuals"])}),
        *(f"{one['seconds'][phase]:.2f}" for phase in ("plan_s", "fetch_s", "install_s")),
    )


def _tuned_row(pair: Row) -> tuple[str, ...]:
    return (
        f"{pair['seed']}",
        ", ".join(f"{step}" for step in pair["killed_after"]),
        ", ".join(f"{steps:.2f}" for steps in pair["lost_steps"]),
        ", ".join(f"{age:.2f}" for age in pair["weighted_age"]),
        ", ".join(f"{age}" for age in pair["max_age"]),
        f"{pair['undisturbed']:.4f}",
        f"{pair['killed']:.4f}",
        f"{100 * pair['deviation']:+.3f} %",
        f"{pair['median_step_s']:.2f}",
    )


def _layer_rows(content: Mapping[str, Any]) -> list[tuple[str, ...]]:
    sizes = content["conditions"]["layers"]
    return [
        (name, f"{sizes[name]}", f"{steps['mean']:.1f}", f"{steps['max']:g}")
        for name, steps in content["by_layer"].items()
    ]


def _cost_row(name: str, arm: Row, steps: int) -> tuple[str, ...]:
    return (
        name,
        arm["base"],
        f"{arm['step_s']:.3f}",
        *(_with_interval(arm, end) for end in ("", "_inside", "_to_none")),
        f"{arm['overhead_ratio']:.4f}" if "overhead_ratio" in arm else "-",
        f"{1000 * arm['stall_s']:.1f}",
        f"{1000 * arm['threads_s']:.1f}" if "threads_s" in arm else "-",
        f"{arm['bytes_stored'] / steps / 1e6:.2f}",
        "-" if arm["max_age"] is None else f"{arm['max_age']}",
    )


def _with_interval(arm: Row, end: str) -> str:
    if f"ratio{end}" not in arm:
        return "-"
    low, high = arm[f"ci95{end}"]
    return f"{arm[f'ratio{end}']:.3f} ({low:.3f} to {high:.3f})"


def _places(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(head) + " |",
        "|" + " --- |" * len(head),
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
