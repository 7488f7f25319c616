"""Small pieces of HTML that the sections of the page share."""

from collections.abc import Iterable, Sequence
from html import escape


def html_table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int] = ()
) -> str:
    """A table; the columns named by `text` (and the first) are set to the left."""

    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = [' class="text"' if i in text else "" for i in range(len(row))]
        return "".join(f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    lines = "".join(f"<tr>{cells('td', row)}</tr>\n" for row in rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{cells('th', header)}</tr></thead>"
        f"<tbody>\n{lines}</tbody></table></div>"
    )


def figure(title: str, text: str, drawing: str, key: str = "") -> str:
    """A section with one drawing that may be scrolled on a narrow screen."""
    return (
        f"<h2>{escape(title)}</h2>\n<figure><figcaption>{escape(text)}</figcaption>{key}\n"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{drawing}</div>'
        "</figure>"
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
