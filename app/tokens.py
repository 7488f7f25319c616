"""From conversations to token documents: chat template, labels on answers only."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from app import bundled
from app.config import Config
from app.schemas import Message
from layercheck.errors import ConfigError

IGNORED = -100
"""Label of a token that carries no loss."""
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS_PER_CALL = 256


@dataclass(frozen=True, slots=True)
class Document:
    """One conversation. `labels[i]` is `input_ids[i]` on an answer and IGNORED elsewhere; never at 0."""

    input_ids: list[int]
    labels: list[int]


@dataclass(slots=True)
class Counts:
    """What happened to the conversations, for the job log."""

    documents: int = 0
    truncated: int = 0
    truncated_tokens: int = 0
    no_answer: int = 0
    """Left out: no answer, or none within `seq_len`."""


def load_tokenizer(config: Config, folder: Path) -> Any:
    """The tokenizer of a run; it always has a chat template and a padding token.

    Args:
        config: names the tokenizer.
        folder: where the bundled tokenizer was built.

    Raises:
        ConfigError: see `read_tokenizer`.
    """
    name = config.model.tokenizer_name
    place = str(bundled.build_tokenizer(folder, config.model.vocab_size)) if name == "bundled" else name
    return read_tokenizer(place, f"model.tokenizer={name!r}", config.model.chat_template)


def read_tokenizer(place: str, what: str, chat_template: str | None = None) -> Any:
    """A fast tokenizer with a chat template and a padding token.

    Args:
        place: folder or hub id.
        what: names it in an error.
        chat_template: `chatml`, a Jinja file, or None for the tokenizer's own.

    Raises:
        ConfigError: it cannot be loaded, has no chat template, or is not a fast one (labels need character
            offsets).
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(place)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{what} cannot be loaded: {error}") from None
    if not tokenizer.is_fast:
        raise ConfigError(f"{what} has no fast version (tokenizer.json); convert it first")
    if chat_template is not None:
        tokenizer.chat_template = _template(chat_template)
    if tokenizer.chat_template is None:
        raise ConfigError(
            f"{what} has no chat template, as is usual for a base model: set model.chat_template to chatml "
            "or to a Jinja file, or take the tokenizer of the instruct model"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _template(choice: str) -> str:
    if choice == "chatml":
        return _CHATML
    try:
        return Path(choice).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"model.chat_template={choice!r} is neither chatml nor a file: {error}") from None


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """Changes when the ids of a text or the chat template do."""
    content = tokenizer.backend_tokenizer.to_str() + str(tokenizer.chat_template)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def documents(
    talks: Iterable[list[Message]], tokenizer: Any, seq_len: int, counts: Counts
) -> Iterator[Document]:
    """Tokenised conversations of at most `seq_len` tokens (the end is cut off and counted)."""
    talks = iter(talks)
    while some := list(islice(talks, _TEXTS_PER_CALL)):
        for document in tokenised(some, tokenizer):
            kept = cut(document, seq_len, counts)
            if kept is not None:
                yield kept


def tokenised(talks: list[list[Message]], tokenizer: Any) -> list[Document]:
    """Conversations as token documents, whole, whatever their length."""
    rendered = [render(talk, tokenizer) for talk in talks]
    encoded = tokenizer(
        [text for text, _ in rendered],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
    )
    parts = zip(encoded["input_ids"], encoded["offset_mapping"], rendered, strict=True)
    return [Document(ids, _labels(ids, offsets, spans)) for ids, offsets, (_, spans) in parts]


def render(talk: list[Message], tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The text of a conversation and the character spans of its answers.

    An answer is what the template adds to the text that ends with the generation prompt. Templates that
    rewrite earlier turns (dropping their reasoning) give no such span for these; only the rest is trained on.
    """
    whole = _apply(tokenizer, talk, prompt=False)
    spans = []
    for index, message in enumerate(talk):
        if message["role"] != "assistant":
            continue
        before = _apply(tokenizer, talk[:index], prompt=True)
        until = _apply(tokenizer, talk[: index + 1], prompt=False)
        if until.startswith(before) and whole.startswith(until):
            spans.append((len(before), len(until)))
    return whole, spans


def _apply(tokenizer: Any, talk: list[Message], *, prompt: bool) -> str:
    from jinja2 import TemplateError

    try:
        return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=prompt))
    except TemplateError as error:
        roles = [message["role"] for message in talk]
        raise ConfigError(
            f"the chat template refuses a conversation of the roles {roles}: {error}; set data.system to "
            "merge or drop if it knows no system role, or choose another model.chat_template"
        ) from None


def _labels(ids: list[int], offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[int]:
    labels = [
        token if any(begin <= start and end <= stop for begin, stop in spans) else IGNORED
        for token, (start, end) in zip(ids, offsets, strict=True)
    ]
    # In a packed sequence the token before position 0 belongs to another document: nothing to learn from it.
    return [IGNORED, *labels[1:]]


def cut(document: Document, seq_len: int, counts: Counts) -> Document | None:
    """A document of at most `seq_len` tokens, None if it has no answer in them; both are counted."""
    counts.documents += 1
    over = len(document.input_ids) - seq_len
    if over > 0:
        counts.truncated += 1
        counts.truncated_tokens += over
        document = Document(document.input_ids[:seq_len], document.labels[:seq_len])
    if all(label == IGNORED for label in document.labels):
        counts.no_answer += 1
        return None
    return document
