"""One recovery on the page: what was loaded, how old it was, and where the seconds went."""

from html import escape
from typing import Any

from layercheck.commands.answer import NOT_THE_NEWEST, number, size
from layercheck.lost import in_words
from layercheck.receipt import RECOVERY_PHASES
from layercheck.report.pieces import html_table, scrolled
from layercheck.report.spans import share_bar


def receipt_section(receipt: dict[str, Any], loss_before: float | None = None) -> str:
    """A receipt as storage keeps it, and the loss of the step before the one at which training went on.

    Keys that an older version did not write are left out.
    """
    phases = [(key.removesuffix("_s").replace("_", " "), receipt.get(key)) for key in RECOVERY_PHASES]
    known = ", ".join(f"{name} {number(seconds)} s" for name, seconds in phases if seconds is not None)
    later = receipt.get("loss_20_steps_later")
    residuals = any(layer.get("residual") is not None for layer in receipt["layers"])
    facts = [
        f"t_fail {receipt.get('t_fail')} (from {receipt.get('t_fail_source')}), resumed at step "
        f"{receipt.get('resume_step')} on {receipt.get('world_size')} ranks",
        f"oldest layer {receipt.get('max_age')} steps, size-weighted age "
        f"{number(receipt.get('weighted_age'))}, lost steps {number(receipt.get('lost_steps'))}, lost "
        f"movement {in_words(receipt.get('lost_drift'), receipt.get('measure') or '', residuals)}",
        f"{size(receipt.get('nbytes') or 0)} read; {known or 'no times known'}",
        f"loss before: {'unknown' if loss_before is None else number(loss_before, 5)}, 20 steps later: "
        f"{'not reached' if later is None else number(later, 5)}; random numbers: {receipt.get('rng')}",
    ]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts)
    title = f"Recovery of attempt {receipt.get('attempt')}: {receipt.get('mode')}"
    return (
        f'<section class="receipt"><h3>{escape(title)}</h3><ul>{items}</ul>'
        f"{_drawn(receipt, phases)}{_bad(receipt)}"
        f"<details><summary>What was loaded of each layer</summary>{_layers(receipt)}</details></section>"
    )


def _drawn(receipt: dict[str, Any], phases: list[tuple[str, float | None]]) -> str:
    title = f"Phases of the recovery of attempt {receipt.get('attempt')}"
    known = [(name, seconds) for name, seconds in phases if seconds]
    bar = share_bar(f"phases-{receipt.get('attempt')}", title, "phases", known)
    return scrolled(title, bar) if bar else ""


def _bad(receipt: dict[str, Any]) -> str:
    items = "".join(
        f'<li><span class="bad">bad shard</span> {escape(bad["file"])}, layer {escape(bad["layer"])}: '
        f"{escape(bad['error'])}</li>"
        for bad in receipt.get("bad") or ()
    )
    return f"<ul>{items}</ul>" if items else ""


def _layers(receipt: dict[str, Any]) -> str:
    header = (
        "layer",
        "version of step",
        "attempt",
        "age",
        "lost",
        "lost drift",
        "residual of step",
        "from",
        "size",
        "reason",
        "",
    )
    rows = [
        [
            str(layer["name"]),
            *(str(layer[key]) for key in ("step", "attempt", "age", "lost")),
            number(layer.get("lost_drift")),
            "-" if layer.get("residual") is None else str(layer["residual"]),
            str(layer.get("source", "storage")),
            size(layer["nbytes"]),
            str(layer["reason"]),
            NOT_THE_NEWEST if layer["fallback"] else "",
        ]
        for layer in receipt.get("layers") or ()
    ]
    title = f"Versions that attempt {receipt.get('attempt')} loaded"
    return html_table(title, header, rows, text=(7, 9, 10))
