"""Real input that needs no network: the language reference that CPython carries, and a tokenizer for it."""

import hashlib
import json
import os
import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import Qwen2Tokenizer

SYSTEM = "You answer questions about the Python language from its reference."
PAD, END = "<|pad|>", "<|end|>"
SPECIAL_TOKENS = (PAD, END, "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
_ANSWER_CHARS = 120
_TOKENIZER_VERSION = 2


def rows() -> list[dict[str, Any]]:
    """The reference as conversations in the OpenThoughts schema, some 3,000, in a fixed order."""
    return [row for topic in sorted(topics) for row in _topic_rows(topic, topics[topic])]


def _topic_rows(topic: str, text: str) -> list[dict[str, Any]]:
    found = []
    for part, answer in enumerate(_pieces(text), start=1):
        question = f"What does the reference say about {topic.replace('-', ' ')}, part {part}?"
        talk = [{"from": "user", "value": question}, {"from": "assistant", "value": answer}]
        found.append({"system": SYSTEM, "conversations": talk})
    return found


def _pieces(text: str) -> list[str]:
    """Whole lines, collected until an answer is long enough; headings' rules and empty lines left out."""
    pieces, current = [], ""
    for line in text.splitlines():
        if not line.strip() or not line.strip("*=-~^ "):
            continue
        current += line + "\n"
        if len(current) >= _ANSWER_CHARS:
            pieces.append(current.rstrip("\n"))
            current = ""
    return [*pieces, current.rstrip("\n")] if current else pieces


def fingerprint() -> str:
    """Changes when the text does; CPython versions carry different ones."""
    return hashlib.sha256(json.dumps(rows()).encode()).hexdigest()[:16]


def build_tokenizer(folder: Path, vocab_size: int) -> Path:
    """Trains the byte-level BPE tokenizer and saves it like any Hugging Face tokenizer.

    The same text and size give the same files. Only one process may call it for one folder at a time.

    Returns:
        The tokenizer folder, below `folder`; an existing one is reused.
    """
    target = folder / f"tokenizer-{fingerprint()}-{vocab_size}-v{_TOKENIZER_VERSION}"
    if target.is_dir():
        return target
    # A crash while files are written leaves the temporary folder, never a half tokenizer under the name.
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _train(vocab_size).save_pretrained(temporary)
    temporary.rename(target)
    return target


def _train(vocab_size: int) -> Qwen2Tokenizer:
    # A Qwen2 tokenizer, because transformers loads the tokenizer of any folder with a Qwen2 model as one: one
    # that splits words in its own way would give other ids there, without a word.
    rules = Qwen2Tokenizer().backend_tokenizer
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [SYSTEM] + [turn["value"] for row in rows() for turn in row["conversations"]]
    tokenizer.train_from_iterator(texts, trainer)
    learnt = json.loads(tokenizer.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learnt["vocab"],
        merges=[tuple(pair) for pair in learnt["merges"]],
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=list(SPECIAL_TOKENS[2:]),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
