"""Other text than the bundled one: what the documentation strings of this Python's library say.

The base model learns the language reference (`app/bundled.py`); it is then fine-tuned on this. Nothing is
downloaded; another version of Python has other strings.
"""

import ast
import json
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

_ANSWER_CHARS = 160
_FEWEST_CHARS = 40
_EVERY_HELD_OUT = 10
NUM_CHOICES = 4
_ANY_QUESTION = "What does it do?"
_LEFT_OUT = ("test", "idlelib", "site-packages", "dist-packages", "lib2to3", "turtledemo", "ensurepip")


@dataclass(frozen=True, slots=True)
class Texts:
    """Files in the OpenThoughts schema.

    Attributes:
        train: to fine-tune on.
        held_out: never trained on.
        choices: for each held-out question `NUM_CHOICES` rows, the right answer first; then the same answers
            to a question that says nothing.
    """

    train: Path
    held_out: Path
    choices: Path


def write_texts(folder: Path, num_train: int, num_held_out: int) -> Texts:
    """Writes the files; the first pairs of the library, the same ones every time.

    Args:
        folder: must exist.
        num_train: rows to train on, at most.
        num_held_out: rows of the held-out file, at most.
    """
    train, held_out = [], []
    for number, pair in enumerate(_pairs()):
        (held_out if number % _EVERY_HELD_OUT == 0 else train).append(pair)
    train, held_out = train[:num_train], held_out[:num_held_out]
    texts = Texts(folder / "train.jsonl", folder / "held-out.jsonl", folder / "choices.jsonl")
    _write(texts.train, train)
    _write(texts.held_out, held_out)
    _write(
        texts.choices, [choice for number in range(len(held_out)) for choice in _choices(held_out, number)]
    )
    return texts


Pair = tuple[str, str]
"""Question and answer."""


def _choices(pairs: list[Pair], number: int) -> list[Pair]:
    """The question with its own answer and with those of the questions a quarter, a half, ... further on."""
    places = [number + index * len(pairs) // NUM_CHOICES for index in range(NUM_CHOICES)]
    answers = [pairs[place % len(pairs)][1] for place in places]
    return [(question, answer) for question in (pairs[number][0], _ANY_QUESTION) for answer in answers]


def _write(path: Path, pairs: list[Pair]) -> None:
    rows = [
        {"conversations": [{"from": "user", "value": question}, {"from": "assistant", "value": answer}]}
        for question, answer in pairs
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@cache
def _pairs() -> tuple[Pair, ...]:
    """All documented names of the library, each answer once, in the order of the files."""
    found: dict[str, str] = {}
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py")]):
        module = ".".join(path.relative_to(library).with_suffix("").parts)
        if module.startswith(_LEFT_OUT):
            continue
        for name, text in _documented(path):
            found.setdefault(text, f"What does {module}.{name} do?")
    return tuple((question, answer) for answer, question in found.items())


def _documented(path: Path) -> Iterator[tuple[str, str]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for name, node in _definitions(tree, ""):
        text = ast.get_docstring(node)
        if text and len(text) >= _FEWEST_CHARS:
            yield name, _beginning(text)


def _definitions(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from _definitions(node, f"{prefix}{node.name}.")


def _beginning(text: str) -> str:
    """Whole words up to the limit, without the layout."""
    words = " ".join(text.split())
    return words if len(words) <= _ANSWER_CHARS else words[:_ANSWER_CHARS].rsplit(" ", 1)[0]
