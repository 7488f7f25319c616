"""What memory would save if something died now, on the page of a run with a memory tier."""

from typing import Any

from layercheck.commands import deaths
from layercheck.report.pieces import html_table


def deaths_section(status: dict[str, Any]) -> str:
    """A row for each layer, from what `layercheck status` says; empty if nothing would come from memory."""
    if not deaths.memory_helps(status):
        return ""
    caption = f"Where each layer would come back from; {deaths.in_words(status)}"
    table = html_table(caption, deaths.HEADER, deaths.rows(status), text=(1, 2, 3))
    return f"<h2>If something died now</h2>\n{table}"
