"""From a row of a data set to a conversation: the OpenThoughts and the MedQA schema."""

from collections.abc import Callable
from typing import Any

from layercheck.errors import ConfigError

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""
Reader = Callable[[dict[str, Any]], list[Message]]

NEEDED = {"openthoughts": ("conversations",), "medqa": ("question", "options", "answer")}
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


class RowError(ValueError):
    """A row does not follow its schema; the caller knows file and row number."""


def choose_schema(columns: list[str], wanted: str, source: str) -> str:
    """The schema to read by.

    Args:
        columns: columns that the source has.
        wanted: `auto`, `openthoughts` or `medqa`.
        source: named in the error.

    Raises:
        ConfigError: a needed column is missing; names the source, the columns found and those needed.
    """
    candidates = [wanted] if wanted != "auto" else list(NEEDED)
    for schema in candidates:
        if set(NEEDED[schema]) <= set(columns):
            return schema
    needed = " or ".join(f"{list(NEEDED[schema])} ({schema})" for schema in candidates)
    raise ConfigError(
        f"data.source={source!r} has the columns {sorted(columns)}, needed are {needed}; "
        "choose another file or set data.schema",
        columns=sorted(columns),
    )


def read_openthoughts(row: dict[str, Any]) -> list[Message]:
    """`system` (optional) and `conversations: [{from, value}]`; roles user|human and assistant|gpt."""
    turns = row.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise RowError(f"conversations={turns!r} must be a list of turns")
    messages = [_turn(turn) for turn in turns]
    if row.get("system"):
        messages.insert(0, {"role": "system", "content": row["system"]})
    return messages


def _turn(turn: Any) -> Message:
    try:
        role, content = turn["from"], turn["value"]
    except (KeyError, TypeError):
        raise RowError(f"turn {turn!r} must have the keys from and value") from None
    if role not in _ROLES or not isinstance(content, str):
        raise RowError(
            f"turn with from={role!r}, value of {type(content).__name__}: roles are {list(_ROLES)}"
        )
    return {"role": _ROLES[role], "content": content}


def read_medqa(row: dict[str, Any]) -> list[Message]:
    """`question`, `options` (dict, list of texts or of {key, value}), `answer`, perhaps `answer_idx`."""
    options = read_options(row.get("options"))
    letter = answer_letter(row, options)
    lines = [str(row["question"]), ""] + [f"{key}. {text}" for key, text in options.items()]
    return [
        {"role": "user", "content": "\n".join(lines)},
        {"role": "assistant", "content": f"{letter}. {options[letter]}"},
    ]


def read_options(options: Any) -> dict[str, str]:
    """Letter -> text, in order. Arrow fills the keys that a row lacks with None; these are dropped."""
    if isinstance(options, list) and options and isinstance(options[0], dict):
        options = {item.get("key"): item.get("value") for item in options}
    elif isinstance(options, list):
        options = {chr(ord("A") + index): text for index, text in enumerate(options)}
    if not isinstance(options, dict):
        raise RowError(f"options={options!r} must be a dict or a list")
    found = {str(key): str(text) for key, text in options.items() if text is not None}
    if len(found) < 2:
        raise RowError(f"options={options!r} must name at least two answers")
    return found


def answer_letter(row: dict[str, Any], options: dict[str, str]) -> str:
    """The letter of the right option, from `answer_idx` or else from the text of `answer`."""
    letter = row.get("answer_idx")
    if letter is not None:
        if str(letter) not in options:
            raise RowError(f"answer_idx={letter!r} is none of the options {list(options)}")
        return str(letter)
    answer = row.get("answer")
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    for key, text in options.items():
        if text == answer:
            return key
    raise RowError(f"answer={answer!r} is none of the options {list(options.values())}")


READERS: dict[str, Reader] = {"openthoughts": read_openthoughts, "medqa": read_medqa}
