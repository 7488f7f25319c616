"""The blocks and links of the documents."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_KNOWN = ("layercheck ", "python -m ", "bash ")


@dataclass(frozen=True)
class Block:
    """One fenced block; `language` is empty where none is given."""

    path: Path
    language: str
    text: str


def documents() -> list[Path]:
    """Every page that a person reads; the log is a record of what was, not of what is."""
    pages = [path for path in (ROOT / "docs").rglob("*.md") if path.name != "log.md"]
    return [ROOT / "README.md", *sorted(pages)]


def blocks(path: Path) -> list[Block]:
    """The fenced blocks of one page."""
    return [Block(path, *found) for found in _BLOCK.findall(path.read_text())]


def command_lines(path: Path) -> Iterator[str]:
    """All lines of shell blocks, and in blocks without a language those that begin as a command of ours."""
    for block in blocks(path):
        lines = block.text.replace("\\\n", " ").splitlines()
        if block.language in ("bash", "sh"):
            yield from (line for line in lines if line.strip() and not line.startswith("#"))
        elif not block.language:
            yield from (line for line in lines if line.startswith(_KNOWN))


def links(path: Path) -> list[str]:
    """Targets of links, without those to other sites."""
    return [target for target in _LINK.findall(path.read_text()) if "://" not in target]


def python_of(path: Path) -> str:
    """The first Python block of a page."""
    return next(block.text for block in blocks(path) if block.language == "python")
