"""What a command says, and how its tables are set."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

GOOD, DAMAGE, USAGE = 0, 1, 2
"""Exit codes. DAMAGE stands for everything that a person has to look at: also no plan, also a refusal."""
NOT_THE_NEWEST = "not its newest save: that is damaged"
"""Of a layer that falls back. Newer can be a version, of the same step too, or a residual alone."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `value` goes out with --json, `text` without; `notes` go to standard error in any case."""

    value: dict[str, Any]
    text: str
    code: int = GOOD
    notes: tuple[str, ...] = ()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need: the first to the left, the others to the right."""
    lines = [header, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]

    def set_line(line: Sequence[str]) -> str:
        cells = [line[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join(set_line(line) for line in lines)


def size(nbytes: float) -> str:
    """Bytes for a person, in powers of 1000: `1.25 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def number(value: float | None, digits: int = 3) -> str:
    """A short number, `-` for none."""
    return "-" if value is None else f"{value:.{digits}g}"
