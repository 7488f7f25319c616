"""`layercheck status`: what the run would recover from now."""

from typing import Any

from layercheck.commands import deaths
from layercheck.commands.answer import DAMAGE, GOOD, Answer, number, size, table
from layercheck.commands.store import Store
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import is_fresh
from layercheck.coordination.status import plan_now, summarize
from layercheck.lost import in_words


def status(store: Store) -> Answer:
    """The newest versions and their ages, from storage alone; live figures come from the progress file."""
    return describe(store.facts())


def describe(facts: StoreFacts) -> Answer:
    """The answer for what a store holds."""
    value = summarize(facts)
    fresh = is_fresh(facts)
    good = (value["recoverable"] or fresh) and not facts.damaged
    text = "\n".join([_headline(facts, value, fresh), "", _layers(value)])
    if deaths.memory_helps(value):
        text += f"\n\n{deaths.in_words(value)}\n\n{table(deaths.HEADER, deaths.rows(value))}"
    return Answer(value, text, GOOD if good else DAMAGE, facts.notes)


def has_completed(facts: StoreFacts) -> bool:
    """True if the newest attempt said that it came to its end: nothing will change any more."""
    beat = facts.progress.get(facts.newest.attempt) if facts.newest else None
    return beat is not None and beat.ended == "completed"


def ending(facts: StoreFacts) -> str:
    """How the newest attempt is known to have ended."""
    beat = facts.progress.get(facts.newest.attempt) if facts.newest else None
    if beat is None or beat.ended is None:
        return "not ended"
    return f"{beat.ended}: {beat.reason}" if beat.reason else beat.ended


def _headline(facts: StoreFacts, value: dict[str, Any], fresh: bool) -> str:
    lines = [
        f"run {value['run']}: attempt {value['attempt']}, step {value['step']}, {value['world_size']} ranks, "
        f"{ending(facts)}"
    ]
    if value["recoverable"]:
        residuals = any(row["residual"] is not None for row in value["layers"])
        lines.append(
            f"recoverable: {size(value['read_bytes'])} to read, oldest layer {value['max_age']} steps, "
            f"size-weighted age {number(value['weighted_age'])} steps"
        )
        lines.append(
            f"a failure now loses {number(value['lost_steps'])} steps of the whole model, movement "
            f"{in_words(value['lost_drift'], value['measure'], residuals)}"
        )
        if (plan := plan_now(facts)) is not None and plan.mode == "warmup_rollback":
            lines.append(
                "in the warm-up: a restart goes back to the newest full copy and runs from step "
                f"{plan.resume_step}"
            )
    elif fresh:
        lines.append("nothing was trained yet: the next attempt starts at step 1")
    else:
        lines.append("NOT recoverable: see `layercheck plan` for the layers")
    return "\n".join(lines)


def _layers(value: dict[str, Any]) -> str:
    header = (
        "layer",
        "step",
        "attempt",
        "age",
        "residual",
        "lost",
        "lost drift",
        "size",
        "drift",
        "threshold",
        "reason",
    )
    rows = [
        (
            row["name"],
            str(row["step"]),
            str(row["attempt"]),
            str(row["age"]),
            "-" if row["residual"] is None else str(row["residual"]),
            number(row["lost"]),
            number(row["lost_drift"]),
            size(row["nbytes"]),
            number(row["drift"]),
            number(row["threshold"]),
            row["reason"],
        )
        for row in value["layers"]
    ]
    return table(header, rows)
