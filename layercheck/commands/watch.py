"""`layercheck status --watch`: a live view of the layers, and of what a failure now would cost."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from layercheck.commands import deaths
from layercheck.commands.answer import Answer, number, size
from layercheck.commands.plan import PlanOptions, planned
from layercheck.commands.status import describe, ending, has_completed
from layercheck.commands.store import Store
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import is_fresh
from layercheck.errors import ConfigError, NoPlanError
from layercheck.lost import in_words
from layercheck.manifest import RecoveryPlan
from layercheck.receipt import RECOVERY_PHASES

WATCH_S = 2.0
_BAR = 12
_PLAIN_WIDTH = 110
_HEAD_LINES = 10


@dataclass(frozen=True, slots=True)
class Row:
    """One layer. `age_share`: age / s_max, 0 for a frozen one; `drift_ratio`: D/K, None where unknown."""

    name: str
    step: int
    age: int
    age_share: float
    drift_ratio: float | None
    nbytes: int
    reason: str


@dataclass(frozen=True, slots=True)
class View:
    """All that is shown. `rows` are those nearest to their next save first."""

    title: str
    cost: str
    is_recoverable: bool
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


Show = Callable[[StoreFacts], int]
"""Shows one moment and returns the exit code of `layercheck status`."""


def watch(
    store: Store,
    say: Callable[[Answer], int] | None,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Looks every two seconds until the run has completed or Ctrl-C.

    Args:
        store: of the run.
        say: prints an answer and returns its exit code, in place of the view (--json).
        console: where the view goes; standard output by default.
        sleep: waits some seconds.

    Returns:
        The exit code of `layercheck status` at the end; 0 after Ctrl-C.
    """
    if say is not None:
        return _look(store, lambda facts: say(describe(facts)), sleep)
    # Whoever reads a pipe is to get lines that do not wrap.
    console = console or Console(width=None if Console().is_terminal else _PLAIN_WIDTH)
    if not console.is_terminal:
        return _look(store, lambda facts: _print(facts, console), sleep)
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        return _look(store, lambda facts: _draw(facts, live), sleep)


def _look(store: Store, show: Show, sleep: Callable[[float], None]) -> int:
    try:
        while True:
            facts = store.facts()
            code = show(facts)
            if has_completed(facts):
                return code
            sleep(WATCH_S)
    except KeyboardInterrupt:
        return 0


def _print(facts: StoreFacts, console: Console) -> int:
    shown = view(facts)
    console.print(screen(shown, len(shown.rows)))
    return describe(facts).code


def _draw(facts: StoreFacts, live: Live) -> int:
    live.update(screen(view(facts), max(3, live.console.height - _HEAD_LINES)), refresh=True)
    return describe(facts).code


# ---------------------------------------------------------------- what is shown


def view(facts: StoreFacts) -> View:
    """The figures of one moment, from what the store holds."""
    value: dict[str, Any] = describe(facts).value
    s_max = facts.run.config.get("checkpoint", {}).get("s_max")
    frozen = {layer.name for layer in facts.run.layer_map.layers if not layer.trainable}
    rows = [_row(layer, s_max, layer["name"] in frozen) for layer in value["layers"]]
    title = (
        f"run {value['run']}: attempt {value['attempt']}, step {value['step']}, {value['world_size']} ranks, "
        f"{ending(facts)}"
    )
    cost, good = _cost(facts, s_max)
    if deaths.memory_helps(value):
        cost += f"\n{deaths.in_words(value)}"
    return View(title, cost, good, tuple(sorted(rows, key=_urgency, reverse=True)), facts.notes)


def _row(layer: dict[str, Any], s_max: int | None, is_frozen: bool) -> Row:
    drift, threshold = layer["drift"], layer["threshold"]
    known = drift is not None and threshold is not None and threshold > 0
    return Row(
        name=layer["name"],
        step=layer["step"],
        age=layer["age"],
        age_share=layer["age"] / s_max if s_max and not is_frozen else 0.0,
        drift_ratio=drift / threshold if known else None,
        nbytes=layer["nbytes"],
        reason=layer["reason"],
    )


def _urgency(row: Row) -> tuple[float, str]:
    return max(row.age_share, row.drift_ratio or 0.0), row.name


def _cost(facts: StoreFacts, s_max: int | None) -> tuple[str, bool]:
    if is_fresh(facts):
        return "nothing was trained yet: the next attempt starts at step 1", True
    try:
        plan = planned(facts, PlanOptions())
    except (NoPlanError, ConfigError) as error:
        return f"NOT recoverable: {error}", False
    return _in_words(plan, facts, s_max), True


def _in_words(plan: RecoveryPlan, facts: StoreFacts, s_max: int | None) -> str:
    lines = [
        f"a failure now: goes on at step {plan.resume_step} ({plan.mode}), {size(plan.nbytes)} to read",
        f"oldest layer {plan.max_age} steps{f' of at most {s_max}' if s_max else ''}, size-weighted age "
        f"{number(plan.weighted_age)}, lost progress {number(plan.lost_steps)} steps of the whole model, "
        f"movement {in_words(plan.lost_drift, plan.measure, plan.has_residuals)}",
    ]
    if facts.receipts:
        attempt = max(facts.receipts)
        seconds = sum(facts.receipts[attempt].get(phase) or 0.0 for phase in RECOVERY_PHASES)
        lines.append(f"the recovery of attempt {attempt} took {number(seconds)} s")
    return "\n".join(lines)


# ---------------------------------------------------------------- on the terminal


def screen(shown: View, max_rows: int) -> Group:
    """The view as lines for a terminal of `max_rows` lines beside the head."""
    parts = [
        Text(shown.title, style="bold"),
        Text(shown.cost, style="" if shown.is_recoverable else "bold red"),
    ]
    parts += [Text(f"note: {note}", style="yellow") for note in shown.notes[-2:]]
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("layer", no_wrap=True)
    for name in ("saved at", "age"):
        table.add_column(name, justify="right")
    table.add_column("of s_max")
    table.add_column("D/K", justify="right")
    table.add_column("to its threshold")
    table.add_column("size", justify="right")
    table.add_column("last reason")
    for row in shown.rows[:max_rows]:
        ratio = row.drift_ratio
        table.add_row(
            Text(row.name),
            str(row.step),
            str(row.age),
            _bar(row.age_share, warn=0.75),
            number(ratio, 2),
            _bar(ratio or 0.0, warn=1.0),
            size(row.nbytes),
            Text(row.reason),
        )
    left = len(shown.rows) - max_rows
    more = [Text(f"and {left} more layers, further from their next save", style="dim")] if left > 0 else []
    return Group(*parts, Text(""), table, *more)


def _bar(share: float, warn: float) -> Text:
    filled = round(_BAR * min(max(share, 0.0), 1.0))
    colour = "red" if share >= 1 and warn < 1 else "yellow" if share >= warn else "green"
    return Text("#" * filled, style=colour) + Text("." * (_BAR - filled), style="dim")
