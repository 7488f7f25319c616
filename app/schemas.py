"""From a row of a data set to a conversation: the OpenThoughts and the MedQA schema."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from layercheck.errors import ConfigError

Message = dict[str, str]
"""`role` (system, user or assistant) and `content`."""
Reader = Callable[[dict[str, Any]], list[Message]]

NEEDED = {
    "openthoughts": ("conversations",),
    "medqa": ("question", "options", "answer"),
    "medqa_hf": ("sent1", "ending0", "ending1", "label"),
    "bigbio_qa": ("question", "choices", "answer"),
}
"""Schema -> columns without which it cannot be read. The last three hold the same kind of rows: an exam."""
_ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


class RowError(ValueError):
    """A row does not follow its schema; the caller knows file and row number."""


def choose_schema(columns: list[str], wanted: str, source: str) -> str:
    """The schema to read by.

    Args:
        columns: columns that the source has.
        wanted: `auto` or a key of NEEDED.
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


def place_system(talk: list[Message], choice: str) -> list[Message]:
    """The conversation with its system prompt kept, merged into the first user turn, or dropped."""
    if choice == "keep" or talk[0]["role"] != "system":
        return talk
    first, *rest = talk
    if choice == "drop" or not rest or rest[0]["role"] != "user":
        return rest
    return [{"role": "user", "content": f"{first['content']}\n\n{rest[0]['content']}"}, *rest[1:]]


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


@dataclass(frozen=True, slots=True)
class Exam:
    """A question with its possible replies, worded as in training; `right` is an index of `replies`."""

    question: str
    replies: tuple[str, ...]
    right: int


def read_exam(row: dict[str, Any]) -> Exam:
    """One row of `medqa`, `medqa_hf` or `bigbio_qa`.

    MedQA has `question`, `options` (dict, list of texts or of {key, value}), `answer`, perhaps `answer_idx`.
    """
    row = _as_medqa(row)
    options = read_options(row.get("options"))
    lines = [str(row["question"]), ""] + [f"{key}. {text}" for key, text in options.items()]
    replies = tuple(f"{key}. {text}" for key, text in options.items())
    return Exam("\n".join(lines), replies, list(options).index(answer_letter(row, options)))


def read_medqa(row: dict[str, Any]) -> list[Message]:
    """An exam as a conversation: the question with its options, and the right reply."""
    exam = read_exam(row)
    return [
        {"role": "user", "content": exam.question},
        {"role": "assistant", "content": exam.replies[exam.right]},
    ]


def _as_medqa(row: dict[str, Any]) -> dict[str, Any]:
    """The public variants of the same exam: `sent1, ending0.., label` and `choices`."""
    if "sent1" in row:
        endings = [row[f"ending{index}"] for index in range(10) if row.get(f"ending{index}") is not None]
        label = row["label"]
        if not isinstance(label, int) or not 0 <= label < len(endings):
            raise RowError(f"label={label!r} is none of the {len(endings)} endings")
        return {"question": row["sent1"], "options": endings, "answer_idx": _letter(label)}
    return row | {"options": row["choices"]} if "choices" in row else row


def _letter(index: int) -> str:
    return chr(ord("A") + index)


def read_options(options: Any) -> dict[str, str]:
    """Letter -> text, in order. Arrow fills the keys that a row lacks with None; these are dropped."""
    if isinstance(options, list) and options and isinstance(options[0], dict):
        options = {item.get("key"): item.get("value") for item in options}
    elif isinstance(options, list):
        options = {_letter(index): text for index, text in enumerate(options)}
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


EXAMS = ("medqa", "medqa_hf", "bigbio_qa")
READERS: dict[str, Reader] = {"openthoughts": read_openthoughts} | dict.fromkeys(EXAMS, read_medqa)
