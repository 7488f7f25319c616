"""Small pieces of HTML that the sections of the page share."""

from collections.abc import Iterable, Sequence
from html import escape

from layercheck.commands.answer import number


def html_table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = ()
) -> str:
    """A table; the columns named by `text` (and the first) are set to the left."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="text"' if i in text else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return scrolled(
        caption,
        f"<table><caption>{escape(caption)}</caption><thead><tr>{cells('th', header)}</tr></thead>"
        f"<tbody>\n{lines}</tbody></table>",
    )


def scrolled(name: str, content: str) -> str:
    """What may be wider than the screen: a place that the keyboard reaches and can scroll."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">{content}</div>'


def as_table(caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that is opened on demand, below the drawing that shows the same."""
    table = html_table(caption, header, rows)
    return f"<details><summary>{escape(caption)}, as a table</summary>{table}</details>"


def figure(title: str, text: str, drawing: str, key: str = "", table: str = "") -> str:
    """A section with one drawing that may be scrolled on a narrow screen, and the same as a table."""
    return (
        f"<h2>{escape(title)}</h2>\n<figure><figcaption>{escape(text)}</figcaption>{key}\n"
        f"{scrolled(title, drawing)}{table}</figure>"
    )


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """What colours and strokes mean; an entry is (drawing of 26 x 13, text)."""
    items = "".join(
        f'<li><svg viewBox="0 0 26 13" width="26" aria-hidden="true">{mark}</svg>{escape(text)}</li>'
        for mark, text in entries
    )
    return f'<ul class="key">{items}</ul>'


def box(kind: str) -> str:
    """A filled sample for a legend."""
    return f'<rect class="{kind}" width="26" height="13"/>'


def stroke(kind: str) -> str:
    """A line sample for a legend."""
    return f'<path class="{kind}" d="M1 6.5H25"/>'


# ---------------------------------------------------------------- numbers for a person


def steps(value: float | None) -> str:
    """`12 steps`, or that it is unknown."""
    return "unknown" if value is None else f"{number(value)} steps"


def share(value: float | None) -> str:
    """A part of one, in percent."""
    return "unknown" if value is None else f"{number(100 * value)} %"


def seconds_text(seconds: float) -> str:
    """A time in the unit that suits it: `250 ms`, `12 s`, `3.5 min`, `7.25 h`."""
    if 0 < seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
